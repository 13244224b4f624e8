"""Limits and a shared budget, on vLLM's own schedulers: memory that cannot be had is a miss."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached_patch import config
from tests.bare import stock
from tests.slots import SLOT_BYTES, Setup
from tests.steps import (
    Engine,
    assert_drained,
    committed,
    engine_apart,
    geometry,
    ledger,
    pool_of,
    prompt,
    random_load,
)

SLABS = 30
SLAB_BYTES = 4 * 4 * SLOT_BYTES  # one page
SIZE = {
    "blocks": 4 * SLABS,
    "slab_blocks": 4,
    "page_bytes": SLAB_BYTES,
    "model_tokens": 112,
}  # 8 slabs
KINDS = {
    "one batch at a time": Setup(**SIZE),
    "pipeline of 3": Setup(**SIZE, depth=3),
    "async, 3 in flight": Setup(**SIZE, asynchronous=True, depth=3),
}
SETUPS = pytest.mark.parametrize("setup", KINDS.values(), ids=KINDS)
NAME = "engine"
Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Make an engine that may hold so many slabs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def engine(
        setup: Setup, limit: int | None = None, retain: str = "none", **more: bool
    ) -> Engine:
        monkeypatch.setenv(config.LIMIT, "" if limit is None else str(limit * SLAB_BYTES))
        return engine_apart(monkeypatch, tmp_path, setup, retain, **more)

    return engine


def set_total(slabs: int | None) -> None:
    ledger().set_total(None if slabs is None else slabs * SLAB_BYTES)


def set_limit(slabs: int | None) -> None:
    ledger().set_limit(NAME, None if slabs is None else slabs * SLAB_BYTES)


def add(engine: Engine, requests: int, seed: int = 1, length: int = 24, tokens: int = 24) -> None:
    rng = random.Random(seed)
    for _ in range(requests):
        engine.add(prompt(rng, length), tokens)


def held(engine: Engine) -> int:
    """Slabs that the ledger has given the engine."""
    assert engine.elastic is not None
    (record,) = (each for each in ledger().engines() if each.name == NAME)
    assert record.committed == engine.elastic.budget.held * SLAB_BYTES
    return engine.elastic.budget.held


@SETUPS
@pytest.mark.parametrize("retain", ["none", "all"])
def test_a_limit_is_a_scheduling_miss(make: Make, setup: Setup, retain: str) -> None:
    engine = make(setup, limit=10, retain=retain)
    add(engine, 12)
    most = 0
    while engine.step():
        most = max(most, committed(engine))
        assert held(engine) <= 10
    assert most == 10
    engine.check_answers()
    assert engine.scheduler.reset_prefix_cache(), "free blocks are counted as vLLM means it"
    engine.plan_idle()
    assert_drained(engine)
    assert max(map(len, engine.trace)) <= 6, "their prompts alone take six blocks each"


@SETUPS
def test_a_limit_of_the_whole_pool_changes_nothing(make: Make, setup: Setup) -> None:
    limited, free = (make(setup, limit) for limit in (SLABS, None))
    for engine in (limited, free):
        random_load(engine, seed=2)
        engine.check_answers()
    assert limited.trace == free.trace


@SETUPS
def test_a_limit_lowered_below_what_is_live_and_raised_again(make: Make, setup: Setup) -> None:
    """Under load that never pauses: in the time that a request takes, room is made."""
    engine = make(setup)
    add(engine, 40, tokens=60)
    for _ in range(40):
        engine.step()
    assert committed(engine) > 20
    set_limit(9)
    for _ in range(100):
        engine.step()
    for _ in range(20):
        assert committed(engine) <= 9
        engine.step()
    assert len(engine.unfinished()) > 10
    set_limit(None)
    most = 0
    while engine.step():
        most = max(most, committed(engine))
    assert most > 20, "it grows back"
    engine.check_answers()
    assert_drained(engine)


@SETUPS
def test_a_limit_below_one_request_still_serves_one(make: Make, setup: Setup) -> None:
    """Else it would wait for ever: nothing that could end gives its memory back."""
    engine = make(setup)
    set_limit(2)
    engine.plan_idle()
    add(engine, 3, length=40, tokens=20)
    most = 0
    while engine.unfinished():
        engine.step()
        most = max(most, committed(engine))
    assert 2 < most <= geometry(setup).least_slabs
    engine.check_answers()


@SETUPS
def test_requests_wait_while_others_hold_the_budget(make: Make, setup: Setup) -> None:
    set_total(20)
    other = ledger().join("other")
    assert other.reserve(18 * SLAB_BYTES)
    engine = make(setup)
    add(engine, 4)
    for _ in range(50):
        engine.step()
    assert len(engine.unfinished()) == 4
    assert committed(engine) <= 2
    other.release(10 * SLAB_BYTES)
    engine.drain()
    engine.check_answers()
    other.close()


@SETUPS
def test_a_budget_set_live_bounds_an_engine_that_had_none(make: Make, setup: Setup) -> None:
    engine = make(setup)
    add(engine, 1)
    engine.drain()
    engine.quiet(1.0)
    set_total(20)
    other = ledger().join("other")
    assert other.reserve(16 * SLAB_BYTES)
    add(engine, 6, seed=2)
    for _ in range(60):
        if not engine.step():
            break
        assert committed(engine) + 16 <= 20
    other.close()
    engine.drain()
    engine.check_answers()


def test_cached_blocks_give_way_to_what_others_want(make: Make) -> None:
    engine = make(KINDS["async, 3 in flight"], retain="all")
    set_total(20)
    add(engine, 6)
    engine.drain()
    engine.quiet(1.0)
    assert held(engine) > 16
    assert engine.elastic is not None
    other = ledger().join("other")
    other.want(12 * SLAB_BYTES)
    assert engine.elastic.budget.changed, "which wakes a quiet EngineCore"
    engine.plan_idle()
    assert held(engine) <= 10
    assert committed(engine) <= held(engine)
    assert other.reserve(10 * SLAB_BYTES)
    other.close()


@pytest.mark.parametrize("requests", [2, 6])
def test_the_cache_of_an_idle_engine_is_no_claim_on_the_budget(make: Make, requests: int) -> None:
    """Neither what it keeps beyond its fair share nor what it keeps within it."""
    setup = KINDS["one batch at a time"]
    set_total(SLABS)
    idle, busy = make(setup, retain="all"), make(setup, retain="all")
    add(idle, requests, length=48, tokens=40)
    idle.drain()
    idle.quiet(1.0)
    kept = committed(idle)
    assert kept > 8
    add(busy, 60, seed=3, tokens=60)
    most = 0
    for _ in range(60):
        busy.step()
        assert idle.elastic is not None
        if idle.elastic.budget.changed:  # which wakes a quiet EngineCore
            idle.plan_idle()
        assert committed(idle) + committed(busy) <= SLABS
        most = max(most, committed(busy))
    assert most > 0.9 * SLABS
    busy.drain()
    busy.check_answers()


@SETUPS
def test_an_engine_that_wakes_gets_its_share_from_a_busy_one(make: Make, setup: Setup) -> None:
    set_total(SLABS)
    sleeper, busy = make(setup), make(setup)
    add(busy, 60, tokens=60)
    for _ in range(60):
        busy.step()
    assert committed(busy) > 24
    add(sleeper, 6, seed=2, tokens=40)
    steps = 0
    while sleeper.unfinished():
        sleeper.step()
        busy.step()
        steps += 1
        assert committed(sleeper) + committed(busy) <= SLABS
    assert steps < 120 * (1 if setup.asynchronous else setup.depth)
    assert len(busy.unfinished()) > 20
    sleeper.drain()
    sleeper.quiet(1.0)
    busy.drain()
    for engine in (sleeper, busy):
        engine.check_answers()


@SETUPS
def test_the_ledger_never_shows_less_than_the_worker_holds(make: Make, setup: Setup) -> None:
    engine = make(setup)
    set_total(SLABS)

    def check(_: random.Random) -> None:
        assert committed(engine) <= held(engine)

    random_load(engine, seed=4, between=check)
    engine.check_answers()


@SETUPS
@pytest.mark.parametrize("retain", ["none", "all", "1s"])
def test_random_limits_and_neighbours_lose_no_request(
    make: Make, setup: Setup, retain: str
) -> None:
    engine = make(setup, retain=retain)
    other = ledger().join("other")

    def between(rng: random.Random) -> None:
        if rng.random() < 0.05:
            set_limit(rng.choice([None, 9, 14, 25]))
            set_total(rng.choice([10, 16, SLABS]))
        if rng.random() < 0.1:
            other.release(other.committed)
            other.want(rng.randrange(12) * SLAB_BYTES)
            other.reserve(rng.randrange(12) * SLAB_BYTES)
        if rng.random() < 0.05:
            other.release(other.committed)
            other.want(0)

    for seed in range(2):
        random_load(engine, seed, requests=30 * (seed + 1), between=between)
    other.close()
    set_limit(None)
    set_total(None)
    engine.drain()
    engine.check_answers()
    assert engine.scheduler.reset_prefix_cache()
    engine.plan_idle()
    assert_drained(engine)
    assert held(engine) == 1


@SETUPS
def test_limits_set_while_the_engine_is_quiet(make: Make, setup: Setup) -> None:
    engine = make(setup)
    add(engine, 2)
    engine.drain()
    for slabs in (12, None, 9, 20):
        set_limit(slabs)
        engine.plan_idle()
        add(engine, 6)
        most = 0
        while engine.step():
            most = max(most, committed(engine))
        engine.check_answers()
        assert 8 <= most <= (slabs or SLABS)


def test_free_blocks_are_counted_as_stock_counts_them(make: Make) -> None:
    setup = KINDS["async, 3 in flight"]

    def counts(elastic: bool) -> list[int]:
        engine = make(setup, SLABS, retain="all", elastic=elastic)
        add(engine, 6)
        found = []
        while engine.step():
            found.append(pool_of(engine).get_num_free_blocks())
        return found

    patched = counts(elastic=True)
    with stock():
        assert patched == counts(elastic=False)


def test_an_engine_that_is_deleted_leaves_the_ledger(make: Make) -> None:
    engine = make(KINDS["one batch at a time"])
    add(engine, 2)
    engine.drain()
    assert len(ledger().engines()) == 1
    del engine
    gc.collect()
    assert ledger().engines() == []
