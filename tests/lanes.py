"""Which lane each test file runs in, as ``manifests/tests/*.txt`` say."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LANES = ("unit", "install", "engine", "jax", "matrix", "several", "gpu")


class LaneError(Exception):
    """A test file that is not in exactly one manifest: the message names it."""


def listed(root: Path = ROOT) -> dict[str, list[str]]:
    """Test file, relative to `root` -> the lanes whose manifest lists it, once per mention."""
    found: dict[str, list[str]] = {}
    for lane in LANES:
        text = (root / "manifests" / "tests" / f"{lane}.txt").read_text(encoding="utf-8")
        for path in text.split():
            found.setdefault(path, []).append(lane)
    return found


def lane_of(path: str, lanes: dict[str, list[str]]) -> str:
    """The one lane of a test file; raises LaneError if it is in no manifest or in two."""
    found = lanes.get(path, [])
    if len(found) != 1:
        where = f"in {' and '.join(found)}" if found else "in none"
        raise LaneError(f"{path}: {where} of manifests/tests/*.txt; expected in exactly one")
    return found[0]


def problems(root: Path = ROOT) -> list[str]:
    """What is wrong between the test files on disk and the manifests, one line each."""
    lanes = listed(root)
    on_disk = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    found = [f"{path}: listed in {lanes[path][0]} but not there" for path in lanes.keys() - on_disk]
    for path in on_disk:
        try:
            lane_of(path, lanes)
        except LaneError as error:
            found.append(str(error))
    return sorted(found)
