"""A budget that is too small is shared fairly, and a share is what an engine may hold."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.shares import fair_shares, shares_with_caches
from kvcached_patch.ledger import Ledger, ledger_path
from tests.ledgers import Engine

BYTES = st.integers(0, 1000)
ENGINES = st.lists(st.tuples(BYTES, st.none() | BYTES), max_size=8)


def split(engines: list[tuple[int, int | None]]) -> tuple[list[int], list[int | None], list[int]]:
    demands, limits = [each[0] for each in engines], [each[1] for each in engines]
    capped = [min(demand, demand if cap is None else cap) for demand, cap in engines]
    return demands, limits, capped


@given(BYTES, ENGINES)
def test_shares_are_within_budget_and_demand_and_not_below_an_equal_part(
    budget: int, engines: list[tuple[int, int | None]]
) -> None:
    demands, limits, capped = split(engines)
    shares = fair_shares(budget, demands, limits)
    assert sum(shares) <= budget
    for share, demand in zip(shares, capped, strict=True):
        assert min(demand, budget // len(engines)) <= share <= demand
    if shares != capped:  # max-min: who lacks something has the largest share, nothing is left over
        lacking = {share for share, demand in zip(shares, capped, strict=True) if share < demand}
        assert lacking == {max(shares)}
        assert budget - sum(shares) < len(engines)


@given(BYTES, BYTES, ENGINES)
def test_a_larger_budget_takes_from_nobody(
    budget: int, more: int, engines: list[tuple[int, int | None]]
) -> None:
    demands, limits, _ = split(engines)
    before = fair_shares(budget, demands, limits)
    after = fair_shares(budget + more, demands, limits)
    assert all(new >= old for new, old in zip(after, before, strict=True))


@given(BYTES, BYTES, ENGINES.filter(len), st.data())
def test_who_demands_more_gets_no_less_and_the_others_no_more(
    budget: int, more: int, engines: list[tuple[int, int | None]], data: st.DataObject
) -> None:
    demands, limits, _ = split(engines)
    which = data.draw(st.integers(0, len(engines) - 1))
    before = fair_shares(budget, demands, limits)
    demands[which] += more
    after = fair_shares(budget, demands, limits)
    assert after.pop(which) >= before.pop(which)
    assert all(new <= old for new, old in zip(after, before, strict=True))


@given(BYTES, ENGINES)
def test_equals_share_equally(budget: int, engines: list[tuple[int, int | None]]) -> None:
    demands, limits, capped = split(engines + engines[::-1])
    shares = fair_shares(budget, demands, limits)
    assert len(set(zip(capped, shares, strict=True))) == len(set(capped))


def test_shares_of_nobody() -> None:
    assert fair_shares(100, [], []) == []
    assert fair_shares(-1, [5], [None]) == [0]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(ledger_path(tmp_path / "run", "host"))


def test_a_share_shrinks_while_another_wants_what_is_not_there(ledger: Ledger) -> None:
    ledger.set_total(100)
    a, b = ledger.join("a"), ledger.join("b")
    assert a.reserve(95)
    assert (a.share(), b.share()) == (100, 100)
    b.want(5)
    assert (a.share(), b.share()) == (100, 100)  # enough for both
    b.want(20)
    assert (a.share(), b.share()) == (80, 20)
    b.want(90)
    assert (a.share(), b.share()) == (50, 50)
    a.release(45)
    assert b.reserve(50)
    b.want(40)
    assert (a.share(), b.share()) == (50, 50)
    b.want(0)
    assert (a.share(), b.share()) == (100, 100)


def test_an_engine_that_wants_more_than_is_left_keeps_what_it_holds(ledger: Ledger) -> None:
    ledger.set_total(100)
    a, b = ledger.join("a"), ledger.join("b")
    assert a.reserve(60)
    assert b.reserve(40)
    a.want(60)
    assert (a.share(), b.share()) == (60, 40)


def test_a_limit_caps_a_demand(ledger: Ledger) -> None:
    ledger.set_total(100)
    a, b = ledger.join("a"), ledger.join("b", limit=10)
    assert a.reserve(95)
    b.want(1000)
    assert (a.share(), b.share()) == (90, 10)
    ledger.set_limit("b", None)
    assert (a.share(), b.share()) == (50, 50)


def test_a_budget_lowered_below_what_is_held_is_shared(ledger: Ledger) -> None:
    a, b, c = (ledger.join(name) for name in "abc")
    assert a.reserve(80)
    assert b.reserve(50)
    assert c.reserve(10)
    ledger.set_total(70)
    assert (a.share(), b.share(), c.share()) == (30, 30, 10)


@pytest.mark.parametrize("gone", ["closed", "killed"])
def test_a_demand_ends_with_its_engine(ledger: Ledger, gone: str) -> None:
    code = """
account = ledger.join("b")
account.want(90)
print("ready", flush=True)
sys.stdin.readline()
account.close()
print("closed", flush=True)
"""
    ledger.set_total(100)
    a = ledger.join("a")
    assert a.reserve(80)
    with Engine(ledger.path, code=code) as engine:
        engine.ready()
        assert a.share() == 50
        before = a.generation
        if gone == "closed":
            engine.process.communicate("\n")
        else:
            engine.kill()
        assert a.share() == 100
        assert a.generation != before


def test_the_generation_tells_of_every_change_that_matters(ledger: Ledger) -> None:
    a, b = ledger.join("a"), ledger.join("b")
    seen = [a.generation]
    changes = (
        lambda: ledger.set_limit("a", 5),
        lambda: ledger.set_limit("b", 5),
        lambda: ledger.set_total(50),
        lambda: b.want(5),
        lambda: b.want(0),
        lambda: ledger.join("c"),
        lambda: b.close(),
    )
    for change in changes:
        change()
        seen.append(a.generation)
    assert len(set(seen)) == len(changes) + 1
    a.reserve(1)
    a.release(1)
    a.want(0)
    a.publish(cached=1)
    assert a.generation == seen[-1]


@pytest.mark.parametrize(
    ("demands", "caches", "shares"),
    [
        ((60, 60), (0, 0), [50, 50]),
        ((30, 90), (30, 0), [10, 90]),  # within its fair share, but only a cache
        ((60, 60), (60, 0), [40, 60]),
        ((60, 60), (60, 60), [50, 50]),
        ((80, 80), (30, 10), [50, 50]),  # in use beyond the budget: no caches
    ],
)
def test_caches_get_what_use_leaves(
    demands: tuple[int, ...], caches: tuple[int, ...], shares: list[int]
) -> None:
    assert shares_with_caches(100, demands, (100, 100), caches) == shares


def test_a_cache_gives_way_though_it_is_within_the_fair_share(ledger: Ledger) -> None:
    ledger.set_total(100)
    idle, busy = ledger.join("idle"), ledger.join("busy")
    assert idle.reserve(40)
    idle.publish(cached=35)
    assert busy.reserve(60)
    assert (idle.share(), idle.keep()) == (100, 100)
    busy.want(20)
    assert (idle.share(), idle.keep()) == (40, 20)
    generation = busy.generation
    idle.release(20)
    assert busy.generation != generation
    assert (busy.share(), busy.reserve(20)) == (100, True)
