"""The scheduler's side of elastic memory: what may be committed now, and what a plan asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from kvcached_patch import config
from kvcached_patch.core.free_list import page_aware
from kvcached_patch.core.pages import Plan
from kvcached_patch.engines.allowance import Agreement, Allowance
from kvcached_patch.engines.budget import SPARE_SLABS
from kvcached_patch.engines.hit_count import HitCount
from kvcached_patch.engines.trimming import Trimming

# An empty slab stays committed this long, so that the next request finds its pages touched.
LINGER_SECONDS = 0.2
# Longer where workers wait for their device before they exchange pages, and then many at once.
FENCED_LINGER_SECONDS = 1.0
FENCED_BATCH_SECONDS = 0.5
PUBLISH_SECONDS = 0.5


class Elastic:
    """One block pool's page-aware queue, with what decides how much of it may be committed."""

    def __init__(self, manager: Any, agreement: Agreement) -> None:
        """Put our queue in the place of the pool's; everything else of the pool stays vLLM's.

        manager: vLLM's KVCacheManager. Raises PoolExhausted if there are no pages to begin with.
        """
        geometry = agreement.geometry
        self._manager = manager
        self._allocate: Callable[..., Any] | None = None
        self._bounded: Callable[..., Any] | None = None
        self._pool = block_pool = manager.block_pool
        self._retain = config.load().retain
        self._block_bytes = geometry.block_bytes
        fenced = agreement.supply is not None
        self._linger = FENCED_LINGER_SECONDS if fenced else LINGER_SECONDS
        self._batch = FENCED_BATCH_SECONDS if fenced else 0.0
        self._cache = block_pool.cached_block_hash_to_block
        # From 0.24: the further hashes of blocks. From 0.30: free blocks that are still read.
        self._hashes = getattr(block_pool, "cached_block_hashes_by_block", {})
        self._watched = getattr(block_pool, "_reuse_watchers", {})
        self._clock = time.monotonic
        self.queue = block_pool.free_block_queue = page_aware(
            block_pool.free_block_queue,
            block_pool.blocks,
            geometry.slab_blocks,
            self._kept_of,
            self._clock,
        )
        self.budget = agreement.budget
        self._trimming = Trimming(agreement.budget, geometry.in_flight)
        self._published = 0.0
        self._hits = HitCount()
        self._allowance = Allowance(agreement, self.queue, self._clock)

    def begin(self) -> None:
        """Before a step: take note of limits and demands that have changed.

        Until `end`, what counts as free is what may be committed.
        """
        self._notice_reset()
        if self.budget.changed:
            self._allowance.ask_share()
            self._settle(self._allowance.spare)
            self._direct()
        self.queue.withhold()

    def end(self) -> None:
        """After a step was scheduled, or failed: free means again what vLLM means by it."""
        self.queue.restore()

    def plan(self, *, quiet: bool = False, waiting: Iterable[Any] = ()) -> Plan:
        """Evict what has outlived its retention, obey limits, and say what changed.

        quiet: no step goes with the plan, and none is to be expected. waiting: vLLM's requests
        that this step left waiting, the first one first.
        """
        allowance = self._allowance
        if quiet:
            allowance.ask_share()
            self._notice_reset()
            self._sweep()
        else:
            self._hits.note(self._manager.prefix_cache_stats)
        if self.queue.kept_count:
            self._evict()
        keep = self.budget.keep
        yields = allowance.missed and self.budget.must_yield
        trim = self._trimming.due
        over = trim or (keep is not None and (yields or allowance.backed > keep))
        if over:
            self._shed(0 if trim or yields else keep or 0)
        allowance.commit_ahead()
        plan = self.queue.take_plan(0.0 if over else self._linger, self._batch)
        allowance.follow(plan, lacking=self._lack(waiting) if allowance.missed else 0)
        none_spare = quiet or allowance.missed or self._trimming.pending
        self._settle(0 if none_spare else allowance.spare)
        self._trimming.planned()
        return allowance.stamp(plan)

    def applied(self) -> None:
        """All releases are in force: their bytes are others' to take."""
        self._allowance.applied()
        self._settle(0)
        self._trimming.applied()
        self.publish(at_once=True)

    def due(self) -> float | None:
        """When a plan would next change something without a step, by time.monotonic()."""
        reset = self._pool.cached_block_hash_to_block is not self._cache
        # Fresh before the first plan: it also gives back what warm-up touched.
        if reset or self._allowance.unsettled or self.queue.fresh:
            return self.queue.now
        times = []
        if (empty_since := self.queue.empty_since) is not None:
            times.append(empty_since + self._linger)
        evictable = (b.block_id for b in self.queue.kept() if b.block_id not in self._watched)
        oldest = next((self.queue.freed_at[block_id] for block_id in evictable), None)
        if self._retain.seconds is not None and oldest is not None:
            times.append(oldest + self._retain.seconds)
        return min(times, default=None)

    def admit(self, allocate: Callable[..., Any]) -> None:
        """From now on decide on what vLLM's own `allocate_slots` is asked for."""
        self._allocate = allocate

        def bounded(*args: Any, **kwargs: Any) -> Any:
            """Allocate within what may be committed; None is a miss."""
            slots = allocate(*args, **kwargs)
            return slots if slots is not None else self._allocate_more(*args, **kwargs)

        self._bounded = bounded
        self._direct()

    def publish(self, *, at_once: bool = False) -> None:
        """Tell the ledger how it stands, while steps are made not more often than people look."""
        if at_once or self.queue.now - self._published >= PUBLISH_SECONDS:
            self._published = self.queue.now
            self._allowance.settle_ledger(self._allowance.spare)
            self.budget.publish(
                cached=self.queue.kept_count,
                free=self.queue.num_free_blocks,
                queries=self._hits.queries,
                hits=self._hits.hits,
                totals=self._allowance.totals,
            )

    def _direct(self) -> None:
        """Let the scheduler's calls, one for each request in each step, come the shortest way."""
        if self._allocate is not None:
            way = self._allocate if self.queue.room is None else self._bounded
            self._manager.allocate_slots = way

    def _allocate_more(self, *args: Any, **kwargs: Any) -> Any:
        """Try again while more can be reserved, as far as limit and budget allow."""
        assert self._allocate is not None
        slots = None
        owed = min(self.queue.num_free_blocks, 0)
        if owed:  # vLLM asks whether 0 > num_free_blocks for a request that needs no block
            self.queue.num_free_blocks -= owed
            slots = self._allocate(*args, **kwargs)
            self.queue.num_free_blocks += owed
        more = self._allowance.spare
        while slots is None and self._allowance.grow(more):
            slots = self._allocate(*args, **kwargs)
            more *= 2
        return slots

    def _lack(self, waiting: Iterable[Any]) -> int:
        """Slabs that the waiting requests would take, as far as the pool has them."""
        most = max(self.queue.slabs - self.queue.committed - (self.queue.room or 0), 0)
        groups = self._manager.kv_cache_config.kv_cache_groups
        blocks = 0
        for request in waiting:
            blocks += sum(-(-request.num_tokens // g.kv_cache_spec.block_size) for g in groups)
            if blocks >= most * self.queue.slab_blocks:
                break
        return min(max(-(-blocks // self.queue.slab_blocks), SPARE_SLABS), most)

    def _settle(self, spare: int) -> None:
        was_bounded = self.queue.room is not None
        self._allowance.settle(spare)
        if was_bounded is not (self.queue.room is not None):
            self._direct()

    def _shed(self, share: int) -> None:
        """Make slabs empty by evicting cached blocks, oldest first, until the share is met."""
        empty = -1
        for block in self.queue.kept():
            if share and empty != self.queue.empty:
                empty = self.queue.empty
                if self._allowance.without_empty() <= share:
                    return
            self._let_go(block)

    def _kept_of(self, blocks: list[Any]) -> list[Any]:
        hashes, watched = self._hashes, self._watched
        if not (self._cache or hashes or watched):
            return []
        return [
            block
            for block in blocks
            if block.block_hash is not None or block.block_id in hashes or block.block_id in watched
        ]

    def _notice_reset(self) -> None:
        """`reset_prefix_cache` takes all hashes away without a word to the queue."""
        cache = self._pool.cached_block_hash_to_block
        if cache is self._cache:
            return
        self._cache = cache
        self._sweep()

    def _sweep(self) -> None:
        """Let go of kept blocks that lost their hash while free: `evict_blocks` tells nobody."""
        for block in self.queue.kept():
            if not self._kept_of([block]):
                self.queue.let_go(block)

    def _evict(self) -> None:
        """Take the hashes of blocks that nobody uses, oldest first, by vLLM's own function."""
        queue, retain = self.queue, self._retain
        if retain.seconds is None and retain.nbytes is None:
            return
        most = None if retain.nbytes is None else retain.nbytes // self._block_bytes
        before = None if retain.seconds is None else self._clock() - retain.seconds
        for block in queue.kept():
            over = most is not None and queue.kept_count > most
            old = before is not None and queue.freed_at[block.block_id] <= before
            if not (over or old):
                return
            self._let_go(block)

    def _let_go(self, block: Any) -> None:
        if block.block_id not in self._watched:
            self._pool._maybe_evict_cached_block(block)
            self.queue.let_go(block)
