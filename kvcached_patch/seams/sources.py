"""What the sources of a library say, which is read without importing them."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kvcached_patch.seams.manifest import Seam

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Installed:
    """A target library's source tree; root is the package directory."""

    package: str
    version: Version
    root: Path


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


def class_source(source: str, name: str) -> str | None:
    """The text of a top-level class, None if there is not exactly one."""
    return _only_block(source, rf"class {name}\b", "")


def _slice_function(source: str, qualname: str) -> FunctionNode | None:
    *outer, name = qualname.split(".")
    indent = ""
    for class_name in outer:
        source = _only_block(source, rf"class {class_name}\b", indent) or ""
        indent += "    "
    text = _only_block(source, rf"(?:async )?def {name}\(", indent)
    try:
        return parse_function(textwrap.dedent(text)) if text else None
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


def parse_function(text: str) -> FunctionNode:
    """The one function that a text defines; raises SyntaxError if it is anything else."""
    statements = ast.parse(text).body
    if len(statements) != 1 or not isinstance(statements[0], FunctionNode):
        raise SyntaxError("expected exactly one function")
    return statements[0]


def normal_signature(function: FunctionNode) -> str:
    """Its parameters as Python spells them, without annotations."""
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
