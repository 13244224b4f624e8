"""Pages that must be had before they are promised, on vLLM's own schedulers.

Every worker's device has so many pages, whatever the ledger says: what it refuses is a miss.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvcached_patch.errors import PoolExhausted
from tests.slots import Setup
from tests.steps import Engine, engine_apart, geometry, ledger, prompt, random_load

# Slabs of three pages of their own; and slabs of 96 bytes on pages of 80, which they share.
OWN = {"blocks": 120, "slab_blocks": 6, "page_bytes": 64, "model_tokens": 128}
SHARED = {"blocks": 121, "slab_blocks": 3, "page_bytes": 80, "model_tokens": 128}
KINDS = {
    f"{pages}, {batches}": Setup(**sizes, **more)
    for pages, sizes in {"own pages": OWN, "shared pages": SHARED}.items()
    for batches, more in {
        "one batch at a time": {},
        "async, 3 in flight": {"asynchronous": True, "depth": 3},
    }.items()
}
SETUPS = pytest.mark.parametrize("setup", KINDS.values(), ids=KINDS)
Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def engine(setup: Setup, *gpu_pages: int, retain: str = "none", **more: bool) -> Engine:
        sized = replace(setup, gpu_pages=gpu_pages)
        return engine_apart(monkeypatch, tmp_path, sized, retain, **more)

    return engine


def held_bytes() -> int:
    """What the ledger has given the engine."""
    (record,) = ledger().engines()
    return record.committed


def crowd(engine: Engine, requests: int = 12, seed: int = 1) -> None:
    rng = random.Random(seed)
    for _ in range(requests):
        engine.add(prompt(rng, 30), 40)


def wake(engine: Engine) -> None:
    """What a quiet EngineCore does once it notices a change."""
    assert engine.elastic is not None
    for _ in range(9):
        due = engine.elastic.due()
        if not engine.elastic.budget.changed and (due is None or due > engine.clock.now):
            return
        engine.plan_idle()
    raise AssertionError("plans are due again and again")


def assert_quiet(engine: Engine) -> None:
    """Only the null block's slab is committed, and no worker owns more, nor does the ledger."""
    engine.quiet(5.0)
    counts = engine.setup.page_counts()
    counts.commit([0])
    for device in engine.worker.devices:
        assert device.used == counts.needed
        assert device.owned <= counts.price
    assert held_bytes() == counts.price * engine.setup.page_bytes


@SETUPS
def test_enough_pages(setup: Setup, make: Make) -> None:
    engine = make(setup, 1000, 1000)
    crowd(engine)
    engine.drain()
    engine.check_answers()
    assert_quiet(engine)
    preempted = sum(request.num_preemptions for request in engine.requests.values())
    stock = make(setup, elastic=False)
    crowd(stock)
    stock.drain()
    assert preempted == sum(request.num_preemptions for request in stock.requests.values())


@SETUPS
def test_what_the_driver_refuses_is_a_miss_on_every_worker(setup: Setup, make: Make) -> None:
    """The second worker's device has half of what the crowd would take."""
    engine = make(setup, 1000, 40)
    crowd(engine)
    most = 0
    while engine.step():
        first, second = engine.worker.devices
        assert first.used == second.used
        assert second.owned <= 40
        most = max(most, second.used)
    assert most > 25
    engine.check_answers()
    assert_quiet(engine)


@SETUPS
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_device_that_others_use_as_well(setup: Setup, make: Make, seed: int) -> None:
    """What there is to have changes all the time."""
    engine = make(setup, 60, 60)

    def between(rng: random.Random) -> None:
        for device in engine.worker.devices:
            device.capacity = rng.choice([0, 30, 45, 60, 200])

    random_load(engine, seed, between=between)
    for device in engine.worker.devices:
        device.capacity = 200
    engine.drain()
    engine.check_answers()
    assert_quiet(engine)


@SETUPS
def test_the_workers_are_seldom_asked(setup: Setup, make: Make) -> None:
    """Once for an eighth more, and while the device has no more, not in every step."""
    engine = make(setup, 1000)
    crowd(engine, 16)
    engine.drain()
    steps = len(engine.trace)
    asked = engine.worker.devices[0].asked
    assert asked < steps / 4
    short = make(setup, 30)
    crowd(short, 16)
    short.drain()
    assert short.worker.devices[0].asked < len(short.trace) / 4


@pytest.mark.parametrize("budget", [None, 1 << 20], ids=["no budget", "more than there is"])
@SETUPS
def test_an_idle_cache_gives_way_to_who_is_refused(
    setup: Setup, make: Make, budget: int | None
) -> None:
    """The device is full, which no bound says."""
    idle, busy = (make(setup, 1000, retain="all") for _ in range(2))
    crowd(idle)
    idle.drain()
    idle.quiet(5.0)
    (one,), (other,) = idle.worker.devices, busy.worker.devices
    one.neighbours, other.neighbours = [other], [one]
    one.capacity = other.capacity = one.owned + other.owned
    ledger().set_total(budget)
    kept = one.owned
    crowd(busy, 4, seed=2)
    while busy.step():
        assert len(busy.trace) < 400, "starves"
        wake(idle)
    busy.check_answers()
    assert one.owned < kept


@SETUPS
def test_a_limit_is_met_by_who_is_quiet(setup: Setup, make: Make) -> None:
    engine = make(setup, 1000, retain="all")
    crowd(engine)
    engine.drain()
    engine.quiet(5.0)
    assert engine.elastic is not None
    least = geometry(engine.setup).least_slabs * geometry(engine.setup).slab_bytes
    assert held_bytes() > least
    (record,) = ledger().engines()
    ledger().set_limit(record.name, least)
    wake(engine)
    assert held_bytes() <= least
    assert engine.elastic.queue.kept_count > 0
    ledger().trim(record.name)
    wake(engine)
    assert engine.elastic.queue.kept_count == 0
    assert_quiet(engine)


def test_a_device_without_a_page_is_told_at_start(make: Make) -> None:
    with pytest.raises(PoolExhausted, match=r"pages for 0 slabs of \d+ bytes; expected at least 1"):
        make(KINDS["own pages, one batch at a time"], 2)
    make(KINDS["own pages, one batch at a time"], 3)


def test_the_first_plan_waits_for_no_request(make: Make) -> None:
    """It gives back what warm-up touched, and workers keep what their activations take."""
    engine = make(KINDS["own pages, one batch at a time"], 100)
    assert engine.elastic is not None
    assert engine.elastic.due() == engine.elastic.queue.now
    engine.plan_idle()
    assert engine.elastic.due() is None
