"""The published figures are those of the published results."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.fresh import run
from tests.lanes import ROOT

RESULTS = ROOT / "bench" / "results"
FIGURES = sorted(path.stem for path in RESULTS.glob("*.svg"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results, and what `bench.figure` draws of them."""
    folder = tmp_path_factory.mktemp("results")
    for path in RESULTS.glob("*.json"):
        shutil.copy(path, folder)
    done = run(sys.executable, "-m", "bench.figure", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_readme_shows_them() -> None:
    text = (ROOT / "README.md").read_text()
    assert FIGURES == ["colocation", "reclaim"]
    assert all(f"(bench/results/{name}.svg)" in text for name in FIGURES)


@pytest.mark.parametrize("name", FIGURES)
def test_they_are_drawn_from_the_results(drawn: Path, name: str) -> None:
    assert (drawn / f"{name}.svg").read_bytes() == (RESULTS / f"{name}.svg").read_bytes()
