"""Give every test the marker of its lane."""

from __future__ import annotations

import pytest

from tests.lanes import ROOT, LaneError, lane_of, listed

pytest.register_assert_rewrite("tests.fresh")


def pytest_collectstart(collector: pytest.Collector) -> None:
    if not isinstance(collector, pytest.Module) or not collector.path.is_relative_to(ROOT):
        return
    try:
        lane = lane_of(collector.path.relative_to(ROOT).as_posix(), listed())
    except LaneError as error:
        raise pytest.UsageError(str(error)) from error
    collector.add_marker(lane)
