"""A small real library to wrap, with modules that import its function by value."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.apply import arm
from kvcached_patch.seams.manifest import Seam
from tests.trees import seam, write

NAMES = ("work", "early", "late")
WORK = '''
def allocate(plan, size=1):
    """Allocate."""
    return ["stock", plan, size]

class Worker:
    def start(self, plan, *, limit=None):
        """Start."""
        return ["stock", plan, limit]
'''
USER = """
from .work import allocate

def use(plan):
    return allocate(plan)
"""
WRAPPERS = """
import functools, wrapt

def wrapper(wrapped, instance, args, kwargs):
    return [__name__, type(instance).__name__, *wrapped(*args, **kwargs)]

def plain(wrapped):
    @functools.wraps(wrapped)
    def call(*args, **kwargs):
        return [__name__, *wrapped(*args, **kwargs)]
    return call

def proxy(wrapped):
    return wrapt.FunctionWrapper(wrapped, wrapper)

def partial(wrapped):
    return functools.partial(wrapped, size=2)

def replaced(wrapped):
    return plain(len)
"""
_number = count()


def never(error: SeamMismatch) -> None:
    raise AssertionError("there is no conflict") from error


class Library:
    """A real package, imported as any other, whose name no other test uses."""

    def __init__(self, root: Path) -> None:
        self.name = f"library_{next(_number)}"
        self.ours, self.theirs = f"{self.name}_ours", f"{self.name}_theirs"
        files = {f"{self.name}/{name}.py": USER for name in ("early", "late")}
        files[f"{self.name}/work.py"] = WORK
        files |= {f"{self.ours}.py": WRAPPERS, f"{self.theirs}.py": WRAPPERS}
        write(root, files)

    def load(self, module: str) -> ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def foreign(self, kind: str, wrapped: Any) -> Any:
        """Another tool's wrapper around something."""
        return getattr(importlib.import_module(self.theirs), kind)(wrapped)

    def seams(self) -> list[Seam]:
        """A method, then a function that two modules import by value."""
        wrapper = f"{self.ours}:wrapper"
        importers = [f"{self.name}.early", (f"{self.name}.late", ">=2")]
        return [
            seam(f"{self.name}.work:Worker.start", wrapper=wrapper),
            seam(f"{self.name}.work:allocate", wrapper=wrapper, importers=importers),
        ]

    def arm(
        self, on_conflict: Callable[[SeamMismatch], None] = never, version: str = "2.0"
    ) -> None:
        """Arm both seams, as if this were that release."""
        arm(self.seams(), Version(version), on_conflict)


def held(*modules: ModuleType) -> list[Any]:
    """The objects that stand at every place a seam has in these modules."""
    functions = [vars(module)["allocate"] for module in modules]
    return functions + [vars(m.Worker)["start"] for m in modules if "Worker" in vars(m)]


def same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return [id(each) for each in left] == [id(each) for each in right]
