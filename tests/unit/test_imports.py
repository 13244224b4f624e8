"""Modules import what the design lets them, in the text and in a fresh interpreter."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.fresh import output
from tests.lanes import ROOT

PACKAGE = ROOT / "kvcached_patch"
OWN = {"kvcached_patch", "tomllib", *sys.stdlib_module_names}  # tomllib: from Python 3.11
# Part of the package -> the parts and the foreign libraries that it may import.
ALLOWED = {
    "errors": "",
    "core": "errors",
    "config": "system core errors",
    "memory": "core errors torch cuda",
    "pool": "memory core errors",
    "ledger": "ledger_account ledger_file system core errors",
    "ledger_account": "ledger_file system core errors",
    "ledger_file": "system core errors",
    "system": "errors",
    "api": "ledger ledger_account ledger_file system core config errors",
    "cli_ledger": "api cli_text core rich",
    "cli_text": "",
    "seams": "core errors packaging tomli",
    "seams.apply": "core errors seams packaging wrapt",
    "seams.check": "core errors seams packaging",
    "seams.sources": "seams packaging",
    "_startup": "config seams ledger core errors wrapt",
    "engines": "pool ledger seams memory core config errors torch vllm",
    "engines.vllm_metrics": "ledger system seams core config errors prometheus_client vllm",
    "engines.maxtext": "jax seams errors packaging",
    "engines.maxtext_pools": "jax seams core config errors maxtext tpu_inference",
    "engines.tpu_inference": "jax flax tpu_inference vllm",
    "jax": "core errors jax",
    "jax.pool_scan": "core errors jax flax",
    "doctor": "_startup config ledger seams errors packaging",
    "cli": "api doctor cli_ledger cli_text _startup seams core config errors",
    "__main__": "cli",
}


def modules() -> dict[str, Path]:
    """Every module of the package, named from inside it."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    found.pop("")  # the package itself holds the version only
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module or name that a file imports, wherever in it, by its full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def foreign(names: Iterable[str]) -> set[str]:
    """The top-level packages among these that are neither Python's own nor ours."""
    return {name.partition(".")[0] for name in names} - OWN


def parts(names: Iterable[str]) -> set[str]:
    """The parts of our package among these; its version is free to all."""
    ours = {name.split(".")[1] for name in names if name.startswith("kvcached_patch.")}
    return ours - {"__version__"}


def allowed(module: str) -> set[str]:
    part = module.partition(".")[0]
    return {part, *ALLOWED.get(module, ALLOWED[part]).split()}


def reachable(module: str) -> set[str]:
    """What may be loaded by importing a module, through whatever it imports."""
    found: set[str] = set()
    ahead = allowed(module)
    while ahead:
        found |= ahead
        ahead = {name for each in ahead & ALLOWED.keys() for name in allowed(each)} - found
    return found


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_it_may(module: str) -> None:
    names = set(imports(modules()[module]))
    assert parts(names) | foreign(names) <= allowed(module)


def test_the_package_itself_imports_nothing() -> None:
    assert list(imports(PACKAGE / "__init__.py")) == []


@pytest.mark.parametrize(
    ("library", "places"),
    [
        ("torch", ("engines.", "memory")),
        ("vllm", ("engines.", "memory")),
        ("jax", ("jax", "engines.maxtext", "engines.tpu_inference")),
        ("wrapt", ("_startup", "seams.apply")),
        ("prometheus_client", ("engines.vllm_metrics",)),
    ],
)
def test_each_library_has_its_place(library: str, places: tuple[str, ...]) -> None:
    users = [name for name, path in modules().items() if library in foreign(imports(path))]
    assert [name for name in users if not name.startswith(places)] == []


@pytest.mark.parametrize("part", ["_startup", "config", "errors", "core", "memory", "seams"])
def test_engines_are_named_in_strings_only(part: str) -> None:
    for name, path in modules().items():
        if name.partition(".")[0] == part:
            assert "engines" not in parts(imports(path)), name


LOADED = """
import importlib, sys
before = set(sys.modules)
importlib.import_module("kvcached_patch." + sys.argv[1])
print(*sorted(set(sys.modules) - before))
"""
# Module -> the foreign libraries that importing it loads, tomli being Python 3.10's own TOML.
FRESH = {
    "errors": "",
    "core": "",
    "core.layers": "",
    "config": "",
    "_startup": "",
    "seams": "",
    "seams.manifest": "packaging",
    "seams.check": "packaging",
    "seams.sources": "packaging",
    "seams.apply": "packaging wrapt",
    "doctor": "packaging",
    "api": "",
    "cli": "",
}


@pytest.mark.parametrize("module", FRESH)
def test_what_a_fresh_interpreter_loads(module: str) -> None:
    loaded = output("-c", LOADED, module).split()
    assert f"kvcached_patch.{module}" in loaded
    assert parts(loaded) <= reachable(module)
    compiled = {name for name in foreign(loaded) if name.endswith("__mypyc")}
    assert foreign(loaded) - {"tomli", *compiled} == set(FRESH[module].split())
