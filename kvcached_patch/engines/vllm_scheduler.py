"""The seams of vLLM's scheduler: a page-aware free queue, and a plan with every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

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
        self._freed = 0  # slabs that the last plan released: their pages go with the next step
        self._missed = False
        self._published = 0.0
        block_pool.get_num_free_blocks = self._free_blocks
        self._admitting = False
        self._settle()

    def plan(self) -> Plan:
        """Evict what has outlived its retention, obey limits, and say what changed."""
        self._notice_reset()
        self._evict()
        share = self.budget.share()
        over = share is not None and self.budget.held - self._freed > share
        if over:
            self._shrink(share or 0)
        plan = self.queue.take_plan(0.0 if over else LINGER_SECONDS)
        if self._freed:
            self.budget.release(self._freed)
        self._freed = len(plan.release)
        if not self._missed:
            self.budget.want(0)
        self._missed = False
        self._settle()
        return plan

    def applied(self) -> None:
        """The last plan's releases are in force: their bytes are others' to take."""
        if self._freed:
            self.budget.release(self._freed)
            self._freed = 0
        self.publish()

    def due(self) -> float | None:
        """When a plan would next change something without a step, by time.monotonic()."""
        times = []
        if (empty_since := self.queue.empty_since) is not None:
            times.append(empty_since + LINGER_SECONDS)
        oldest = next((self.queue.kept_since[b.block_id] for b in self.queue.kept()), None)
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

    def _free_blocks(self) -> int:
        """The count that vLLM means; in `allocate_slots`, less what may not be committed."""
        return self.queue.admissible if self._admitting else self.queue.num_free_blocks

    def _grow(self, slabs: int) -> bool:
        room = self.queue.room
        missing = self.queue.slabs - self.queue.committed - (room or 0)
        if room is None or missing <= 0:
            return False
        for count in (min(slabs, missing), 1):
            # Under shortage a share covers what is held and wanted: the wish comes first.
            self.budget.want(count)
            share = self.budget.share()
            within = share is None or self.budget.held - self._freed + count <= share
            if within and self.budget.reserve(count):
                self.queue.room = room + count
                return True
        self._missed = True
        self.budget.want(min(max(slabs, SPARE_SLABS), missing))
        return False

    def _settle(self) -> None:
        """Bring room and ledger in line with what is committed."""
        committed = self.queue.committed + self._freed
        if self.budget.share() is None:
            self.queue.room = None
            if committed > self.budget.held and not self.budget.reserve(
                committed - self.budget.held
            ):
                self.queue.room = 0
        else:
            if committed > self.budget.held:
                self.budget.reserve(committed - self.budget.held)
            self.queue.room = max(self.budget.held - committed, 0)
        spare = self.budget.held - committed
        keep = 0 if self.queue.room is None else SPARE_SLABS
        if spare > keep:
            self.budget.release(spare - keep)
            if self.queue.room is not None:
                self.queue.room = keep

    def _shrink(self, share: int) -> None:
        """Make slabs empty by evicting cached blocks, oldest first, until the share is met."""
        for block in self.queue.kept():
            if self.queue.committed - self.queue.empty <= share:
                return
            self._let_go(block)

    def publish(self) -> None:
        """Tell the ledger how it stands, not more often than people look."""
        now = time.monotonic()
        if now - self._published >= PUBLISH_SECONDS:
            self._published = now
            size = self._block_bytes
            self.budget.publish(
                cached=len(self.queue.kept_since) * size, free=self.queue.num_free_blocks * size
            )

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


_agreed: Geometry | None = None
_elastic: WeakKeyDictionary[Any, Elastic] = WeakKeyDictionary()


def agree(geometry: Geometry | None) -> None:
    """Set the geometry for the scheduler that this process makes next."""
    global _agreed
    _agreed = geometry


def elastic_of(scheduler: Any) -> Elastic | None:
    """The elastic side of a scheduler, None if its memory is not elastic."""
    return _elastic.get(scheduler.kv_cache_manager)


def manage(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``KVCacheManager.__init__``, made only by the scheduler: afterwards, adopt its queue."""
    global _agreed
    wrapped(*args, **kwargs)
    geometry, _agreed = _agreed, None
    if geometry is not None:
        budget = join(geometry)
        _elastic[manager] = Elastic(manager.block_pool, geometry, budget)


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
    output = wrapped(*args, **kwargs)
    elastic = _elastic.get(scheduler.kv_cache_manager)
    if elastic is not None:
        setattr(output, PLAN, elastic.plan())
        elastic.publish()
    return output
