"""What /metrics shows: slabs when their pages come and go, how long going takes, whose they are."""

from __future__ import annotations

import os
import signal
import subprocess

from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.pages import Plan
from kvcached_patch.core.totals import RELEASE_BOUNDS, Totals
from kvcached_patch.system import descends


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


def test_a_process_descends_from_itself_and_its_ancestors_only() -> None:
    """A server's engines are told from others' by that."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        grandchild = int(shell.stdout.readline())
        try:
            assert descends(grandchild, grandchild)
            assert descends(grandchild, shell.pid)
            assert descends(grandchild, os.getpid())
            assert not descends(os.getpid(), shell.pid)
            assert not descends(shell.pid, grandchild)
        finally:
            os.kill(grandchild, signal.SIGKILL)
    assert not descends(shell.pid, os.getpid())
