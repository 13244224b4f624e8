"""The seams of vLLM's scheduler: a page-aware free queue, and a plan with every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, finalize

from kvcached_patch import config
from kvcached_patch.core.free_list import PageAwareQueue
from kvcached_patch.core.pages import PLAN, Plan
from kvcached_patch.engines.budget import SPARE_SLABS, Budget, Geometry, join

# An empty slab stays committed this long, so that the next request finds its pages touched.
LINGER_SECONDS = 0.2
PUBLISH_SECONDS = 0.5


class Elastic:
    """One block pool's page-aware queue, with what decides how much of it may be committed."""

    def __init__(self, block_pool: Any, geometry: Geometry, budget: Budget) -> None:
        """Put our queue in the place of the pool's; everything else of the pool stays vLLM's."""
        self._pool = block_pool
        self._retain = config.load().retain
        self._block_bytes = geometry.block_bytes
        self._cache = block_pool.cached_block_hash_to_block
        # From 0.30: free blocks that a connector still reads.
        self._watched = vars(block_pool).get("_reuse_watchers", {})
        queue = block_pool.free_block_queue
        queue.__class__ = type("PageAwareQueue", (PageAwareQueue, type(queue)), {})
        queue.adopt(block_pool.blocks, geometry.slab_blocks, self._kept_of, time.monotonic)
        self.queue: PageAwareQueue = queue
        self.budget = budget
        # Slabs that plans released which some worker may not have carried out yet, oldest first:
        # a plan's releases are in force when the next one is applied (P2).
        self._freed = deque([0] * geometry.in_flight)
        self._missed = False
        self._published = 0.0
        block_pool.get_num_free_blocks = self._free_blocks
        self._admitting = False
        self._settle(spare=0)

    def begin(self) -> None:
        """Before a step: take note of limits and demands that have changed."""
        self._notice_reset()
        self._settle(spare=SPARE_SLABS)

    def plan(self, *, quiet: bool = False) -> Plan:
        """Evict what has outlived its retention, obey limits, and say what changed.

        quiet: no step goes with the plan, and none is to be expected.
        """
        self._notice_reset()
        if quiet:
            self._sweep()
        self._evict()
        fair = self.budget.share() and self.budget.fair
        yields = self._missed and self.budget.must_yield
        over = fair is not None and (yields or self._backed > fair)
        if over:
            self._shed(0 if yields else fair or 0)
        plan = self.queue.take_plan(0.0 if over else LINGER_SECONDS)
        self._freed.append(len(plan.release))
        if freed := self._freed.popleft():
            self.budget.release(freed)
        if not self._missed:
            self.budget.want(0)
        self._settle(spare=0 if quiet or self._missed else SPARE_SLABS)
        self._missed = False
        return plan

    def applied(self) -> None:
        """All releases are in force: their bytes are others' to take."""
        if freed := sum(self._freed):
            self.budget.release(freed)
            self._freed = deque([0] * len(self._freed))
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
        oldest = next((self.queue.kept_since[block_id] for block_id in evictable), None)
        if self._retain.seconds is not None and oldest is not None:
            times.append(oldest + self._retain.seconds)
        return min(times, default=None)

    def admit(self, allocate: Callable[[], Any]) -> Any:
        """Run vLLM's `allocate_slots` within what may be committed; None is a miss.

        While it misses for want of room, more is reserved, as far as limit and budget allow.
        """
        if self.queue.room is None:
            return allocate()
        more = 1
        while True:
            self._admitting = True
            try:
                slots = allocate()
            finally:
                self._admitting = False
            if slots is not None or not self._grow(more):
                return slots
            more *= 2

    def publish(self) -> None:
        """Tell the ledger how it stands, not more often than people look."""
        now = time.monotonic()
        if now - self._published >= PUBLISH_SECONDS:
            self._published = now
            size = self._block_bytes
            self.budget.publish(
                cached=len(self.queue.kept_since) * size, free=self.queue.num_free_blocks * size
            )

    @property
    def _backed(self) -> int:
        """Slabs whose pages are there: committed, or released by a plan not yet in force."""
        return self.queue.committed + sum(self._freed)

    def _free_blocks(self) -> int:
        """The count that vLLM means; in `allocate_slots`, less what may not be committed."""
        return self.queue.admissible if self._admitting else self.queue.num_free_blocks

    def _grow(self, slabs: int) -> bool:
        room = self.queue.room
        missing = self.queue.slabs - self.queue.committed - (room or 0)
        if room is None or missing <= 0:
            return False
        if room < 0:  # over its share: others' memory would not help
            self._missed = True
            return False
        for count in (min(slabs, missing), 1):
            # Under shortage a share covers what is held and wanted: the wish comes first.
            self.budget.want(count)
            share = self.budget.share()
            if share is not None and self._backed + room + count > share:
                continue
            if not self.budget.must_yield and self.budget.reserve(count):
                self.queue.room = room + count
                return True
        self._missed = True
        self.budget.want(min(max(slabs, SPARE_SLABS), missing))
        return False

    def _settle(self, spare: int) -> None:
        """Bring room and ledger in line with what is committed.

        spare: slabs reserved ahead that may stay so.
        """
        share, backed = self.budget.share(), self._backed
        if backed > self.budget.held:
            self.budget.hold(backed - self.budget.held)
        keep = 0 if share is None else min(spare, max(share - backed, 0))
        if self.budget.held - backed > keep:
            self.budget.release(self.budget.held - backed - keep)
        self.queue.room = None if share is None else min(self.budget.held - backed, share - backed)

    def _shed(self, share: int) -> None:
        """Make slabs empty by evicting cached blocks, oldest first, until the share is met."""
        for block in self.queue.kept():
            if self._backed - self.queue.empty <= share:
                return
            self._let_go(block)

    def _kept_of(self, blocks: list[Any]) -> list[Any]:
        extra = self._pool.cached_block_hashes_by_block
        return [
            block
            for block in blocks
            if block.block_hash is not None
            or block.block_id in extra
            or block.block_id in self._watched
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
            over = most is not None and len(queue.kept_since) > most
            old = before is not None and queue.kept_since[block.block_id] <= before
            if not (over or old):
                return
            self._let_go(block)

    def _let_go(self, block: Any) -> None:
        if block.block_id not in self._watched:
            self._pool._maybe_evict_cached_block(block)
            self.queue.let_go(block)


_agreed: tuple[Geometry, Budget] | None = None
_elastic: WeakKeyDictionary[Any, Elastic] = WeakKeyDictionary()


def agree(geometry: Geometry | None, budget: Budget | None = None) -> None:
    """Set the geometry for the scheduler that this process makes next; None: not elastic.

    budget: entered in the ledger here if it is not given.
    """
    global _agreed
    _agreed = (geometry, budget or join(geometry)) if geometry else None


def elastic_of(scheduler: Any) -> Elastic | None:
    """The elastic side of a scheduler, None if its memory is not elastic."""
    return _elastic.get(scheduler.kv_cache_manager)


def manage(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``KVCacheManager.__init__``, made only by the scheduler: afterwards, adopt its queue."""
    global _agreed
    wrapped(*args, **kwargs)
    agreed, _agreed = _agreed, None
    if agreed is not None:
        geometry, budget = agreed
        _elastic[manager] = Elastic(manager.block_pool, geometry, budget)
        finalize(manager, budget.close)


def allocate_slots(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``KVCacheManager.allocate_slots``: memory that cannot be had is a scheduling miss."""
    elastic = _elastic.get(manager)
    call = partial(wrapped, *args, **kwargs)
    return call() if elastic is None else elastic.admit(call)


def schedule(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Scheduler.schedule``: the plan travels as an attribute of the SchedulerOutput."""
    elastic = _elastic.get(scheduler.kv_cache_manager)
    if elastic is not None:
        elastic.begin()
    output = wrapped(*args, **kwargs)
    if elastic is not None:
        setattr(output, PLAN, elastic.plan())
        elastic.publish()
    return output
