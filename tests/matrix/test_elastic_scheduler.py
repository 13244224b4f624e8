"""vLLM's own schedulers with our queue and plans, before a worker that lags behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcached_patch.engines import vllm_scheduler
from tests.bare import stock
from tests.slots import SLOT_BYTES, Setup
from tests.steps import Clock, Engine

KINDS = {
    "one batch at a time": Setup(),
    "pipeline of 2": Setup(depth=2),
    "pipeline of 3": Setup(depth=3),
    "async, 2 in flight": Setup(asynchronous=True, depth=2),
    "async, 3 in flight": Setup(asynchronous=True, depth=3),
}
LAGGING = "async, 3 in flight"
PAGE_ALIGNED = {"slab_blocks": 4, "page_bytes": 4 * 4 * SLOT_BYTES}
Make = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Make an elastic engine whose time is its steps'."""

    def engine(setup: Setup, retain: str = "none", **more: Any) -> Engine:
        monkeypatch.setenv("KVCACHED_PATCH_RETAIN", retain)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
        clock = Clock()
        monkeypatch.setattr(vllm_scheduler, "time", clock)
        return Engine(setup, clock, **more)

    return engine


@pytest.fixture(params=KINDS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return KINDS[request.param]


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


def committed(engine: Engine) -> int:
    """Pages that the worker holds."""
    return int(engine.worker.memory.committed.sum())


def pages_of_slabs(setup: Setup, slabs: int) -> int:
    """Pages that the first slabs take."""
    return -(-slabs * setup.slab_blocks * setup.block_tokens * SLOT_BYTES // setup.page_bytes)


def assert_drained(engine: Engine) -> None:
    """Nothing is committed but the null block's slab."""
    engine.quiet(1.0)
    assert committed(engine) == pages_of_slabs(engine.setup, 1)
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == (
        engine.setup.blocks - 1
    )


def random_load(engine: Engine, seed: int, requests: int = 40, aborts: bool = True) -> None:
    """Requests that come and go; many share a beginning, some go on where another ended."""
    rng = random.Random(seed)
    starts = [prompt(rng, 30) for _ in range(3)]
    while len(engine.requests) < requests or engine.unfinished():
        if len(engine.requests) < requests and rng.random() < 0.4:
            for _ in range(rng.choice([1, 1, 2, 6])):
                start = rng.choice(starts)[: rng.randrange(31)]
                engine.add(start + prompt(rng, rng.randrange(1, 40)), rng.randrange(1, 40))
            ended = [r for r in engine.requests.values() if r.is_finished()]
            if ended and rng.random() < 0.5:
                earlier = rng.choice(ended)
                engine.add([*earlier.all_token_ids, 7, 8][-90:], rng.randrange(1, 20))
        if aborts and rng.random() < 0.05 and engine.unfinished():
            engine.abort(rng.choice(engine.unfinished()))
        if not engine.step():
            engine.quiet(rng.choice([0.1, 0.5, 3.0]))
        elif rng.random() < 0.05:
            engine.clock.now += rng.choice([0.3, 3.0])
    engine.drain()


def test_bursts_fill_and_drain_the_pool(make: Make, setup: Setup) -> None:
    engine = make(setup)
    for burst in range(3):
        rng = random.Random(burst)
        for _ in range(10):
            engine.add(prompt(rng, rng.randrange(10, 40)), rng.randrange(5, 30))
        peak = 0
        while engine.step():
            peak = max(peak, committed(engine))
        assert peak > 0.9 * len(engine.worker.memory.committed), "the burst does not fill the pool"
        assert_drained(engine)
    engine.check_answers()


@pytest.mark.parametrize("retain", ["none", "all", "640", "2s"])
@pytest.mark.parametrize("window", [None, 9])
def test_no_step_meets_a_page_too_early_or_too_late(
    make: Make, setup: Setup, retain: str, window: int | None
) -> None:
    for seed in range(3):
        blocks = (46, 61, 121)[seed] * (1 if window is None else 2)
        aligned = PAGE_ALIGNED if seed else {}
        engine = make(replace(setup, blocks=blocks, window=window, **aligned), retain, seed=seed)
        random_load(engine, seed)
        engine.check_answers()
        if retain in ("none", "2s"):
            engine.quiet(10.0)
            assert_drained(engine)
