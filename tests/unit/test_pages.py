"""Page counts and the pool that carries plans out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import PageCounts, Plan
from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.pool import ElasticPool

PAGE = 16


def counts(cells: list[Cells], blocks: int, slab: int, size: int) -> PageCounts:
    return PageCounts(cells, [size], blocks, slab, PAGE)


def bytes_of(runs: list[tuple[int, int, int]]) -> set[int]:
    return {byte for _, start, end in runs for byte in range(start, end)}


@given(
    blocks=st.integers(1, 20),
    slab=st.integers(1, 6),
    strides=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    choice=st.data(),
)
def test_a_page_is_needed_exactly_while_a_committed_slab_touches_it(
    blocks: int, slab: int, strides: list[int], choice: st.DataObject
) -> None:
    bases = [sum(strides[:i]) * blocks for i in range(len(strides))]
    cells = [Cells(0, base, stride) for base, stride in zip(bases, strides, strict=True)]
    size = sum(strides) * blocks
    pages = counts(cells, blocks, slab, size)

    def needed() -> set[int]:
        touched = set()
        for s in pages.committed:
            first, last = s * slab, min((s + 1) * slab, blocks)
            for c in cells:
                start, end = c.base + first * c.stride, c.base + last * c.stride
                touched |= set(range(start // PAGE, -(-end // PAGE)))
        return {b for p in touched for b in range(p * PAGE, min((p + 1) * PAGE, size))}

    backed: set[int] = set()
    for _ in range(12):
        free = sorted(set(range(pages.slabs)) - pages.committed)
        if free and choice.draw(st.booleans()):
            backed |= bytes_of(pages.commit(choice.draw(st.sets(st.sampled_from(free)))))
        elif pages.committed:
            some = choice.draw(st.sets(st.sampled_from(sorted(pages.committed))))
            backed -= bytes_of(pages.release(some))
        assert backed == needed()
        assert bytes_of(pages.unneeded()) == set(range(size)) - backed


def test_wrong_slabs_are_refused_and_change_nothing() -> None:
    pages = counts([Cells(0, 0, PAGE)], 4, 1, 4 * PAGE)
    pages.commit([1])
    for call, slabs in (
        (pages.commit, [0, 1]),
        (pages.commit, [4]),
        (pages.commit, [-1]),
        (pages.commit, [0, 0]),
        (pages.release, [1, 2]),
        (pages.release, [9]),
    ):
        with pytest.raises(ValueError, match="slab"):
            call(slabs)
        assert pages.committed == {1}
    assert pages.release([1]) == [(0, PAGE, 2 * PAGE)]


class Recorder:
    page_bytes = PAGE

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.fences = 0

    def fence(self) -> None:
        self.fences += 1

    def commit(self, start: int, end: int) -> None:
        self.calls.append(("commit", start, end))

    def release(self, start: int, end: int) -> None:
        self.calls.append(("release", start, end))

    def take(self) -> list[tuple[str, int, int]]:
        calls, self.calls = self.calls, []
        return calls


def pool() -> tuple[ElasticPool, Recorder]:
    memory = Recorder()
    return ElasticPool([memory], [4 * PAGE], [Cells(0, 0, PAGE)], 4, 1), memory


def test_p1_a_lost_or_repeated_plan_is_told() -> None:
    elastic, _ = pool()
    elastic.missing()
    with pytest.raises(KvcachedPatchError, match=r"plan 1 reached .* expected plan 0"):
        elastic.apply(Plan(1), idle=False)
    elastic.apply(Plan(0), idle=False)
    with pytest.raises(KvcachedPatchError, match="expected plan 1"):
        elastic.apply(Plan(0), idle=False)
    with pytest.raises(KvcachedPatchError, match="without a memory plan"):
        elastic.missing()
    elastic.apply(Plan(1), idle=False)


def test_p2_pages_go_back_only_after_the_step_that_released_them() -> None:
    elastic, memory = pool()
    elastic.apply(Plan(0, commit=(0, 1, 2)), idle=False)
    assert memory.take() == [("commit", 0, 3 * PAGE), ("release", 3 * PAGE, 4 * PAGE)]
    elastic.apply(Plan(1, release=(1,)), idle=False)
    assert memory.take() == [], "step 1 and those in flight may still read it"
    elastic.apply(Plan(2, commit=(1,)), idle=False)
    assert memory.take() == [("release", PAGE, 2 * PAGE), ("commit", PAGE, 2 * PAGE)]


def test_an_idle_step_releases_at_once() -> None:
    elastic, memory = pool()
    elastic.apply(Plan(0, commit=(0, 1, 2, 3)), idle=False)
    elastic.apply(Plan(1, release=(1,)), idle=False)
    memory.take()
    elastic.apply(Plan(2, release=(2,)), idle=True)
    assert memory.take() == [("release", PAGE, 2 * PAGE), ("release", 2 * PAGE, 3 * PAGE)]
    elastic.apply(Plan(3), idle=False)
    assert memory.take() == []
