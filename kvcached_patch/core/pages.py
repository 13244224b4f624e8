"""Which physical pages are needed, told from the slabs that are in use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvcached_patch.core.extents import Cells

# The attribute of vLLM's SchedulerOutput that a plan travels in.
PLAN = "kvcached_patch_plan"

# (range_index, first byte, byte after the last), page-aligned.
Run = tuple[int, int, int]


class Plan(NamedTuple):
    """What one scheduler step asks of every worker.

    sequence: 0, 1, 2, …: a gap is a lost plan. commit: slabs that this step may write. release:
    slabs that no later step uses; the step itself, and those in flight, may still read them. keep:
    for how many slabs the worker goes on owning pages; None where they need not be had ahead.
    """

    sequence: int
    commit: tuple[int, ...] = ()
    release: tuple[int, ...] = ()
    keep: int | None = None


class PageCounts:
    """How many committed slabs need each page; slab and page borders need not agree."""

    def __init__(
        self,
        cells: Sequence[Cells],
        range_bytes: Sequence[int],
        num_blocks: int,
        slab_blocks: int,
        page_bytes: int,
    ) -> None:
        """Start with no slab committed."""
        self._cells = tuple(cells)
        self._num_blocks = num_blocks
        self._slab_blocks = slab_blocks
        self._page_bytes = page_bytes
        self._ends = tuple(range_bytes)
        self._counts = [bytearray(-(-size // page_bytes)) for size in range_bytes]
        self.committed: set[int] = set()
        self.needed = 0  # pages

    @property
    def slabs(self) -> int:
        """Number of slabs; the last may be shorter."""
        return -(-self._num_blocks // self._slab_blocks)

    @property
    def price(self) -> int:
        """Pages that a slab needs at most, whichever it is and whatever else is committed."""
        return sum(map(self._most_pages, self._cells))

    @property
    def exact(self) -> bool:
        """Whether slabs share no page, so that each needs its price, but for a shorter last one."""
        return all(self._aligned(cell) for cell in self._cells)

    def _aligned(self, cell: Cells) -> bool:
        return not (cell.base % self._page_bytes or self._span(cell) % self._page_bytes)

    def _span(self, cell: Cells) -> int:
        return self._slab_blocks * cell.stride

    def _most_pages(self, cell: Cells) -> int:
        span, size = self._span(cell), self._page_bytes
        return span // size if self._aligned(cell) else (span + size - 2) // size + 1

    def commit(self, slabs: Iterable[int]) -> list[Run]:
        """Count the slabs in; returns the pages that were not needed before.

        Raises ValueError for a slab that is committed already or does not exist; then nothing of
        the call is in force.
        """
        slabs = tuple(slabs)
        self._check(slabs, committed=False)
        self.committed.update(slabs)
        return self._count(slabs, +1, becomes=1)

    def release(self, slabs: Iterable[int]) -> list[Run]:
        """Count the slabs out; returns the pages that no slab needs any more.

        Raises ValueError for a slab that is not committed; then nothing of the call is in force.
        """
        slabs = tuple(slabs)
        self._check(slabs, committed=True)
        self.committed.difference_update(slabs)
        return self._count(slabs, -1, becomes=0)

    def unneeded(self) -> list[Run]:
        """All pages that no slab needs."""
        return self._bytes(
            (index, page, page + 1)
            for index, counts in enumerate(self._counts)
            for page, count in enumerate(counts)
            if not count
        )

    def _check(self, slabs: tuple[int, ...], *, committed: bool) -> None:
        for slab in slabs:
            if not 0 <= slab < self.slabs or (slab in self.committed) is not committed:
                state = "committed" if slab in self.committed else "not committed"
                raise ValueError(f"slab {slab} of {self.slabs} is {state}")
        if len(set(slabs)) != len(slabs):
            raise ValueError(f"slabs {slabs}: one is named twice")

    def _count(self, slabs: Iterable[int], step: int, becomes: int) -> list[Run]:
        changed: list[Run] = []
        for slab in slabs:
            for index, first, end in self._pages(slab):
                counts, before = self._counts[index], becomes - step
                # All but the border pages are most often no other slab's: counted as one.
                inner = slice(first + 1, end - 1)
                size = max(end - first - 2, 0)
                borders: Iterable[int] = range(first, end)
                if size and counts[inner] == bytes((before,)) * size:
                    counts[inner] = bytes((becomes,)) * size
                    changed.append((index, first + 1, end - 1))
                    borders = (first, end - 1)
                for page in borders:
                    counts[page] += step
                    if counts[page] == becomes:
                        changed.append((index, page, page + 1))
        self.needed += step * sum(after - first for _, first, after in changed)
        return self._bytes(sorted(changed))

    def _pages(self, slab: int) -> Iterator[Run]:
        """The pages of a slab in each cell: range_index, first, one after the last."""
        first = slab * self._slab_blocks
        last = min(first + self._slab_blocks, self._num_blocks)
        size = self._page_bytes
        for cell in self._cells:
            start = cell.base + first * cell.stride
            end = min(cell.base + last * cell.stride, self._ends[cell.range_index])
            yield cell.range_index, start // size, -(-end // size)

    def _bytes(self, pages: Iterable[Run]) -> list[Run]:
        """Runs of pages in their order, neighbours joined, as bytes."""
        runs: list[Run] = []
        size = self._page_bytes
        for index, first, after in pages:
            start, end = first * size, min(after * size, self._ends[index])
            if runs and runs[-1][0] == index and runs[-1][2] == start:
                runs[-1] = (index, runs[-1][1], end)
            else:
                runs.append((index, start, end))
        return runs
