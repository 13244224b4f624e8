"""Slabs of blocks, from which dead ones are taken so that others run empty."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvcached_patch.core.pages import Plan


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


class Slabs:
    """Which slabs are committed, and which of them to take dead blocks from.

    A base of the queue, not a part of it: its attributes are read with every block.
    """

    def __init__(self, blocks: Sequence[Any], slab_blocks: int, clock: Callable[[], float]) -> None:
        """Slabs with a block that is in no linked list begin committed, the others vacant."""
        self.slab_blocks = slab_blocks
        self.slabs = -(-len(blocks) // slab_blocks)
        self.room: int | None = None  # slabs that may still be committed; None: all
        self.kept_count = 0  # free blocks that are not dead
        self.now = clock()  # at the last plan: precise enough for times of steps
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

    @property
    def committed(self) -> int:
        """Number of committed slabs."""
        return self.slabs - len(self._vacant)

    @property
    def fresh(self) -> int:
        """Number of slabs that were committed since the last plan."""
        return len(self._commits)

    @property
    def empty(self) -> int:
        """Number of committed slabs without a used or kept block."""
        self._file()
        return len(self._empty)

    def empty_slabs(self) -> list[int]:
        """The numbers of those, the one that is empty longest first."""
        self._file()
        return [slab.number for slab in self._empty]

    @property
    def empty_since(self) -> float | None:
        """Since when the committed slab that is empty longest is so; None if none is empty."""
        self._file()
        return self._empty[0].since if self._empty else None

    def take_plan(self, linger: float, batch: float = 0.0) -> Plan:
        """What changed since the last plan; lets slabs go that were empty for `linger` seconds.

        Once one goes, so do those that were empty for no more than `batch` seconds less.
        """
        self._file()
        self.now = self._clock()
        empty, before = self._empty, self.now - linger
        if empty and empty[0].since <= before:
            before += batch
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

    def commit_ahead(self, slabs: int) -> None:
        """Commit so many vacant slabs, or all there are, lowest first, before they are needed."""
        for _ in range(min(slabs, len(self._vacant))):
            self._loosen(self._commit(heapq.heappop(self._vacant)))

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

    def _pull(self, block: Any) -> None:
        """Take this very dead block; its slab is committed for it if need be."""
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
