"""The scheduler's side of elastic memory: what may be committed now, and what a plan asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvcached_patch import config
from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.free_list import page_aware
from kvcached_patch.core.pages import Plan
from kvcached_patch.engines.budget import SPARE_SLABS, Budget, Geometry
from kvcached_patch.engines.budgets import Budgets
from kvcached_patch.engines.hit_count import HitCount
from kvcached_patch.engines.page_supply import PageSupply
from kvcached_patch.engines.trimming import Trimming
from kvcached_patch.errors import PoolExhausted

# An empty slab stays committed this long, so that the next request finds its pages touched.
LINGER_SECONDS = 0.2
# Longer where workers wait for their device before they exchange pages, and then many at once.
FENCED_LINGER_SECONDS = 1.0
FENCED_BATCH_SECONDS = 0.5
PUBLISH_SECONDS = 0.5


@dataclass(frozen=True)
class Agreement:
    """What the workers of one engine agreed on.

    footprint: None where slabs share no pages. supply: None where pages need not be had ahead.
    """

    geometry: Geometry
    budget: Budget | Budgets
    footprint: Footprint | None = None
    supply: PageSupply | None = None


class Elastic:
    """One block pool's page-aware queue, with what decides how much of it may be committed."""

    def __init__(self, manager: Any, agreement: Agreement) -> None:
        """Put our queue in the place of the pool's; everything else of the pool stays vLLM's.

        manager: vLLM's KVCacheManager. Raises PoolExhausted if there are no pages to begin with.
        """
        geometry, supply = agreement.geometry, agreement.supply
        self._manager = manager
        self._allocate: Callable[..., Any] | None = None
        self._bounded: Callable[..., Any] | None = None
        self._pool = block_pool = manager.block_pool
        self._retain = config.load().retain
        self._block_bytes = geometry.block_bytes
        self._footprint = agreement.footprint or Footprint(geometry.in_flight)
        self._supply = supply
        fenced = supply is not None
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
        self._lacking = 0  # slabs, while requests wait
        self._missed = False
        self._published = 0.0
        self._hits = HitCount()
        self._ask_share()
        self.budget.hold(self._backed)
        if supply is not None and supply.grow(self._backed, 0.0) < self._backed:
            raise PoolExhausted(
                f"the device has pages for {supply.slabs} slabs of {geometry.slab_bytes} bytes; "
                f"expected at least {self._backed} to begin with"
            )
        self._settle(spare=0)

    def begin(self) -> None:
        """Before a step: take note of limits and demands that have changed.

        Until `end`, what counts as free is what may be committed.
        """
        self._notice_reset()
        if self.budget.changed:
            self._ask_share()
            self._settle(spare=self._spare)
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
        trim = self._trimming.due
        over = trim or (keep is not None and (yields or self._backed > keep))
        if over:
            self._shed(0 if trim or yields else keep or 0)
        if self._supply is not None and self.queue.fresh:
            # Workers own the pages anyway, and wait for their device once for all of them.
            self.queue.commit_ahead(max(self.queue.room or 0, 0))
        plan = self.queue.take_plan(0.0 if over else self._linger, self._batch)
        self._footprint.follow(plan, self.queue.now)
        self._lacking = self._lack(waiting) if self._missed else 0
        self.budget.want(self._lacking)
        self._footprint.totals.misses += self._missed
        none_spare = quiet or self._missed or self._trimming.pending
        self._settle(spare=0 if none_spare else self._spare)
        self._trimming.planned()
        self._missed = False
        return plan if self._supply is None else self._supply.stamp(plan)

    def applied(self) -> None:
        """All releases are in force: their bytes are others' to take."""
        self._footprint.settle(self._clock())
        if self._supply is not None:
            self._supply.applied()
        self._settle(spare=0)
        self._trimming.applied()
        self.publish(at_once=True)

    def due(self) -> float | None:
        """When a plan would next change something without a step, by time.monotonic()."""
        reset = self._pool.cached_block_hash_to_block is not self._cache
        if self._footprint.leaving or reset or self.budget.held > self._backed:
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
            self._settle_ledger(spare=self._spare)
            self.budget.publish(
                cached=self.queue.kept_count,
                free=self.queue.num_free_blocks,
                queries=self._hits.queries,
                hits=self._hits.hits,
                totals=self._footprint.totals,
            )

    @property
    def _backed(self) -> int:
        """Slabs whose pages are there, or will be with the next plan."""
        return self._footprint.slabs + self.queue.fresh

    @property
    def _spare(self) -> int:
        """Slabs reserved ahead; of a supply, whose every asking costs a round to the workers, more
        the more there are.
        """
        return SPARE_SLABS if self._supply is None else max(SPARE_SLABS, self.queue.committed // 8)

    def _ask_share(self) -> int | None:
        return self.budget.share(cached=self.queue.kept_count)

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
        more = self._spare
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
                more = self._supplied(room, count)
                if more < count:
                    self.budget.release(count - more)
                if more:
                    self.queue.restore()
                    self.queue.room = room + more
                    self.queue.withhold()
                    return True
        self._missed = True
        return False

    def _supplied(self, room: int, count: int) -> int:
        """For how many of `count` slabs beyond the room there are pages."""
        if self._supply is None:
            return count
        had = self._backed + room
        return max(self._supply.grow(had + count, self._clock()) - had, 0)

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
        was_bounded = self.queue.room is not None
        bounded = share is not None or self._supply is not None
        # With nothing to bound it the ledger need not be told of each slab at once.
        if bounded or not spare:
            backed = self._settle_ledger(spare)
        self.queue.room = None
        if bounded:
            most = self.budget.held if self._supply is None else self._supply.slabs
            self.queue.room = (most if share is None else min(most, share)) - backed
        if was_bounded is not bounded:
            self._direct()

    def _settle_ledger(self, spare: int) -> int:
        """Hold in the ledger what is backed, which is returned, and what may be in a while."""
        share, backed = self.budget.bound, self._backed
        if share is not None:
            spare = min(spare, max(share - backed, 0))
        elif self._supply is None:
            spare = 0
        most = backed + spare
        if self._supply is not None:
            self._supply.settle(backed, most)
            most = max(most, self._supply.owned)
        if backed > self.budget.held:
            self.budget.hold(backed - self.budget.held)
        elif self.budget.held > most:
            self.budget.release(self.budget.held - most)
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
