"""A seam that another tool already wraps is named, and nothing of ours stays behind."""

from __future__ import annotations

from types import ModuleType

import pytest
import wrapt

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.apply import armed, restore
from tests.library import NAMES, Library, held, same


@pytest.mark.parametrize("kind", ["plain", "proxy", "partial", "replaced"])
@pytest.mark.parametrize(
    ("place", "named"),
    [("work", "work:allocate"), ("Worker", "work:Worker.start"), ("early", "early.allocate")],
)
def test_a_foreign_wrapper_takes_everything_back(
    lib: Library, kind: str, place: str, named: str
) -> None:
    modules = [lib.load(name) for name in NAMES]
    owner = {"Worker": modules[0].Worker}.get(place) or lib.load(place)
    name = "start" if place == "Worker" else "allocate"
    setattr(owner, name, lib.foreign(kind, vars(owner)[name]))
    before = held(*modules)
    errors: list[SeamMismatch] = []
    lib.arm(errors.append)
    assert armed() == ()
    assert same(held(*modules), before)
    (message,) = map(str, errors)
    assert message.startswith(f"seam {'Worker.start' if place == 'Worker' else name}")
    assert f"{lib.name}.{named}" in message
    assert ("functools" if kind == "partial" else lib.theirs) in message


@pytest.mark.parametrize("module", ["work", "late"])
def test_a_foreign_wrapper_put_in_at_import_is_found(lib: Library, module: str) -> None:
    def intrude(loaded: ModuleType) -> None:
        loaded.allocate = lib.foreign("plain", loaded.allocate)  # type: ignore[attr-defined]

    wrapt.register_post_import_hook(intrude, f"{lib.name}.{module}")
    errors: list[SeamMismatch] = []
    lib.arm(errors.append)
    work, early, late = map(lib.load, NAMES)
    assert [lib.theirs in str(error) for error in errors] == [True]
    assert armed() == ()
    assert work.Worker().start("p") == ["stock", "p", None]
    # Nothing of ours is left to be called, but for what the intruder itself has kept.
    assert not isinstance(work.allocate, wrapt.ObjectProxy)
    assert early.use("p")[-3:] == late.use("p")[-3:] == ["stock", "p", 1]


@pytest.mark.parametrize("loaded", [True, False])
def test_on_conflict_may_raise(lib: Library, loaded: bool) -> None:
    def refuse(error: SeamMismatch) -> None:
        raise error

    def intrude(module: ModuleType) -> None:
        module.allocate = lib.foreign("plain", module.allocate)  # type: ignore[attr-defined]

    wrapt.register_post_import_hook(intrude, f"{lib.name}.work")
    if loaded:
        lib.load("late")
    else:
        lib.arm(refuse)
    with pytest.raises(SeamMismatch, match=lib.theirs):
        lib.arm(refuse) if loaded else lib.load("late")
    assert armed() == ()


@pytest.mark.parametrize("place", ["work", "work.Worker", "early"])
def test_what_the_source_has_but_the_module_has_not_is_a_conflict(lib: Library, place: str) -> None:
    work, early = lib.load("work"), lib.load("early")
    owner = {"work": work, "work.Worker": work.Worker, "early": early}[place]
    name = "start" if place == "work.Worker" else "allocate"
    original = vars(owner)[name]
    delattr(owner, name)
    errors: list[SeamMismatch] = []
    lib.arm(errors.append)
    setattr(owner, name, original)
    assert [name in str(error) for error in errors] == [True]
    assert armed() == ()
    assert early.use("p") == work.Worker().start("p", limit=1) == ["stock", "p", 1]


def test_a_wrapper_around_ours_is_a_conflict_for_a_later_importer(lib: Library) -> None:
    errors: list[SeamMismatch] = []
    lib.arm(errors.append)
    work, early = lib.load("work"), lib.load("early")
    theirs = work.allocate = lib.foreign("plain", work.allocate)
    late = lib.load("late")
    assert [f"{lib.name}.late.allocate" in str(error) for error in errors] == [True]
    assert armed() == ()
    assert work.allocate is late.allocate is theirs  # theirs to take away
    assert early.use("p") == ["stock", "p", 1]
    assert work.Worker().start("p") == ["stock", "p", None]
    lib.arm(errors.append)  # and again, at the next attempt
    assert [lib.theirs in str(error) for error in errors] == [True, True]
    assert armed() == ()


def test_restore_refuses_while_another_tool_wraps_ours(lib: Library) -> None:
    work, early = lib.load("work"), lib.load("early")
    lib.arm()
    before = held(work, early)
    ours = work.allocate
    work.allocate = lib.foreign("plain", ours)
    with pytest.raises(SeamMismatch, match=rf"{lib.name}\.work\.allocate.*{lib.theirs}"):
        restore()
    assert len(armed()) == 2
    assert work.allocate("p") == [lib.theirs, lib.ours, "NoneType", "stock", "p", 1]
    work.allocate = ours
    assert same(held(work, early), before)
    restore()
    assert early.use("p") == work.allocate("p") == ["stock", "p", 1]
