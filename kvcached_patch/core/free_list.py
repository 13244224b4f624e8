"""The page-aware free queue: vLLM's verbs, blocks handed out so that pages can empty."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcached_patch.core.pages import Plan

if TYPE_CHECKING:

    class _LinkedQueue:
        """What is used of vLLM's FreeKVCacheBlockQueue (v1/core/kv_cache_utils.py)."""

        num_free_blocks: int
        fake_free_list_head: Any
        fake_free_list_tail: Any

        def remove(self, block: Any) -> None: ...
        def popleft_n(self, n: int) -> list[Any]: ...
        def append_n(self, blocks: list[Any]) -> None: ...
        def prepend_n(self, blocks: list[Any]) -> None: ...
        def get_all_free_blocks(self) -> list[Any]: ...

else:
    _LinkedQueue = object


class _Slab(list[Any]):
    """The dead blocks of a run of consecutive ids, next to be taken last.

    number: counted from 0. size: its blocks. filed: the occupancy under which it can be found,
    or -1. since: when it was last filed as empty, seconds.
    """

    __slots__ = ("filed", "number", "since", "size")

    def __init__(self, number: int, blocks: Sequence[Any]) -> None:
        super().__init__(reversed(blocks))
        self.number = number
        self.size = len(blocks)
        self.filed = -1
        self.since = 0.0


class PageAwareQueue(_LinkedQueue):
    """Goes before vLLM's FreeKVCacheBlockQueue, whose linked list then holds kept blocks only.

    A free block is *kept* while it is cached (it has a hash) or watched, else *dead*. A slab stays
    committed while any of its blocks is in use or kept, and a while longer. Blocks are taken

    1. dead, from the fullest committed slab, so that other slabs run empty;
    2. dead, from a slab that is committed for it, if there is room for one;
    3. kept, least recently used first: vLLM evicts what it is handed.

    Invariants: (Q1) a block is used, dead or kept, and of one slab; (Q2) in vacant slabs, those
    not committed, every block is dead; (Q3) ``num_free_blocks`` counts all dead and kept blocks.
    """

    def adopt(
        self,
        blocks: Sequence[Any],
        slab_blocks: int,
        kept_of: Callable[[list[Any]], list[Any]],
        clock: Callable[[], float],
    ) -> None:
        """Take over a queue in place.

        blocks: all blocks of the pool, by id. kept_of: of some free blocks, in their order, those
        whose contents must be kept. clock: seconds, never going back.
        """
        free = super().get_all_free_blocks()
        is_free = bytearray(len(blocks))
        for block in free:
            is_free[block.block_id] = 1
            block.prev_free_block = block.next_free_block = None
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head

        self.slab_blocks = slab_blocks
        self.room: int | None = None  # slabs that may still be committed; None: all
        self.kept_since: dict[int, float] = {}  # block id -> when it was freed
        self.now = clock()  # at the last plan: precise enough for times of steps
        self._kept_of = kept_of
        self._clock = clock
        starts = range(0, len(blocks), slab_blocks)
        self._slabs = [_Slab(i, blocks[n : n + slab_blocks]) for i, n in enumerate(starts)]
        self._slab_of = [slab for slab in self._slabs for _ in range(slab.size)]
        self._by_fill: list[OrderedDict[int, _Slab]] = [OrderedDict() for _ in range(slab_blocks)]
        self._fills = 0  # bit i: _by_fill[i] is not empty
        self._commits: dict[int, None] = {}  # not yet in a plan
        self._sequence = 0
        self._vacant = []
        for slab in self._slabs:
            slab[:] = [block for block in slab if is_free[block.block_id]]
            if len(slab) == slab.size:
                self._vacant.append(slab.number)
            else:  # the null block's slab, and those of blocks taken before us
                self._commits[slab.number] = None
                self._refile(slab)

    @property
    def slabs(self) -> int:
        """Number of slabs."""
        return len(self._slabs)

    @property
    def committed(self) -> int:
        """Number of committed slabs."""
        return len(self._slabs) - len(self._vacant)

    @property
    def empty(self) -> int:
        """Number of committed slabs without a used or kept block."""
        return len(self._by_fill[0])

    @property
    def admissible(self) -> int:
        """Free blocks that can be had within the room; a negative room takes from the others."""
        if self.room is None or self.room >= len(self._vacant):
            return self.num_free_blocks
        out_of_reach = (len(self._vacant) - self.room) * self.slab_blocks
        last = self._slabs[-1]
        if last.filed < 0 and len(last) == last.size:  # vacant
            # Vacant slabs are taken lowest first, so a short last slab is always out of reach.
            out_of_reach -= self.slab_blocks - last.size
        return max(self.num_free_blocks - out_of_reach, 0)

    def popleft(self) -> Any:
        """Take one block; raises ValueError if none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take n blocks, which must be free."""
        assert self.num_free_blocks >= n
        taken: list[Any] = []
        while (missing := n - len(taken)) > 0:
            if not self._fills and self._vacant and (self.room is None or self.room > 0):
                self._commit(heapq.heappop(self._vacant))
            if self._fills:
                taken += self._take_dead(missing)
            elif self.kept_since:
                kept = super().popleft_n(min(missing, len(self.kept_since)))
                for block in kept:
                    del self.kept_since[block.block_id]
                taken += kept
            else:  # no room, but whoever asks past admission must not fail
                self._commit(heapq.heappop(self._vacant))
        return taken

    def remove(self, block: Any) -> None:
        """Take this very block out: a prefix-cache hit, if it is kept."""
        if block.block_id in self.kept_since:
            super().remove(block)
            del self.kept_since[block.block_id]
            return
        slab = self._slab_of[block.block_id]
        if block not in slab:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        if slab.number in self._vacant:
            self._vacant.remove(slab.number)
            heapq.heapify(self._vacant)
            self._commit(slab.number)
        slab.remove(block)
        self._refile(slab)
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Free a block, to be evicted last."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted last."""
        super().append_n(self._bury(blocks))

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted first."""
        super().prepend_n(self._bury(blocks))

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks: dead ones by slab, kept ones by age."""
        dead = [block for slab in self._slabs for block in reversed(slab)]
        return dead + super().get_all_free_blocks()

    def kept(self) -> Iterator[Any]:
        """Kept blocks, least recently used first; the one yielded may be let go meanwhile."""
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            block, current = block.next_free_block, block
            yield current

    def let_go(self, block: Any) -> None:
        """A kept block has lost what it was kept for: it is dead now."""
        super().remove(block)
        del self.kept_since[block.block_id]
        self._bury([block])

    def take_plan(self, linger: float) -> Plan:
        """What changed since the last plan; lets slabs go that were empty for `linger` seconds."""
        self.now = self._clock()
        empty = self._by_fill[0]
        releases = []
        while empty and (slab := next(iter(empty.values()))).since <= self.now - linger:
            self._unfile(slab)
            heapq.heappush(self._vacant, slab.number)
            if slab.number in self._commits:
                del self._commits[slab.number]
            else:
                releases.append(slab.number)
        plan = Plan(self._sequence, tuple(self._commits), tuple(releases))
        self._commits.clear()
        self._sequence += 1
        return plan

    @property
    def empty_since(self) -> float | None:
        """Since when the committed slab that is empty longest is so; None if none is empty."""
        return next((slab.since for slab in self._by_fill[0].values()), None)

    def _take_dead(self, n: int) -> list[Any]:
        slab = next(reversed(self._by_fill[self._fills.bit_length() - 1].values()))
        taken = slab[: -n - 1 : -1]
        del slab[-n:]
        self._refile(slab)
        self.num_free_blocks -= len(taken)
        return taken

    def _bury(self, blocks: list[Any]) -> list[Any]:
        """Make dead those with nothing to keep; returns the others, for the linked list."""
        kept = self._kept_of(blocks)
        if kept:
            ids = {block.block_id for block in kept}
            self.kept_since.update(dict.fromkeys(ids, self.now))
            blocks = [block for block in blocks if block.block_id not in ids]
        slab_of = self._slab_of
        last: _Slab | None = None
        touched = []
        for block in blocks:
            slab = slab_of[block.block_id]
            slab.append(block)
            if slab is not last:
                touched.append(slab)
                last = slab
        for slab in touched:
            self._refile(slab)
        self.num_free_blocks += len(blocks)
        return kept

    def _commit(self, number: int) -> None:
        if self.room is not None:
            self.room -= 1
        self._commits[number] = None
        self._refile(self._slabs[number])

    def _refile(self, slab: _Slab) -> None:
        """File a committed slab under its occupancy, if it has a dead block to give."""
        occupied = slab.size - len(slab)
        if occupied == slab.filed:
            return
        if slab.filed >= 0:
            self._unfile(slab)
        if slab:
            slab.filed = occupied
            self._by_fill[occupied][slab.number] = slab
            self._fills |= 1 << occupied
            if not occupied:
                slab.since = self.now

    def _unfile(self, slab: _Slab) -> None:
        peers = self._by_fill[slab.filed]
        del peers[slab.number]
        if not peers:
            self._fills &= ~(1 << slab.filed)
        slab.filed = -1
