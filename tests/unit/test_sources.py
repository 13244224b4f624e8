"""What the seam check reads in a source file is what Python would read there."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import tarfile
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvcached_patch.seams.check import check
from kvcached_patch.seams.sources import (
    FunctionNode,
    find_function,
    read_module,
)
from tests.trees import installed, manifest, seam

DEFINED = {
    "plain": ("def f(a, b=1):\n    return a\n", "f(a, b=1)"),
    "one line": ("def f(a): return a\ndef g(b): pass\n", "f(a)"),
    "async": ("async def f(a):\n    await a\n", "async f(a)"),
    "decorated": ("@deco\n@deco(1)\ndef f(a):\n    pass\n", "f(a)"),
    "split signature": ("def f(\n    a,  # (\n    b=')',\n) -> None:\n    pass\n", "f(a, b=')')"),
    "unindented comment": ("def f(a):\n# odd\n    return a\n", "f(a)"),
    "unindented string": ("def f(a):\n    '''\nf\n    '''\n    return a\n", "f(a)"),
    "twice": ("def f(a):\n    pass\n\ndef f(b):\n    pass\n", "f(b)"),
    "twice, async last": ("def f(a):\n    pass\n\nasync def f(b):\n    pass\n", "async f(b)"),
    "also in a class": ("class A:\n    def f(self): pass\ndef f(a): pass\n", "f(a)"),
    "also nested": ("def g():\n    def f(b):\n        pass\ndef f(a):\n    pass\n", "f(a)"),
    "also in a string": ("'''\ndef f(b):\n    pass\n'''\ndef f(a):\n    pass\n", "f(a)"),
    "longer name": ("def ff(b):\n    pass\ndef f(a):\n    pass\n", "f(a)"),
    "spaced": ("def  f (a) :\n  pass\n", "f(a)"),
    "tabs": ("def f(a):\n\tif a:\n\t\treturn 1\n", "f(a)"),
    "windows": ("def f(a):\r\n    pass\r\nx = 1\r\n", "f(a)"),
}
ABSENT = {
    "nested": "def g():\n    def f(a):\n        pass\n",
    "in a class": "class A:\n    def f(a):\n        pass\n",
    "conditional": "if X:\n    def f(a):\n        pass\n",
    "in a string": "'''\ndef f(a):\n    pass\n'''\n",
    "assigned": "f = lambda a: a\n",
    "a class": "class f:\n    def __init__(self): pass\n",
    "imported": "from g import f\n",
    "commented out": "# def f(a):\n#     pass\n",
    "nothing": "",
    "no Python": "def f(a) pass\n",
}
METHODS = {
    "plain": ("class A(B):\n    def m(self): pass\n    def n(self): pass\n", "A.m", "m(self)"),
    "async": ("class A:\n    x = 1\n    async def m(self): pass\n", "A.m", "async m(self)"),
    "other class": ("class B:\n    def m(b): pass\nclass A:\n    def m(a): pass\n", "A.m", "m(a)"),
    "like-named class": (
        "class AA:\n    def m(b): pass\nclass A:\n    def m(a): pass\n",
        "A.m",
        "m(a)",
    ),
    "class twice": ("class A:\n    def m(a): pass\nclass A:\n    def m(b): pass\n", "A.m", "m(b)"),
    "two spaces": ("class A:\n  def m(self):\n    pass\n", "A.m", "m(self)"),
    "nested class": ("class A:\n    class B:\n        def m(self): pass\n", "A.B.m", "m(self)"),
    "docstring": ('class A:\n    """A\n\nunindented\n    """\n    def m(a): pass\n', "A.m", "m(a)"),
    "overload": ("class A:\n    @o\n    def m(a): pass\n    def m(b): pass\n", "A.m", "m(b)"),
    "only inherited": ("class B:\n    def m(self): pass\nclass A(B):\n    pass\n", "A.m", None),
    "only nested": ("class A:\n    class B:\n        def m(self): pass\n", "A.m", None),
    "inner function": ("class A:\n    def n(self):\n        def m(): pass\n", "A.m", None),
    "second class lacks it": ("class A:\n    def m(a): pass\nclass A:\n    x = 1\n", "A.m", None),
    "in a docstring": ('class A:\n    """\n    def m(self):\n        pass\n    """\n', "A.m", None),
}


def shown(function: FunctionNode | None) -> str | None:
    if function is None:
        return None
    word = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{word}{function.name}({ast.unparse(function.args)})"


@pytest.mark.parametrize(("source", "expected"), DEFINED.values(), ids=DEFINED)
def test_a_module_level_function_is_found(source: str, expected: str) -> None:
    assert shown(find_function(source, "f")) == expected


@pytest.mark.parametrize("source", ABSENT.values(), ids=ABSENT)
def test_what_is_no_module_level_function_is_not_found(source: str) -> None:
    assert shown(find_function(source, "f")) is None


@pytest.mark.parametrize(("source", "name", "expected"), METHODS.values(), ids=METHODS)
def test_a_method_is_looked_for_in_its_own_class(
    source: str, name: str, expected: str | None
) -> None:
    assert shown(find_function(source, name)) == expected


def functions_of(body: list[ast.stmt], outer: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """Every function that a seam could name; of several with one name, the last."""
    named = {node.name: node for node in body if hasattr(node, "name")}
    for name, node in named.items():
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node.body, f"{outer}{name}.")
        elif isinstance(node, FunctionNode):
            yield f"{outer}{name}", node


def normal(function: FunctionNode | None) -> str:
    """The code, but for decorators and for the indentation inside strings: a slice has neither."""
    assert function is not None
    function.decorator_list = []
    for node in ast.walk(function):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = re.sub(r"\n\s*", "\n", node.value)
    return ast.unparse(function)


@pytest.mark.parametrize("module", [argparse, ast, inspect, tarfile, textwrap, typing])
def test_a_slice_is_what_a_full_parse_gives(module: ModuleType) -> None:
    source = Path(inspect.getfile(module)).read_text(encoding="utf-8")
    expected = dict(functions_of(ast.parse(source).body))
    found = {name: find_function(source, name) for name in expected}
    assert len(expected) > 5
    assert {name: normal(node) for name, node in found.items()} == {
        name: normal(node) for name, node in expected.items()
    }


# An importer's file and source: whether it holds lib.deep.work:allocate under that name.
IMPORTS = {
    "absolute": ("user.py", "from lib.deep.work import allocate", True),
    "among others": ("user.py", "from lib.deep.work import a, allocate, b", True),
    "after code": ("user.py", "x = 1\nfrom lib.deep.work import allocate\ny = 2", True),
    "second statement": ("user.py", "from lib.deep.work import a\n" * 2, False),
    "two statements": (
        "user.py",
        "from lib.deep.work import a\nfrom lib.deep.work import allocate",
        True,
    ),
    "relative, same package": ("deep/user.py", "from .work import allocate", True),
    "relative, one up": ("deep/sub/user.py", "from ..work import allocate", True),
    "relative, from the root": ("user.py", "from .deep.work import allocate", True),
    "relative, other branch": ("other/user.py", "from ..deep.work import allocate", True),
    "relative, too near": ("other/user.py", "from .work import allocate", False),
    "relative, too far": ("deep/user.py", "from ..work import allocate", False),
    "a package, from inside": ("deep/__init__.py", "from .work import allocate", True),
    "a package, too far": ("deep/__init__.py", "from .deep.work import allocate", False),
    "parenthesised": ("user.py", "from lib.deep.work import (allocate)", True),
    "multi-line": ("user.py", "from lib.deep.work import (\n    a,\n    allocate,\n)", True),
    "commented": (
        "user.py",
        "from lib.deep.work import (  # noqa\n    a,  # no )\n    # b,\n    allocate,  # yes\n)",
        True,
    ),
    "only in a comment": (
        "user.py",
        "from lib.deep.work import (\n    a,\n    # allocate,\n)",
        False,
    ),
    "continued": ("user.py", "from lib.deep.work import a, \\\n    allocate", True),
    "under its own alias": ("user.py", "from lib.deep.work import allocate as allocate", True),
    "under another name": ("user.py", "from lib.deep.work import allocate as a", False),
    "another as it": ("user.py", "from lib.deep.work import a as allocate", False),
    "of another module": ("user.py", "from lib.deep.work2 import allocate", False),
    "of a submodule": ("user.py", "from lib.deep.work.sub import allocate", False),
    "of a longer name": ("user.py", "from lib.deep.work import allocate2", False),
    "as a module": ("user.py", "import lib.deep.work\nfrom lib.deep import work", False),
    "with a star": ("user.py", "from lib.deep.work import *", False),
    "in a function": ("user.py", "def f():\n    from lib.deep.work import allocate", False),
    "for types only": ("user.py", "if TYPE:\n    from lib.deep.work import allocate", False),
    "in a string": ("user.py", "'''\nfrom lib.deep.work import allocate\n'''", False),
    "commented out": ("user.py", "# from lib.deep.work import allocate", False),
    "broken": ("user.py", "from lib.deep.work import (allocate", False),
    "empty": ("user.py", "", False),
}


@pytest.mark.parametrize(("file", "source", "expected"), IMPORTS.values(), ids=IMPORTS)
def test_a_from_import_by_value(tmp_path: Path, file: str, source: str, expected: bool) -> None:
    importer = "lib." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    lib = installed(tmp_path, {"deep/work.py": "def allocate(plan): pass", file: source + "\n"})
    (status,) = check(manifest(seam("lib.deep.work:allocate", importers=[importer])), lib).statuses
    assert status.ok is expected
    assert status.found == ("(plan)" if expected else f"(plan); no from-import of it in {importer}")


def test_a_module_is_read_from_its_file_or_its_package(tmp_path: Path) -> None:
    files = {"__init__.py": "0", "a.py": "1", "b/__init__.py": "2", "b/c.py": "3", "d/x.txt": ""}
    lib = installed(tmp_path, files)
    modules = ("lib", "lib.a", "lib.b", "lib.b.c", "lib.d", "lib.d.e", "lib.a.b")
    assert [read_module(lib, name) for name in modules] == ["0", "1", "2", "3", None, None, None]
