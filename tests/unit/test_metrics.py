"""What is counted for /metrics: slabs when their pages come and go, and how long going takes."""

from __future__ import annotations

from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.pages import Plan
from kvcached_patch.core.totals import RELEASE_BOUNDS, Totals


def bucket(totals: Totals) -> float:
    """The bound of the only bucket with something in it."""
    (number,) = (i for i, count in enumerate(totals.releases) if count)
    return RELEASE_BOUNDS[number]


def test_a_release_is_counted_when_all_workers_have_carried_it_out() -> None:
    footprint = Footprint(in_flight=2)
    footprint.follow(Plan(0, commit=(0, 1, 2)), 10.0)
    footprint.follow(Plan(1, release=(1, 2)), 11.0)
    footprint.follow(Plan(2), 11.5)
    assert footprint.totals == Totals(committed=3)
    footprint.follow(Plan(3), 11.75)
    assert (footprint.totals.released, bucket(footprint.totals)) == (2, 1.0)
    assert footprint.totals.release_ns == 750_000_000


def test_an_engine_gone_quiet_counts_at_once() -> None:
    footprint = Footprint(in_flight=2)
    footprint.follow(Plan(0, commit=(0, 1)), 10.0)
    footprint.follow(Plan(1, release=(1,)), 11.0)
    footprint.settle(11.004)
    footprint.settle(20.0)
    assert (footprint.totals.released, bucket(footprint.totals)) == (1, 0.005)


def test_pages_that_were_never_given_back_are_not_counted() -> None:
    """A slab taken again before its release is in force keeps its pages."""
    footprint = Footprint(in_flight=1)
    footprint.follow(Plan(0, commit=(0, 1)), 10.0)
    footprint.follow(Plan(1, release=(1,)), 11.0)
    footprint.follow(Plan(2, commit=(1,)), 12.0)
    footprint.settle(13.0)
    assert footprint.totals == Totals(committed=2)
