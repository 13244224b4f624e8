"""Wrappers go in wherever a seam is held, and every original comes back."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import wrapt

from kvcached_patch.seams.apply import armed, restore, tally
from tests.library import NAMES, Library, held, same


@pytest.mark.parametrize("before", [(), ("work",), ("work", "early"), ("early",), NAMES])
def test_a_seam_is_wrapped_whenever_its_modules_are_imported(
    lib: Library, before: tuple[str, ...]
) -> None:
    for name in before:
        lib.load(name)
    lib.arm()
    work, early, late = map(lib.load, NAMES)
    assert work.Worker().start("p", limit=3) == [lib.ours, "Worker", "stock", "p", 3]
    assert work.allocate("p", size=2) == [lib.ours, "NoneType", "stock", "p", 2]
    assert early.use("p") == late.use("p") == [lib.ours, "NoneType", "stock", "p", 1]
    assert work.allocate is early.allocate is late.allocate
    assert [entry.applied for entry in armed()] == [True, True]


@pytest.mark.parametrize("before", [True, False])
def test_an_importer_may_be_complete_before_its_target(
    lib: Library, tmp_path: Path, before: bool
) -> None:
    with (tmp_path / lib.name / "work.py").open("a") as file:
        file.write("\nfrom . import early\n")
    if before:
        lib.load("work")
    lib.arm()
    work, early = lib.load("work"), lib.load("early")
    assert early.use("p") == work.allocate("p") == [lib.ours, "NoneType", "stock", "p", 1]


@pytest.mark.parametrize("after", [(), ("late",), NAMES])
def test_restore_puts_the_identical_objects_back(lib: Library, after: tuple[str, ...]) -> None:
    modules = [lib.load(name) for name in NAMES if name not in after]
    originals = held(*modules)
    lib.arm()
    everything = [lib.load(name) for name in NAMES]
    assert not {id(each) for each in originals} & {id(each) for each in held(*everything)}
    restore()
    assert same(held(*modules), originals)
    work, early, late = everything
    assert work.allocate is early.allocate is late.allocate
    assert not any(isinstance(each, wrapt.ObjectProxy) for each in held(*everything))
    assert work.Worker().start("p") == ["stock", "p", None]
    assert armed() == ()


def test_after_restore_nothing_is_watched(lib: Library) -> None:
    lib.arm()
    restore()
    restore()
    assert lib.load("early").use("p") == ["stock", "p", 1]
    assert not any(isinstance(each, wrapt.ObjectProxy) for each in held(lib.load("work")))


def test_restored_seams_can_be_armed_again(lib: Library) -> None:
    for _ in range(2):
        lib.arm()
        work, late = lib.load("work"), lib.load("late")
        assert late.use("p") == [lib.ours, "NoneType", "stock", "p", 1]
        restore()
        assert work.allocate("p") == late.use("p") == ["stock", "p", 1]


def test_arm_twice_is_once(lib: Library) -> None:
    lib.arm()
    first = armed()
    work = lib.load("work")
    lib.arm()
    assert same(armed(), first)
    assert work.allocate("p") == [lib.ours, "NoneType", "stock", "p", 1]
    assert lib.load("late").use("p") == [lib.ours, "NoneType", "stock", "p", 1]


def test_an_importer_of_another_release_is_left_alone(lib: Library) -> None:
    early, late = lib.load("early"), lib.load("late")
    lib.arm(version="1.9")
    assert early.use("p")[0] == lib.ours
    assert late.use("p") == ["stock", "p", 1]


def test_a_seam_knows_whether_it_is_in_place(lib: Library) -> None:
    lib.arm()
    method, function = armed()
    assert [(each.loaded, each.applied) for each in armed()] == [(False, False)] * 2
    assert tally() == "0/0"
    work = lib.load("work")
    assert [(each.loaded, each.applied) for each in armed()] == [(True, True)] * 2
    assert tally() == "2/2"
    early = lib.load("early")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early, "allocate", len)
        assert (method.applied, function.applied, tally()) == (True, False, "1/2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(work.Worker, "start", len)
        assert (method.applied, function.applied) == (False, True)
    assert (method.applied, function.applied) == (True, True)


def test_signature_docstring_and_name_are_preserved(lib: Library) -> None:
    work = lib.load("work")
    stock = {each: seen(each) for each in held(work)}
    lib.arm()
    wrapped = held(work)
    assert [seen(each) for each in wrapped] == list(stock.values())
    assert same([each.__wrapped__ for each in wrapped], list(stock))
    assert str(inspect.signature(work.Worker().start)) == "(plan, *, limit=None)"


def seen(function: Any) -> list[Any]:
    names = ("__doc__", "__name__", "__qualname__", "__module__")
    return [inspect.signature(function), *(getattr(function, name) for name in names)]


def test_the_librarys_own_standard_decorators_are_no_foreign_wrappers(lib: Library) -> None:
    work = lib.load("work")
    work.allocate = contextlib.contextmanager(work.allocate)
    lib.arm()
    assert [entry.applied for entry in armed()] == [True, True]


def test_a_static_method_is_wrapped_and_put_back(lib: Library) -> None:
    work = lib.load("work")
    work.Worker.start = original = staticmethod(work.allocate)
    lib.arm()
    assert [entry.applied for entry in armed()] == [True, True]
    assert inspect.signature(work.Worker().start) == inspect.signature(original.__func__)
    restore()
    assert vars(work.Worker)["start"] is original
