"""Whether an installed target library has the seams, told from its sources alone."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.manifest import ANY_SIGNATURE, Manifest, Seam, covers

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Installed:
    """A target library's source tree; root is the package directory."""

    package: str
    version: Version
    root: Path


@dataclass(frozen=True)
class SeamStatus:
    """What was expected of one seam, what the sources have, and whether they agree."""

    seam: Seam
    expected: str
    found: str
    ok: bool

    def as_json(self) -> dict[str, str | bool]:
        """What reports say of it, as JSON-able data."""
        return {
            "id": self.seam.id,
            "target": self.seam.target,
            "process": self.seam.process,
            "runner": self.seam.runner,
            "ok": self.ok,
            "expected": self.expected,
            "found": self.found,
        }


@dataclass(frozen=True)
class Verdict:
    """The decision for all seams of one library.

    problem: the reason to refuse, or ''. aside: the reason to leave the library as it is, or ''.
    """

    installed: Installed
    statuses: tuple[SeamStatus, ...]
    tested: bool
    problem: str
    aside: str = ""

    @property
    def seams(self) -> tuple[Seam, ...]:
        """The seams of this release."""
        return tuple(status.seam for status in self.statuses)


def locate(package: str) -> Installed | None:
    """Find a library without importing it; None if it is not installed.

    Raises SeamMismatch if its version cannot be told or is not a PEP 440 version.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return Installed(package, read_version(package, root), root)


def read_version(package: str, root: Path) -> Version:
    """Read the version a source tree states in ``_version.py``, else its distribution's.

    Raises SeamMismatch naming package, value and what was expected.
    """
    path = root / "_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    stated = re.search(r"""^__version__ = (?:version = )?['"]([^'"]+)['"]""", text, re.MULTILINE)
    if stated:
        value = stated[1]
    else:
        try:
            value = distribution_version(package)
        except PackageNotFoundError as error:
            raise SeamMismatch(
                f"{package} in {root}: version unknown; expected _version.py or the metadata of "
                f"distribution {package}"
            ) from error
    try:
        return Version(value)
    except InvalidVersion as error:
        raise SeamMismatch(f"{package} version {value!r}: expected a PEP 440 version") from error


def check(manifest: Manifest, installed: Installed, *, alone: bool = False) -> Verdict:
    """Compare every seam of the installed release before anything is patched.

    alone: look at its sources only, not at what else is installed here.
    """
    version = installed.version
    if aside := _aside(manifest, version, alone=alone):
        return Verdict(installed, (), manifest.is_tested(version), "", aside)
    statuses = tuple(_check_seam(seam, installed) for seam in manifest.seams_in(version))
    problem = ""
    if not covers(manifest.supported, version) or not statuses:
        problem = (
            f"{installed.package} {version}: no seams are known for this release; "
            f"expected {installed.package} {manifest.supported}"
        )
    elif bad := [status for status in statuses if not status.ok]:
        problem = "\n".join(
            f"{installed.package} {version}: seam {s.seam.id} differs ({s.seam.target}): "
            f"expected {s.expected}; found {s.found}"
            for s in bad
        )
    return Verdict(installed, statuses, manifest.is_tested(version), problem)


def _aside(manifest: Manifest, version: Version, *, alone: bool) -> str:
    if manifest.right is not None and covers(manifest.right, version):
        return f"{manifest.package} {version} needs no patch"
    if not alone and manifest.displaced_by and importlib.util.find_spec(manifest.displaced_by):
        return f"{manifest.displaced_by} is installed and runs in the place of {manifest.package}"
    return ""


def _check_seam(seam: Seam, installed: Installed) -> SeamStatus:
    expected = _normal_signature(_parse_function(f"def f{seam.signature}: ..."))
    source = read_module(installed, seam.module)
    function = source and find_function(source, seam.qualname)
    if not function:
        return SeamStatus(seam, expected, f"no {seam.qualname} in {seam.module}", ok=False)
    found = _normal_signature(function)
    missing = [f"no call of {name} in its body" for name in seam.calls if not calls(function, name)]
    for module in seam.importers_in(installed.version):
        text = read_module(installed, module)
        is_package = installed.root.joinpath(*module.split(".")[1:]).is_dir()
        if text is None or not imports_by_value(text, module, seam, is_package=is_package):
            missing.append(f"no from-import of it in {module}")
    ok = expected in (found, ANY_SIGNATURE) and not missing
    return SeamStatus(seam, expected, "; ".join([found, *missing]), ok)


def read_module(installed: Installed, module: str) -> str | None:
    """The source text of a module of the library, None if it has no such module."""
    relative = module.split(".")[1:]
    for path in (
        installed.root.joinpath(*relative).with_suffix(".py"),
        installed.root.joinpath(*relative, "__init__.py"),
    ):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def unlisted_importers(manifest: Manifest, installed: Installed) -> list[tuple[Seam, str]]:
    """Modules that import a seam's function by value, at top level, and are in no manifest."""
    functions = [seam for seam in manifest.seams_in(installed.version) if seam.kind == "function"]
    found = []
    for path in sorted(installed.root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        is_package = path.name == "__init__.py"
        relative = path.relative_to(installed.root.parent).with_suffix("")
        module = ".".join(relative.parts[: -1 if is_package else None])
        found += [
            (seam, module)
            for seam in functions
            if seam.qualname in source
            and module not in (seam.module, *seam.importers_in(installed.version))
            and imports_by_value(source, module, seam, is_package=is_package)
        ]
    return found


def find_function(source: str, qualname: str) -> FunctionNode | None:
    """The definition of ``function`` or ``Class.method``, None if there is none.

    Only the lines of the definition are parsed where they can be told apart by indentation: the
    whole of gpu_model_runner.py takes 90 ms to parse, in every process. Any doubt parses it all.
    """
    node = _slice_function(source, qualname)
    if node is not None:
        return node
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return None
    *outer, name = qualname.split(".")
    for class_name in outer:
        classes = [n for n in body if isinstance(n, ast.ClassDef) and n.name == class_name]
        body = classes[-1].body if classes else []
    functions = [n for n in body if isinstance(n, FunctionNode) and n.name == name]
    return functions[-1] if functions else None


def _slice_function(source: str, qualname: str) -> FunctionNode | None:
    *outer, name = qualname.split(".")
    indent = ""
    for class_name in outer:
        source = _only_block(source, rf"class {class_name}\b", indent) or ""
        indent += "    "
    text = _only_block(source, rf"(?:async )?def {name}\(", indent)
    try:
        return _parse_function(textwrap.dedent(text)) if text else None
    except SyntaxError:
        return None


def _only_block(source: str, header: str, indent: str) -> str | None:
    starts = list(re.finditer(rf"^{indent}{header}", source, re.MULTILINE))
    if len(starts) != 1 or _maybe_in_string(source, starts[0].start()):
        return None
    start = starts[0].start()
    end = re.compile(rf"^ {{0,{len(indent)}}}[^\s)#]", re.MULTILINE).search(source, starts[0].end())
    return source[start : end.start() if end else len(source)]


def _maybe_in_string(source: str, position: int) -> bool:
    """Whether a triple-quoted string may be open here: a doubt, not a finding."""
    return any(source.count(quotes, 0, position) % 2 for quotes in ('"""', "'''"))


def _parse_function(text: str) -> FunctionNode:
    statements = ast.parse(text).body
    if len(statements) != 1 or not isinstance(statements[0], FunctionNode):
        raise SyntaxError("expected exactly one function")
    return statements[0]


def _normal_signature(function: FunctionNode) -> str:
    arguments = function.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{prefix}({ast.unparse(arguments)})"


def calls(function: FunctionNode, dotted: str) -> bool:
    """Whether the body calls this dotted name."""
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == dotted
        for node in ast.walk(function)
    )


def imports_by_value(source: str, importer: str, seam: Seam, *, is_package: bool = False) -> bool:
    """Whether `importer` has a from-import of the seam's function, by its name, at top level.

    is_package: whether the importer's source is an ``__init__.py``.
    """
    parts = importer.split(".")
    package = parts if is_package else parts[:-1]
    spellings = [seam.module, *_relative_spellings(package, seam.module)]
    return any(
        seam.qualname in names
        for spelling in spellings
        for names in _from_imports(source, spelling)
    )


def _relative_spellings(package: list[str], module: str) -> Iterator[str]:
    """``.utils`` for a.b.utils in package a.b, ``..utils`` in package a.b.c, and so on."""
    for up in range(len(package)):
        base = ".".join(package[: len(package) - up]) + "."
        if module.startswith(base):
            yield "." * (up + 1) + module[len(base) :]


def _from_imports(source: str, module: str) -> Iterator[set[str]]:
    """The unaliased names of each such statement, which ends with the first line that parses."""
    for match in re.finditer(rf"^from {re.escape(module)} import ", source, re.MULTILINE):
        if _maybe_in_string(source, match.start()):
            continue
        text = ""
        for line in source[match.start() :].splitlines(keepends=True):
            text += line
            try:
                statement = ast.parse(text).body[0]
            except SyntaxError:
                continue
            if isinstance(statement, ast.ImportFrom):
                yield {a.name for a in statement.names if a.asname in (None, a.name)}
            break
