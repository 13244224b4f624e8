"""The page-aware free queue: vLLM's verbs, blocks handed out so that pages can empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvcached_patch.core.slabs import Slabs

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


class PageAwareQueue(Slabs, _LinkedQueue):
    """Goes before vLLM's FreeKVCacheBlockQueue, whose linked list then holds kept blocks only.

    A free block is *kept* while it is cached (it has a hash) or watched, else *dead*. A slab stays
    committed while any of its blocks is in use or kept, and a while longer. Blocks are taken

    1. dead, from committed slabs: a whole one if that many are wanted, else from the fullest that
       has as many as are wanted, so that other slabs run empty;
    2. dead, from a slab that is committed for it, if there is room for one;
    3. kept, least recently used first: vLLM evicts what it is handed.

    Invariants: (Q1) a block is used, dead or kept, and of one slab; (Q2) in vacant slabs, those
    not committed, every block is dead; (Q3) ``num_free_blocks`` counts all dead and kept blocks,
    but for those withheld.
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
        super().__init__(blocks, slab_blocks, clock)
        self.freed_at = [0.0] * len(blocks)  # by block id, of kept ones: when that was, seconds
        self._withheld = 0
        self._kept_of = kept_of
        self._append_n = type(queue).append_n
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head

    def withhold(self) -> None:
        """Until `restore`, count only the free blocks that can be had within the room.

        What is out of reach stays the same while slabs are committed. A negative room takes from
        the others; the count, too, is negative if those are not enough.
        """
        if self.room is None or self.room >= len(self._vacant):
            return
        self._withheld = (len(self._vacant) - self.room) * self.slab_blocks
        if self._is_vacant(len(self._blocks) - 1):
            # Vacant slabs are taken lowest first, so a short last slab is always out of reach.
            self._withheld -= self.slabs * self.slab_blocks - len(self._blocks)
        self.num_free_blocks -= self._withheld

    def restore(self) -> None:
        """Count all free blocks again."""
        self.num_free_blocks += self._withheld
        self._withheld = 0

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
        self._pull(block)
        self.num_free_blocks -= 1

    def append(self, block: Any) -> None:
        """Free a block, to be evicted last."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted last."""
        if kept := self._bury(blocks):
            self._append_n(self, kept)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Free blocks, to be evicted first."""
        if kept := self._bury(blocks):
            super().prepend_n(kept)  # vLLM has it from 0.23, and calls it there

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
