"""Our free queue beside vLLM's own, on vLLM's blocks and block pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvcached_patch.core.free_list import page_aware


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Pair:
    """The same operations on vLLM's queue and on ours, over separate blocks."""

    def __init__(self, blocks: int, slab: int) -> None:
        self.stock_blocks = [KVCacheBlock(i) for i in range(blocks)]
        self.our_blocks = [KVCacheBlock(i) for i in range(blocks)]
        self.stock = FreeKVCacheBlockQueue(self.stock_blocks)
        ours: Any = FreeKVCacheBlockQueue(self.our_blocks)
        for queue in (self.stock, ours):
            assert queue.popleft().block_id == 0, "the null block, as BlockPool takes it"
        self.hashed: set[int] = set()
        self.clock = Clock()
        self.ours: Any = page_aware(ours, self.our_blocks, slab, self.kept_of, self.clock)
        self.slab = slab
        self.used: set[int] = set()
        self.committed: set[int] = {0}

    def kept_of(self, blocks: list[Any]) -> list[Any]:
        return [block for block in blocks if block.block_id in self.hashed]

    def pop(self, n: int, one: bool) -> None:
        n = min(n, self.ours.num_free_blocks)
        if not n:
            return
        got = [self.ours.popleft()] if one else self.ours.popleft_n(n)
        ids = [block.block_id for block in got]
        assert len(set(ids)) == len(ids) == (1 if one else n)
        assert 0 not in ids, "null block never out"
        assert self.used.isdisjoint(ids), "no block twice"
        for i in ids:
            self.stock.remove(self.stock_blocks[i])
        self.used |= set(ids)
        self.hashed -= set(ids)

    def free(self, ids: Iterable[int], verb: str, hashed: bool) -> None:
        ids = [i for i in ids if i in self.used]
        self.used -= set(ids)
        if hashed:
            self.hashed |= set(ids)
        if verb == "append":
            for i in ids:
                self.ours.append(self.our_blocks[i])
                self.stock.append(self.stock_blocks[i])
        else:
            getattr(self.ours, verb)([self.our_blocks[i] for i in ids])
            getattr(self.stock, verb)([self.stock_blocks[i] for i in ids])

    def touch(self, i: int) -> None:
        if i in self.used or i == 0:
            return
        self.ours.remove(self.our_blocks[i])
        self.stock.remove(self.stock_blocks[i])
        self.used.add(i)

    def let_go(self) -> None:
        for block in self.ours.kept():
            self.hashed.discard(block.block_id)
            self.ours.let_go(block)
            return

    def plan(self, linger: float) -> None:
        self.clock.now += 1.0
        plan = self.ours.take_plan(linger)
        assert self.committed.isdisjoint(set(plan.commit) - {0})
        self.committed |= set(plan.commit)
        assert set(plan.release) <= self.committed
        self.committed -= set(plan.release)
        needed = {i // self.slab for i in self.used | self.hashed | {0}}
        assert needed <= self.committed, "used or kept blocks only in committed slabs"
        assert self.ours.committed == len(self.committed)

    def check(self) -> None:
        ours = [block.block_id for block in self.ours.get_all_free_blocks()]
        stock = [block.block_id for block in self.stock.get_all_free_blocks()]
        assert sorted(ours) == sorted(stock)
        assert self.ours.num_free_blocks == self.stock.num_free_blocks == len(stock)
        assert self.admissible() == len(stock)

    def admissible(self) -> int:
        self.ours.withhold()
        count = self.ours.num_free_blocks
        self.ours.restore()
        return int(count)


IDS = st.lists(st.integers(1, 59), unique=True, max_size=12)
OPERATIONS = st.one_of(
    st.tuples(st.just("pop"), st.integers(0, 30), st.booleans()),
    st.tuples(
        st.just("free"), IDS, st.sampled_from(["append", "append_n", "prepend_n"]), st.booleans()
    ),
    st.tuples(st.just("touch"), st.integers(1, 59)),
    st.tuples(st.just("let_go")),
    st.tuples(st.just("plan"), st.sampled_from([0.0, 2.5])),
)


@settings(max_examples=300, deadline=None)
@given(slab=st.sampled_from([1, 4, 7]), operations=st.lists(OPERATIONS, max_size=60))
def test_same_free_blocks_and_counts_as_vllms_queue(slab: int, operations: list[Any]) -> None:
    pair = Pair(60, slab)
    for name, *arguments in operations:
        getattr(pair, name)(*arguments)
        pair.check()
    pair.plan(0.0)


def test_blocks_come_from_the_fullest_slab_so_that_others_empty() -> None:
    pair = Pair(40, 10)
    pair.pop(29, one=False)
    pair.free([*range(12, 20), 25], "prepend_n", hashed=False)
    pair.pop(1, one=False)
    assert pair.used >= {25}, "slab 2 is fuller than slab 1"
    pair.free([10, 11], "prepend_n", hashed=False)
    pair.plan(0.0)
    assert pair.committed == {0, 2}


def test_kept_blocks_are_taken_last_and_oldest_first() -> None:
    pair = Pair(8, 4)
    pair.pop(7, one=False)
    pair.free([3, 5, 1], "append_n", hashed=True)
    pair.free([6], "prepend_n", hashed=False)
    taken = [pair.ours.popleft().block_id for _ in range(3)]
    assert taken == [6, 3, 5]


def test_room_bounds_what_can_be_admitted_not_what_is_free() -> None:
    pair = Pair(40, 10)
    pair.ours.room = 1
    assert pair.ours.num_free_blocks == 39
    assert pair.admissible() == 19
    pair.ours.withhold()
    pair.pop(19, one=False)
    assert pair.ours.num_free_blocks == 0
    pair.ours.restore()
    assert pair.ours.room == 0
    assert pair.ours.num_free_blocks == 20
    pair.ours.room = -1
    assert pair.admissible() == -10, "what is over the room has to come from the others"


def test_popping_an_empty_queue_is_vllms_error() -> None:
    pair = Pair(3, 4)
    pair.pop(2, one=False)
    with pytest.raises(ValueError, match="No free blocks"):
        pair.ours.popleft()
    with pytest.raises(AssertionError):
        pair.ours.popleft_n(1)


def test_removing_a_block_in_use_is_an_error() -> None:
    pair = Pair(8, 4)
    (block,) = pair.ours.popleft_n(1)
    with pytest.raises(RuntimeError, match="invalid block"):
        pair.ours.remove(block)
