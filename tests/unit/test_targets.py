"""Several target libraries: each is patched, left alone or refused by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from kvcached_patch._startup import TARGETS
from kvcached_patch.errors import ConfigError, SeamMismatch
from kvcached_patch.seams.apply import armed, restore
from kvcached_patch.seams.check import check
from kvcached_patch.seams.manifest import load_manifest, manifest_dir, parse_manifest
from tests.library import NAMES, Library, held, same
from tests.trees import installed, manifest, seam

TARGET = '[target]\npackage = "lib"\nsupported = ">=1"\ntested = []\n'


@pytest.fixture
def other(lib: Library, tmp_path: Path) -> Library:
    """A second library; `lib` restores what is armed."""
    return Library(tmp_path)


def test_each_target_has_a_manifest() -> None:
    found = {Path(path.name).stem for path in manifest_dir().iterdir()}
    assert found == set(TARGETS)
    assert [load_manifest(package).package for package in TARGETS] == list(TARGETS)


def test_both_are_patched(lib: Library, other: Library) -> None:
    lib.arm()
    other.arm()
    lib.arm()  # done before: nothing
    assert [entry.package for entry in armed()] == [lib.name] * 2 + [other.name] * 2
    for library in (lib, other):
        assert library.load("work").allocate("p")[0] == library.ours
    restore()
    assert armed() == ()
    assert other.load("work").allocate("p") == ["stock", "p", 1]


def test_a_conflict_in_one_leaves_the_other_patched(lib: Library, other: Library) -> None:
    modules = [other.load(name) for name in NAMES]
    modules[0].allocate = other.foreign("plain", modules[0].allocate)  # type: ignore[attr-defined]
    before = held(*modules)
    errors: list[SeamMismatch] = []
    lib.arm()
    other.arm(errors.append)
    assert len(errors) == 1
    assert {entry.package for entry in armed()} == {lib.name}
    assert same(held(*modules), before)
    assert lib.load("work").allocate("p")[0] == lib.ours


@pytest.mark.parametrize(
    ("right", "version", "aside"),
    [(">=2", "2.0", "lib 2.0 needs no patch"), (">=2", "2.1rc1", "lib 2.1rc1"), (">=2", "1.9", "")],
)
def test_a_release_that_is_right_is_left_alone(
    tmp_path: Path, right: str, version: str, aside: str
) -> None:
    files = {"work.py": "def allocate(plan): pass"}
    target = replace(manifest(seam()), right=SpecifierSet(right))
    verdict = check(target, installed(tmp_path, files, version))
    assert verdict.aside.startswith(aside)
    assert bool(verdict.aside) is bool(aside)
    assert (verdict.problem, len(verdict.seams)) == ("", 0 if aside else 1)


@pytest.mark.parametrize(("chosen", "aside"), [((), True), (("NAME=pool",), False)])
def test_a_setting_asks_for_a_seam_of_a_release_that_needs_none(
    tmp_path: Path, chosen: tuple[str, ...], aside: bool
) -> None:
    target = replace(manifest(replace(seam(), setting="NAME=pool")), right=SpecifierSet(">=1"))
    tree = installed(tmp_path, {"work.py": "def allocate(plan): pass"})
    verdict = check(target.under(chosen), tree)
    assert (bool(verdict.aside), verdict.problem) == (aside, "")
    assert [each.setting for each in verdict.seams] == list(chosen)
    changed = installed(tmp_path / "changed", {"work.py": "def allocate(): pass"})
    assert bool(check(target.under(chosen), changed).problem) is not aside


@pytest.mark.parametrize(("package", "aside"), [("pytest", True), ("no_such_package", False)])
def test_a_library_whose_place_another_takes_is_left_alone(
    tmp_path: Path, package: str, aside: bool
) -> None:
    target = replace(manifest(seam()), displaced_by=package)
    verdict = check(target, installed(tmp_path, {"work.py": "def allocate(plan): pass"}))
    assert (package in verdict.aside, verdict.problem) == (aside, "")


def test_a_manifest_says_so() -> None:
    plain = parse_manifest(TARGET, "lib.toml")
    assert (plain.right, plain.displaced_by) == (None, "")
    found = parse_manifest(TARGET + 'right = ">=2"\ndisplaced_by = "pytest"\n', "lib.toml")
    assert (found.right, found.displaced_by) == (SpecifierSet(">=2"), "pytest")
    with pytest.raises(ConfigError, match=r"lib\.toml \[target\]: right='2': expected a version"):
        parse_manifest(TARGET + 'right = "2"\n', "lib.toml")
