"""For how many slabs all workers own pages, as EngineCore keeps it."""

from __future__ import annotations

from kvcached_patch.core.pages import Plan
from kvcached_patch.engines.page_supply import RETRY_SECONDS, PageSupply


class Workers:
    """They own what they are asked for, up to `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[int] = []

    def __call__(self, slabs: int) -> int:
        self.asked.append(slabs)
        return min(slabs, self.most)


def test_workers_are_asked_only_for_more() -> None:
    workers = Workers(100)
    supply = PageSupply(workers, 2)
    assert [supply.grow(slabs, 0.0) for slabs in (4, 3, 4, 9)] == [4, 4, 4, 9]
    assert workers.asked == [4, 9]


def test_after_a_refusal_nobody_is_asked_for_a_while() -> None:
    workers = Workers(5)
    supply = PageSupply(workers, 2)
    assert supply.grow(8, 10.0) == 5
    assert supply.refused
    assert supply.grow(8, 10.0 + RETRY_SECONDS * 0.9) == 5
    assert not supply.refused
    assert workers.asked == [8]
    workers.most = 100
    assert supply.grow(8, 10.0 + RETRY_SECONDS) == 8


def test_what_workers_keep_is_theirs_until_every_plan_is_carried_out() -> None:
    supply = PageSupply(Workers(100), 2)
    supply.grow(10, 0.0)
    assert supply.stamp(Plan(0)).keep == 10
    supply.settle(backed=3, most=5)
    assert (supply.slabs, supply.owned) == (5, 10)
    assert supply.stamp(Plan(1)).keep == 5
    assert supply.owned == 10  # plan 0 may still be on its way
    supply.stamp(Plan(2))
    assert supply.owned == 5


def test_what_is_backed_stays() -> None:
    supply = PageSupply(Workers(100), 1)
    supply.grow(10, 0.0)
    supply.settle(backed=7, most=4)
    assert supply.slabs == 7


def test_quiet_workers_own_what_the_last_plan_left_them() -> None:
    supply = PageSupply(Workers(100), 3)
    supply.grow(10, 0.0)
    supply.stamp(Plan(0))
    supply.settle(backed=1, most=1)
    supply.stamp(Plan(1))
    supply.applied()
    assert supply.owned == 1


def test_what_was_had_before_a_plan_is_owned_until_it_is_carried_out() -> None:
    """Though the plan that is made next says that less is kept."""
    supply = PageSupply(Workers(100), 2)
    supply.grow(10, 0.0)
    supply.settle(backed=3, most=3)
    assert supply.owned == 10
