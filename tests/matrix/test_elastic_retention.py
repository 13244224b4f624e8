"""Cached and watched blocks that nobody uses: kept as asked for, then given back."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from packaging.version import Version
from vllm.v1.metrics.stats import PrefixCacheStats

from kvcached_patch import api, config
from kvcached_patch.ledger import Ledger, ledger_path
from tests.bare import VERSION, stock
from tests.slots import Setup
from tests.steps import Engine, Make, assert_drained, committed, engine_apart, pool_of, prompt

AHEAD = Setup(asynchronous=True, depth=2)
LENGTH = 32
TEXTS = [prompt(random.Random(n), LENGTH) for n in range(3)]
HIT = LENGTH - AHEAD.block_tokens  # the last token of a prompt is always computed


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    return partial(engine_apart, monkeypatch, tmp_path)


def hits(engine: Engine, text: list[int]) -> int:
    """Tokens of this prompt found in the prefix cache; it runs alone."""
    before = engine.worker.hits
    engine.add(text, 2)
    engine.drain()
    return engine.worker.hits - before


def kept(engine: Engine) -> int:
    """Cached blocks that nobody uses."""
    assert engine.elastic is not None
    return engine.elastic.queue.kept_count


def fill(engine: Engine) -> None:
    """Run all texts, one after another."""
    assert [hits(engine, text) for text in TEXTS] == [0, 0, 0]


def test_all_is_kept(make: Make) -> None:
    engine = make(AHEAD, "all")
    fill(engine)
    engine.quiet(1.0)
    before = committed(engine)
    engine.quiet(1e6)
    assert committed(engine) == before
    assert [hits(engine, text) for text in TEXTS] == [HIT] * 3


def test_none_is_kept(make: Make) -> None:
    engine = make(AHEAD, "none")
    fill(engine)
    assert_drained(engine)
    fill(engine)
    engine.check_answers()


def test_a_size_bounds_what_is_kept_and_the_oldest_goes_first(make: Make) -> None:
    engine = make(AHEAD, str(17 * 32))  # two texts of eight blocks of 32 bytes, and one block
    fill(engine)
    engine.quiet(1.0)
    assert kept(engine) == 17
    assert hits(engine, TEXTS[2]) == HIT
    assert hits(engine, TEXTS[1]) == HIT
    assert hits(engine, TEXTS[0]) == 0
    engine.check_answers()


def test_a_duration_counts_from_the_last_use(make: Make) -> None:
    engine = make(AHEAD, "10s")
    fill(engine)
    engine.quiet(6.0)
    assert hits(engine, TEXTS[1]) == HIT
    engine.quiet(6.0)
    assert kept(engine) == LENGTH // AHEAD.block_tokens, "one text is six seconds old, two twelve"
    assert hits(engine, TEXTS[1]) == HIT
    engine.quiet(11.0)
    assert_drained(engine)
    engine.check_answers()


def test_by_default_a_minute(make: Make) -> None:
    engine = make(AHEAD, "")
    fill(engine)
    engine.quiet(59.0)
    assert [hits(engine, text) for text in TEXTS] == [HIT] * 3
    engine.quiet(61.0)
    assert_drained(engine)


@pytest.mark.parametrize("retain", ["all", "none", "60s"])
def test_reset_of_free_cached_blocks_gives_them_back(make: Make, retain: str) -> None:
    engine = make(AHEAD, retain)
    fill(engine)
    assert engine.scheduler.reset_prefix_cache()
    fill(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert_drained(engine)
    engine.check_answers()


def test_reset_fails_while_requests_run_as_in_stock(make: Make) -> None:
    def run(elastic: bool) -> Engine:
        engine = make(AHEAD, "all", elastic=elastic)
        fill(engine)
        engine.add(TEXTS[0], 20)
        for _ in range(5):
            engine.step()
        assert not engine.scheduler.reset_prefix_cache()
        assert hits(engine, TEXTS[0]) == HIT
        engine.drain()
        engine.check_answers()
        return engine

    patched = run(elastic=True)
    with stock():
        plain = run(elastic=False)
    assert patched.trace == plain.trace
    assert patched.events.seen == plain.events.seen


@pytest.mark.parametrize("setup", [AHEAD, Setup()], ids=["async", "sync"])
def test_reset_that_preempts_running_requests(make: Make, setup: Setup) -> None:
    engine = make(setup, "all")
    for text in TEXTS:
        engine.add(text, 20)
    for _ in range(8):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    engine.check_answers()
    assert engine.scheduler.reset_prefix_cache()
    engine.plan_idle()
    assert_drained(engine)


def test_blocks_that_lose_their_hash_while_free_are_given_back(make: Make) -> None:
    """A KV connector reports blocks that failed to load: vLLM's `evict_blocks`."""
    engine = make(AHEAD, "all")
    fill(engine)
    blocks = {b.block_id for b in pool_of(engine).blocks if b.block_hash is not None}
    engine.scheduler.kv_cache_manager.evict_blocks(blocks)
    engine.plan_idle()
    assert_drained(engine)


@pytest.mark.skipif(Version("0.30") > VERSION, reason="vLLM has reuse watchers from 0.30")
def test_watched_blocks_stay_until_vllm_lets_them_go(make: Make) -> None:
    engine = make(AHEAD, "10s")
    fill(engine)
    pool = pool_of(engine)
    blocks = pool.get_new_blocks(5)
    ids = [block.block_id for block in blocks]
    engine.plan_idle()
    told: list[int] = []
    pool.unpin_blocks(blocks, lambda block: told.append(block.block_id))
    engine.quiet(30.0)
    assert kept(engine) == 5
    assert engine.worker.holds(ids)
    assert not told
    assert engine.scheduler.reset_prefix_cache()
    assert sorted(told) == sorted(ids)
    engine.plan_idle()
    assert_drained(engine)


def test_the_hit_rate_that_vllm_counts_is_published(make: Make) -> None:
    engine = make(AHEAD, "all")
    manager = engine.scheduler.kv_cache_manager
    engine.scheduler.log_stats = manager.log_stats = True  # as in `vllm serve`
    manager.prefix_cache_stats = PrefixCacheStats()
    assert hits(engine, TEXTS[0]) == 0
    assert [hits(engine, TEXTS[0]) for _ in range(2)] == [HIT, HIT]
    engine.quiet(1.0)
    engine.plan_idle()
    (record,) = Ledger(ledger_path(config.ledger_dir(), "host")).engines()
    assert (record.queries, record.hits) == (3 * LENGTH, 2 * HIT)
    (shown,) = api.engines("host")
    assert shown.hit_rate == pytest.approx(2 * HIT / (3 * LENGTH))
