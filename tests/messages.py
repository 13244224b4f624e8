"""Every text that our code says as a warning or an error, read off its sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path

from tests.lanes import ROOT

PACKAGE = ROOT / "kvcached_patch"
ERRORS = PACKAGE / "errors.py"
HOLE = "…"
# Where what an attribute holds is made: module, function, variable.
MADE_IN = {"verdict.problem": ("seams/check.py", "check", "problem")}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Message:
    """A text with a `HOLE` for everything that is only known when it is said."""

    path: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"

    @property
    def words(self) -> str:
        """What is the same whenever it is said."""
        return self.text.replace(HOLE, "")


def messages() -> list[Message]:
    """All of the package's, in the order of its files."""
    classes = [each for each in _parsed(ERRORS).body if isinstance(each, ast.ClassDef)]
    # One that has an __init__ of its own makes its text there.
    own = {each.name for each in classes if any(isinstance(node, Function) for node in each.body)}
    errors = {each.name for each in classes} - own
    return [
        message
        for path in sorted(PACKAGE.rglob("*.py"))
        for message in _of(path, {"__init__"} if path == ERRORS else errors)
    ]


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _of(path: Path, errors: set[str]) -> Iterator[Message]:
    module = _Module(path)
    for owner in module.owners:
        for node in _own(owner):
            if isinstance(node, ast.Call) and node.args and (kind := _kind(node.func, errors)):
                for text in module.texts(node.args[0], owner):
                    place = path.relative_to(ROOT).as_posix()
                    yield Message(place, node.lineno, kind, re.sub(rf"{HOLE}+", HOLE, text))


def _own(owner: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, or of a module, but for those of the functions inside."""
    for node in ast.iter_child_nodes(owner):
        if not isinstance(node, Function):
            yield node
            yield from _own(node)


def _kind(called: ast.expr, errors: set[str]) -> str:
    """What a call makes: one of our errors, or a line of the log; '' if neither."""
    if isinstance(called, ast.Attribute):
        levels = {"warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
        return levels.get(called.attr, called.attr if called.attr in errors else "")
    names = [node.id for node in ast.walk(called) if isinstance(node, ast.Name)]
    is_choice = isinstance(called, ast.Name | ast.IfExp)
    return " or ".join(name for name in names if name in errors) if is_choice else ""


class _Module:
    """A source file, whose expressions are read as the texts that they can be."""

    def __init__(self, path: Path) -> None:
        tree = _parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
        self.owners: list[ast.AST] = [tree, *functions]
        self.functions = {each.name: each for each in functions}

    def texts(self, node: ast.expr, owner: ast.AST) -> list[str]:
        """Each text that this can be, in the function `owner`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return [re.sub(r"%[sdr]", HOLE, node.value)]
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
            return ["".join(map(str, parts))]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            sides = [self.texts(side, owner) for side in (node.left, node.right)]
            return ["".join(both) for both in product(*sides)]
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, owner), *self.texts(node.orelse, owner)]
        if isinstance(node, ast.Name):
            return self._assigned(node.id, owner) or [HOLE]
        if isinstance(node, ast.Attribute) and (made := MADE_IN.get(ast.unparse(node))):
            path, function, variable = made
            there = _Module(PACKAGE / path)
            return there._assigned(variable, there.functions[function])
        if isinstance(node, ast.Call):
            return self._called(node, owner)
        return [HOLE]

    def _called(self, call: ast.Call, owner: ast.AST) -> list[str]:
        if isinstance(call.func, ast.Name) and call.func.id in self.functions:
            called = self.functions[call.func.id]
            values = [node.value for node in _own(called) if isinstance(node, ast.Return)]
            return [text for value in values if value for text in self.texts(value, called)]
        if isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Constant):
            parts = self._listed(call.args[0], owner)  # of a join
            if call.func.value.value == "\n":
                return list(chain(*parts))
            return [str(call.func.value.value).join(each) for each in product(*parts)]
        return [HOLE]

    def _listed(self, node: ast.expr, owner: ast.AST) -> list[list[str]]:
        """The texts of each item of a list."""
        if isinstance(node, ast.List):
            return [self.texts(item, owner) for item in node.elts]
        if isinstance(node, ast.BinOp):
            return [*self._listed(node.left, owner), *self._listed(node.right, owner)]
        return [self.texts(node.elt, owner) if isinstance(node, ast.ListComp) else [HOLE]]

    def _assigned(self, name: str, owner: ast.AST) -> list[str]:
        """What a variable of a function can hold, but for nothing."""
        values = [
            node.value
            for node in _own(owner)
            if isinstance(node, ast.Assign)
            and name in [target.id for target in node.targets if isinstance(target, ast.Name)]
        ]
        return [text for value in values for text in self.texts(value, owner) if text]
