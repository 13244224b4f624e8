"""The scheduler's side of elastic memory: what may be committed now, and what a plan asks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from kvcached_patch import config
from kvcached_patch.core.free_list import page_aware
from kvcached_patch.core.pages import Plan
from kvcached_patch.engines.budget import SPARE_SLABS, Budget, Geometry

# An empty slab stays committed this long, so that the next request finds its pages touched.
LINGER_SECONDS = 0.2
PUBLISH_SECONDS = 0.5


class HitCount:
    """vLLM's own prefix-cache counters, which it starts anew after each step, added up.

    queries, hits: tokens; 0 while vLLM keeps no statistics.
    """

    def __init__(self) -> None:
        self.queries = self.hits = 0
        self._stats: Any = None
        self._seen = (0, 0)

    def note(self, stats: Any) -> None:
        """Count what was added to `stats`, a ``PrefixCacheStats`` or None, since the last look."""
        if stats is None:
            return
        before = self._seen if stats is self._stats else (0, 0)
        self._stats, self._seen = stats, (stats.queries, stats.hits)
        self.queries += stats.queries - before[0]
        self.hits += stats.hits - before[1]


class Elastic:
    """One block pool's page-aware queue, with what decides how much of it may be committed."""

    def __init__(self, manager: Any, geometry: Geometry, budget: Budget) -> None:
        """Put our queue in the place of the pool's; everything else of the pool stays vLLM's.

        manager: vLLM's KVCacheManager.
        """
        self._manager = manager
        self._allocate: Callable[..., Any] | None = None
        self._bounded: Callable[..., Any] | None = None
        self._pool = block_pool = manager.block_pool
        self._retain = config.load().retain
        self._block_bytes = geometry.block_bytes
        self._cache = block_pool.cached_block_hash_to_block
        # From 0.24: the further hashes of blocks. From 0.30: free blocks that are still read.
        self._hashes = getattr(block_pool, "cached_block_hashes_by_block", {})
        self._watched = getattr(block_pool, "_reuse_watchers", {})
        self.queue = block_pool.free_block_queue = page_aware(
            block_pool.free_block_queue,
            block_pool.blocks,
            geometry.slab_blocks,
            self._kept_of,
            time.monotonic,
        )
        self.budget = budget
        self._lacking = 0  # slabs, while requests wait
        # Slabs that plans released which some worker may not have carried out yet, oldest first:
        # a plan's releases are in force when the next one is applied (P2).
        self._freed = deque([0] * geometry.in_flight)
        self._missed = False
        self._published = 0.0
        self._hits = HitCount()
        self._ask_share()
        self._settle(spare=0)

    def begin(self) -> None:
        """Before a step: take note of limits and demands that have changed.

        Until `end`, what counts as free is what may be committed.
        """
        self._notice_reset()
        if self.budget.changed:
            self._ask_share()
            self._settle(spare=SPARE_SLABS)
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
        if quiet:
            self._ask_share()
            self._notice_reset()
            self._sweep()
        else:
            self._hits.note(self._manager.prefix_cache_stats)
        if self.queue.kept_count:
            self._evict()
        keep = self.budget.keep
        yields = self._missed and self.budget.must_yield
        over = keep is not None and (yields or self._backed > keep)
        if over:
            self._shed(0 if yields else keep or 0)
        plan = self.queue.take_plan(0.0 if over else LINGER_SECONDS)
        self._freed.append(len(plan.release))
        self._freed.popleft()
        self._lacking = self._lack(waiting) if self._missed else 0
        self.budget.want(self._lacking)
        self._settle(spare=0 if quiet or self._missed else SPARE_SLABS)
        self._missed = False
        return plan

    def applied(self) -> None:
        """All releases are in force: their bytes are others' to take."""
        self._freed = deque([0] * len(self._freed))
        self._settle(spare=0)
        self.publish()

    def due(self) -> float | None:
        """When a plan would next change something without a step, by time.monotonic()."""
        reset = self._pool.cached_block_hash_to_block is not self._cache
        if any(self._freed) or reset or self.budget.held > self._backed:
            return self.queue.now
        times = []
        if (empty_since := self.queue.empty_since) is not None:
            times.append(empty_since + LINGER_SECONDS)
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

    def publish(self) -> None:
        """Tell the ledger how it stands, not more often than people look."""
        if self.queue.now - self._published >= PUBLISH_SECONDS:
            self._published = self.queue.now
            self._settle_ledger(spare=SPARE_SLABS)
            self.budget.publish(
                cached=self._cached_bytes,
                free=self.queue.num_free_blocks * self._block_bytes,
                queries=self._hits.queries,
                hits=self._hits.hits,
            )

    @property
    def _backed(self) -> int:
        """Slabs whose pages are there: committed, or released by a plan not yet in force."""
        return self.queue.committed + sum(self._freed)

    @property
    def _cached_bytes(self) -> int:
        """Of blocks that only the prefix cache keeps."""
        return self.queue.kept_count * self._block_bytes

    def _ask_share(self) -> int | None:
        return self.budget.share(cached=self._cached_bytes)

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
        more = SPARE_SLABS
        while slots is None and self._grow(more):
            slots = self._allocate(*args, **kwargs)
            more *= 2
        return slots

    def _grow(self, slabs: int) -> bool:
        room = self.queue.room
        missing = self.queue.slabs - self.queue.committed - (room or 0)
        if room is None or missing <= 0:
            return False
        if room < 0:  # over its share: others' memory would not help
            self._missed = True
            return False
        for count in (min(slabs, missing), 1):
            if not self._may_hold(self._backed + room + count):
                # Under shortage a share covers what is held and wanted: the wish comes first.
                self.budget.want(max(count, self._lacking))
                if not self._may_hold(self._backed + room + count):
                    continue
            if not self.budget.must_yield and self.budget.reserve(count):
                self.queue.restore()
                self.queue.room = room + count
                self.queue.withhold()
                return True
        self._missed = True
        return False

    def _may_hold(self, slabs: int) -> bool:
        share = self._ask_share()
        return share is None or slabs <= share

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
        """Bring room and ledger in line with what is committed.

        spare: slabs reserved ahead that may stay so.
        """
        share = self.budget.bound
        # With neither a limit nor a budget the ledger need not be told of each slab at once.
        if share is not None or not spare:
            backed = self._settle_ledger(spare)
        was_bounded = self.queue.room is not None
        self.queue.room = None if share is None else min(self.budget.held, share) - backed
        if was_bounded is not (share is not None):
            self._direct()

    def _settle_ledger(self, spare: int) -> int:
        """Hold in the ledger what is backed, which is returned."""
        share, backed = self.budget.bound, self._backed
        if backed > self.budget.held:
            self.budget.hold(backed - self.budget.held)
        keep = 0 if share is None else min(spare, max(share - backed, 0))
        if self.budget.held - backed > keep:
            self.budget.release(self.budget.held - backed - keep)
        return backed

    def _shed(self, share: int) -> None:
        """Make slabs empty by evicting cached blocks, oldest first, until the share is met."""
        for block in self.queue.kept():
            if self._backed - self.queue.empty <= share:
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
        before = None if retain.seconds is None else time.monotonic() - retain.seconds
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
