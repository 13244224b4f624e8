"""Every test file is in exactly one lane."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fresh import run
from tests.lanes import LANES, ROOT, problems


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout with one test per lane, whose pytest settings are this one's."""
    for lane in LANES:
        write(tmp_path / "tests" / lane / f"test_{lane}.py", "def test_one(): pass\n")
        write(tmp_path / "manifests" / "tests" / f"{lane}.txt", f"tests/{lane}/test_{lane}.py\n")
    for name in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py", "tests/lanes.py"):
        write(tmp_path / name, (ROOT / name).read_text(encoding="utf-8"))
    return tmp_path


Fault = Callable[[Path], str]  # spoils a tree; returns what the message starts with


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def double(tree: Path) -> str:
    write(tree / "manifests/tests/gpu.txt", "tests/gpu/test_gpu.py\ntests/unit/test_unit.py\n")
    return "tests/unit/test_unit.py: in unit and gpu of"


def repeat(tree: Path) -> str:
    write(tree / "manifests/tests/jax.txt", "tests/jax/test_jax.py\n" * 2)
    return "tests/jax/test_jax.py: in jax and jax of"


def forget(tree: Path) -> str:
    write(tree / "tests/unit/deep/test_new.py", "def test_two(): pass\n")
    return "tests/unit/deep/test_new.py: in none of"


def lose(tree: Path) -> str:
    (tree / "tests/engine/test_engine.py").unlink()
    return "tests/engine/test_engine.py: listed in engine but not there"


def test_every_test_file_of_this_checkout_is_in_exactly_one_lane() -> None:
    assert problems() == []


def test_there_are_no_other_manifests() -> None:
    assert {path.name for path in (ROOT / "manifests/tests").iterdir()} == {
        f"{lane}.txt" for lane in LANES
    }


def test_each_lane_has_a_marker(request: pytest.FixtureRequest) -> None:
    markers = {line.partition(":")[0] for line in request.config.getini("markers")}
    assert set(LANES) <= markers


def test_this_test_has_its_lanes_marker(request: pytest.FixtureRequest) -> None:
    assert [mark.name for mark in request.node.iter_markers() if mark.name in LANES] == ["unit"]


def test_the_check_accepts_a_tree_in_order(tree: Path) -> None:
    assert problems(tree) == []


@pytest.mark.parametrize("fault", [double, repeat, forget, lose])
def test_the_check_names_each_fault(tree: Path, fault: Fault) -> None:
    message = fault(tree)
    (found,) = problems(tree)
    assert found.startswith(message)


@pytest.mark.parametrize("lane", ["unit", "gpu"])
def test_pytest_selects_a_lane_by_its_marker(tree: Path, lane: str) -> None:
    done = run(sys.executable, "-m", "pytest", "-v", "-m", lane, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"test_{lane}.py::test_one PASSED" in done.stdout
    assert f"1 passed, {len(LANES) - 1} deselected" in done.stdout


@pytest.mark.parametrize("fault", [double, repeat, forget])
def test_pytest_refuses_a_file_without_one_lane(tree: Path, fault: Fault) -> None:
    message = fault(tree)
    done = run(sys.executable, "-m", "pytest", cwd=tree)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}" in done.stderr
