"""The page-aware free queue: vLLM's verbs, blocks handed out so that pages can empty."""

from __future__ import annotations

import heapq
from collections import deque
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

    number: counted from 0. blocks, size: all of its blocks. since: when the last of them died,
    seconds. loose: it is still to be filed. filed: bit d is set if it lies on the pile of slabs
    with d dead blocks; where d has changed since, that means nothing.
    """

    __slots__ = ("blocks", "committed", "filed", "loose", "number", "since", "size")

    def __init__(self, number: int, blocks: Sequence[Any]) -> None:
        super().__init__(reversed(blocks))
        self.number = number
        self.blocks = tuple(blocks)
        self.size = len(blocks)
        self.committed = True
        self.since = 0.0
        self.loose = False
        self.filed = 0


class PageAwareQueue(_LinkedQueue):
    """Goes before vLLM's FreeKVCacheBlockQueue, whose linked list then holds kept blocks only.

    A free block is *kept* while it is cached (it has a hash) or watched, else *dead*. A slab stays
    committed while any of its blocks is in use or kept, and a while longer. Blocks are taken

    1. dead, from committed slabs: a whole one if that many are wanted, else from the fullest that
       has as many as are wanted, so that other slabs run empty;
    2. dead, from a slab that is committed for it, if there is room for one;
    3. kept, least recently used first: vLLM evicts what it is handed.

    Invariants: (Q1) a block is used, dead or kept, and of one slab; (Q2) in vacant slabs, those
    not committed, every block is dead; (Q3) ``num_free_blocks`` counts all dead and kept blocks.
    """

    def __init__(
        self,
        queue: Any,
        blocks: Sequence[Any],
        slab_blocks: int,
        kept_of: Callable[[list[Any]], list[Any]],
        clock: Callable[[], float],
    ) -> None:
        """Take over from `queue`, none of whose blocks is kept yet; see `page_aware`."""
        self.num_free_blocks = queue.num_free_blocks
        self.fake_free_list_head = queue.fake_free_list_head
        self.fake_free_list_tail = queue.fake_free_list_tail
        self.slab_blocks = slab_blocks
        self.slabs = -(-len(blocks) // slab_blocks)
        self.room: int | None = None  # slabs that may still be committed; None: all
        self.kept_count = 0
        self.freed_at = [0.0] * len(blocks)  # by block id, of kept ones: when that was, seconds
        self.now = clock()  # at the last plan: precise enough for times of steps
        self._kept_of = kept_of
        self._clock = clock
        self._blocks = blocks
        # By block id; made when the slab is first committed, so that a large pool starts at once.
        self._slab_of: list[_Slab | None] = [None] * len(blocks)
        self._loose: list[_Slab] = []  # committed, their dead blocks have changed
        self._empty: deque[_Slab] = deque()  # committed, all blocks dead; longest so first
        self._piles: list[list[_Slab]] = [[] for _ in range(slab_blocks)]  # by dead blocks
        self._piled = 0  # bit d: pile d is not bare
        self._open: _Slab | None = None  # the one that was last taken from, to be taken from next
        self._commits: dict[int, None] = {}  # not yet in a plan
        self._sequence = 0
        # The null block, and others that were taken before us, are in no list.
        used = {block.block_id for block in blocks if block.next_free_block is None}
        started = sorted({block_id // slab_blocks for block_id in used})
        self._vacant = sorted(set(range(self.slabs)).difference(started))
        for number in started:
            slab = self._begin(number)
            slab[:] = [block for block in slab if block.block_id not in used]
            self._loosen(slab)
            self._commits[number] = None
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head

    @property
    def committed(self) -> int:
        """Number of committed slabs."""
        return self.slabs - len(self._vacant)

    @property
    def empty(self) -> int:
        """Number of committed slabs without a used or kept block."""
        self._file()
        return len(self._empty)

    def admissible(self) -> int:
        """Free blocks that can be had within the room; a negative room takes from the others."""
        if self.room is None or self.room >= len(self._vacant):
            return self.num_free_blocks
        out_of_reach = (len(self._vacant) - self.room) * self.slab_blocks
        if self._is_vacant(len(self._blocks) - 1):
            # Vacant slabs are taken lowest first, so a short last slab is always out of reach.
            out_of_reach -= self.slabs * self.slab_blocks - len(self._blocks)
        return max(self.num_free_blocks - out_of_reach, 0)

    def popleft(self) -> Any:
        """Take one block; raises ValueError if none is free."""
        if not self.num_free_blocks:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take n blocks, which must be free."""
        assert self.num_free_blocks >= n
        self.num_free_blocks -= n
        if self._loose:
            self._file()
        if n == 1:
            slab = self._open or self._choose(1)
            if slab is None:
                return self._take_kept(1)
            self._open = slab
            return [slab.pop()]
        taken: list[Any] = []
        empty = self._empty
        while empty and n >= self.slab_blocks:
            whole = empty.pop()
            taken += whole.blocks
            n -= whole.size
            whole.clear()
        while n > 0:
            slab = self._choose(n)
            if slab is None:
                kept = self._take_kept(min(n, self.kept_count))
                taken += kept
                n -= len(kept)
            elif n >= len(slab):
                taken += slab.blocks if len(slab) == slab.size else reversed(slab)
                n -= len(slab)
                slab.clear()
            else:
                taken += slab[: -n - 1 : -1]
                del slab[-n:]
                self._open = slab
                break
        return taken

    def remove(self, block: Any) -> None:
        """Take this very block out: a prefix-cache hit, if it is kept."""
        following = block.next_free_block
        if following is not None and self._slab_of[block.block_id] is not None:  # it is kept
            before = block.prev_free_block
            before.next_free_block, following.prev_free_block = following, before
            block.prev_free_block = block.next_free_block = None
            self.kept_count -= 1
            self.num_free_blocks -= 1
            return
        number = block.block_id // self.slab_blocks
        if self._is_vacant(block.block_id):
            self._vacant.remove(number)
            heapq.heapify(self._vacant)
            self._commit(number)
        slab = self._slab_of[block.block_id]
        if slab is None or block not in slab:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        self._file()
        if len(slab) == slab.size:
            self._empty = deque(other for other in self._empty if other is not slab)
        slab.remove(block)
        self._loosen(slab)
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Free a block, to be evicted last."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted last."""
        if kept := self._bury(blocks):
            super().append_n(kept)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted first."""
        if kept := self._bury(blocks):
            super().prepend_n(kept)

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks: dead ones by slab, kept ones by age."""
        size = self.slab_blocks
        dead: list[Any] = []
        for first in range(0, len(self._blocks), size):
            slab = self._slab_of[first]
            dead += self._blocks[first : first + size] if slab is None else reversed(slab)
        return dead + super().get_all_free_blocks()

    def kept(self) -> Iterator[Any]:
        """Kept blocks, least recently used first; the one yielded may be let go meanwhile."""
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            block, current = block.next_free_block, block
            yield current

    def let_go(self, block: Any) -> None:
        """A kept block has lost what it was kept for: it is dead now."""
        self.remove(block)
        self._bury([block])

    def take_plan(self, linger: float) -> Plan:
        """What changed since the last plan; lets slabs go that were empty for `linger` seconds."""
        self._file()
        self.now = self._clock()
        empty, before = self._empty, self.now - linger
        releases = []
        while empty and empty[0].since <= before:
            slab = empty.popleft()
            slab.committed = False
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
        self._file()
        return self._empty[0].since if self._empty else None

    def _choose(self, n: int) -> _Slab | None:
        """A slab to take up to n dead blocks from, filed no more; None if kept ones come next."""
        slab, self._open = self._open, None
        if slab:
            if len(slab) >= n:
                return slab
            self._loosen(slab)
            self._file()
        while self._empty or self._piled:
            enough = self._piled >> n << n
            if self._empty and (n >= self.slab_blocks or not enough):
                return self._empty.pop()
            # The fullest that has n dead blocks; else the one with most.
            dead = (enough & -enough or self._piled).bit_length() - 1
            pile = self._piles[dead]
            slab = pile.pop()
            slab.filed ^= 1 << dead
            if not pile:
                self._piled ^= 1 << dead
            if len(slab) == dead:
                return slab
        # Whoever asks past the room, with nothing kept left, must not fail.
        if self._vacant and (self.room is None or self.room > 0 or not self.kept_count):
            return self._commit(heapq.heappop(self._vacant))
        return None

    def _loosen(self, slab: _Slab) -> None:
        if not slab.loose:
            slab.loose = True
            self._loose.append(slab)

    def _file(self) -> None:
        """Put loose slabs where `_choose` finds them."""
        for slab in self._loose:
            slab.loose = False
            dead = len(slab)
            if dead == slab.size:
                slab.since = self.now
                self._empty.append(slab)
                if slab is self._open:
                    self._open = None
            elif dead and not slab.filed >> dead & 1:
                slab.filed |= 1 << dead
                self._piled |= 1 << dead
                self._piles[dead].append(slab)
        self._loose.clear()

    def _take_kept(self, n: int) -> list[Any]:
        self.num_free_blocks += n  # vLLM's verb counts them, too
        self.kept_count -= n
        return super().popleft_n(n)

    def _bury(self, blocks: list[Any]) -> list[Any]:
        """Make dead those with nothing to keep; returns the others, for the linked list."""
        kept = self._kept_of(blocks)
        if kept:
            freed_at, now = self.freed_at, self.now
            for block in kept:
                freed_at[block.block_id] = now
            self.kept_count += len(kept)
            if len(kept) == len(blocks):
                return kept
            ids = {block.block_id for block in kept}
            blocks = [block for block in blocks if block.block_id not in ids]
        self.num_free_blocks += len(blocks)
        slab_of = self._slab_of
        loose = self._loose
        for block in blocks:
            slab = slab_of[block.block_id]
            slab.append(block)
            if not slab.loose:
                slab.loose = True
                loose.append(slab)
        return kept

    def _commit(self, number: int) -> _Slab:
        """Commit a vacant slab, to take from at once."""
        if self.room is not None:
            self.room -= 1
        self._commits[number] = None
        slab = self._slab_of[number * self.slab_blocks] or self._begin(number)
        slab.committed = True
        return slab

    def _begin(self, number: int) -> _Slab:
        first = number * self.slab_blocks
        blocks = self._blocks[first : first + self.slab_blocks]
        slab = _Slab(number, blocks)
        self._slab_of[first : first + len(blocks)] = [slab] * len(blocks)
        for block in blocks:
            block.prev_free_block = block.next_free_block = None
        return slab

    def _is_vacant(self, block_id: int) -> bool:
        """Whether the block's slab is vacant."""
        slab = self._slab_of[block_id]
        return slab is None or not slab.committed


def page_aware(
    queue: Any,
    blocks: Sequence[Any],
    slab_blocks: int,
    kept_of: Callable[[list[Any]], list[Any]],
    clock: Callable[[], float],
) -> PageAwareQueue:
    """Put a page-aware queue in the place of vLLM's `queue`, which is not to be used any more.

    blocks: all blocks of the pool, by id. kept_of: of some free blocks, in their order, those whose
    contents must be kept. clock: seconds, never going back.
    """
    # An object whose class was changed afterwards would cost three times as much per attribute.
    kind: type[PageAwareQueue] = type("PageAwareQueue", (PageAwareQueue, type(queue)), {})
    return kind(queue, blocks, slab_blocks, kept_of, clock)
