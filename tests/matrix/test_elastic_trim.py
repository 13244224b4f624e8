"""An engine that is asked to trim keeps, once, what its requests use and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached_patch import api
from tests.slots import SLOT_BYTES, Setup
from tests.steps import Engine, committed, engine_apart, geometry, pool_of, prompt

SLABS = 30
SLAB_BYTES = 4 * 4 * SLOT_BYTES  # one page
SIZE = {"blocks": 4 * SLABS, "slab_blocks": 4, "page_bytes": SLAB_BYTES, "model_tokens": 112}
KINDS = {
    "one batch at a time": Setup(**SIZE),
    "pipeline of 3": Setup(**SIZE, depth=3),
    "async, 3 in flight": Setup(**SIZE, asynchronous=True, depth=3),
}
BOUNDS = {"unbounded": None, "with a budget": SLABS * SLAB_BYTES}
Make = Callable[..., Engine]


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def setup(request: pytest.FixtureRequest) -> Setup:
    found: Setup = request.param
    return found


@pytest.fixture(params=BOUNDS.values(), ids=BOUNDS)
def engine(
    setup: Setup, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Engine:
    """An engine that keeps its prefix cache for ever."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if request.param is not None:
        api.set_budget(request.param, device="host")
    return engine_apart(monkeypatch, tmp_path, setup, "all")


def add(engine: Engine, requests: int, seed: int, tokens: int = 24) -> None:
    rng = random.Random(seed)
    for _ in range(requests):
        engine.add(prompt(rng, 24), tokens)


def known() -> api.Engine:
    """The engine, as other programs see it."""
    (found,) = api.engines("host")
    return found


def test_a_quiet_engine_gives_back_all_but_the_null_block(engine: Engine) -> None:
    add(engine, 6, seed=1)
    engine.drain()
    engine.quiet(100.0)
    assert committed(engine) > 10
    assert known().cached_bytes > 0
    assert engine.elastic is not None
    assert not engine.elastic.budget.changed
    (asked,) = api.trim("engine", device="host")
    assert asked.trimming
    assert engine.elastic.budget.changed, "which wakes a quiet EngineCore"
    engine.plan_idle()
    now = known()
    assert (now.trimming, now.committed_bytes, committed(engine)) == (False, SLAB_BYTES, 1)
    assert pool_of(engine).get_num_free_blocks() == engine.setup.blocks - 1

    add(engine, 6, seed=2)
    engine.drain()
    engine.quiet(100.0)
    assert committed(engine) > 10, "it was asked once"
    engine.check_answers()


def test_a_busy_engine_gives_back_what_no_request_uses(engine: Engine, setup: Setup) -> None:
    add(engine, 6, seed=1)
    engine.drain()
    add(engine, 2, seed=2, tokens=80)
    for _ in range(20):
        engine.step()
    before = committed(engine)
    assert engine.elastic is not None
    assert engine.elastic.queue.kept_count > 40
    api.trim("engine", device="host")
    steps = 0
    while known().trimming:
        assert engine.step()
        steps += 1
        assert steps <= geometry(setup).in_flight + 1
    assert engine.elastic.queue.kept_count < 4, "what has died since"
    blocks = pool_of(engine).blocks
    used = {block.block_id // setup.slab_blocks for block in blocks if block.ref_cnt} | {0}
    assert known().committed_bytes == len(used) * SLAB_BYTES
    assert committed(engine) <= len(used) < before
    assert len(engine.unfinished()) == 2
    engine.drain()
    engine.check_answers()


def test_a_request_that_comes_meanwhile_is_met_by_a_plan_of_its_own(engine: Engine) -> None:
    add(engine, 2, seed=2, tokens=80)
    api.trim("engine", device="host")
    for _ in range(2):
        engine.step()
    assert known().trimming, "what it released is not in force"
    api.trim("engine", device="host")
    assert engine.elastic is not None
    trims = 0
    while known().trimming:
        trims += engine.elastic._trimming.due
        assert engine.step()
    assert trims == 1
    engine.drain()
    engine.check_answers()
