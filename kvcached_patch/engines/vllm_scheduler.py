"""The seams of vLLM's scheduler: a page-aware free queue, and a plan with every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kvcached_patch import config
from kvcached_patch.core.free_list import PageAwareQueue
from kvcached_patch.core.pages import PLAN, Plan

# An empty slab stays committed this long, so that the next request finds its pages touched.
LINGER_SECONDS = 0.2


@dataclass(frozen=True)
class Geometry:
    """What the workers agreed on. block_bytes: of one block, in all their pools together."""

    slab_blocks: int
    block_bytes: int


class Elastic:
    """One block pool's page-aware queue, with what decides how long cached blocks stay."""

    def __init__(self, block_pool: Any, geometry: Geometry) -> None:
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

    def plan(self) -> Plan:
        """Evict what has outlived its retention, and say what changed."""
        self._notice_reset()
        self._evict()
        return self.queue.take_plan(LINGER_SECONDS)

    def due(self) -> float | None:
        """When a plan would next change something without a step, by time.monotonic()."""
        times = []
        if (empty_since := self.queue.empty_since) is not None:
            times.append(empty_since + LINGER_SECONDS)
        oldest = next((self.queue.kept_since[b.block_id] for b in self.queue.kept()), None)
        if self._retain.seconds is not None and oldest is not None:
            times.append(oldest + self._retain.seconds)
        return min(times, default=None)

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
            if block.block_id not in self._watched:
                self._pool._maybe_evict_cached_block(block)
                queue.let_go(block)


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
        _elastic[manager] = Elastic(manager.block_pool, geometry)


def schedule(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Scheduler.schedule``: the plan travels as an attribute of the SchedulerOutput."""
    output = wrapped(*args, **kwargs)
    elastic = _elastic.get(scheduler.kv_cache_manager)
    if elastic is not None:
        setattr(output, PLAN, elastic.plan())
    return output
