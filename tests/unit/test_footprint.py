"""What the scheduler takes the workers to hold is what they hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.pages import PageCounts, Plan

PAGE = 16


def page_counts(bases: list[int], stride: int, blocks: int, slab: int) -> PageCounts:
    cells = [Cells(0, base, stride) for base in bases]
    size = max(bases) + blocks * stride
    return PageCounts(cells, [size], blocks, slab, PAGE)


@given(
    stride=st.integers(1, 40),
    gap=st.integers(0, 20),
    blocks=st.integers(1, 20),
    slab=st.integers(1, 6),
)
def test_no_slab_needs_more_than_the_price(stride: int, gap: int, blocks: int, slab: int) -> None:
    bases = [gap, gap + blocks * stride]
    alone = page_counts(bases, stride, blocks, slab)
    for number in range(alone.slabs):
        alone.commit([number])
        assert 0 < alone.needed <= alone.price
        if alone.exact and (number + 1) * slab <= blocks:
            assert alone.needed == alone.price
        alone.release([number])
    assert alone.needed == 0


@given(stride=st.integers(1, 40), slab=st.integers(1, 6), choice=st.data())
def test_it_follows_a_worker_that_lags(stride: int, slab: int, choice: st.DataObject) -> None:
    """Never less than the worker holds, which has up to two plans before it."""
    blocks, in_flight = 20, 3
    worker = page_counts([3], stride, blocks, slab)
    footprint = Footprint(in_flight, [page_counts([3], stride, blocks, slab)])
    committed: set[int] = set()
    plans: list[Plan] = []
    pending: tuple[int, ...] = ()
    slabs = st.sets(st.integers(0, worker.slabs - 1))
    for sequence in range(10):
        commit = choice.draw(slabs) - committed
        release = choice.draw(slabs) & committed
        committed = (committed | commit) - release
        plan = Plan(sequence, tuple(commit), tuple(release))
        footprint.follow(plan, float(sequence))
        plans.append(plan)
        while plans and (len(plans) >= in_flight or choice.draw(st.booleans())):
            now = plans.pop(0)
            worker.release(pending)
            pending = now.release
            worker.commit(now.commit)
            assert footprint.slabs * worker.price >= worker.needed
    for plan in plans:
        worker.release(pending)
        pending = plan.release
        worker.commit(plan.commit)
    worker.release(pending)
    footprint.settle(99.0)
    assert footprint.slabs == -(-worker.needed // worker.price)
    assert not footprint.leaving


def test_without_shared_pages_slabs_are_counted() -> None:
    footprint = Footprint(1)
    footprint.follow(Plan(0, (0, 1, 2)), 0.0)
    assert footprint.slabs == 3
    footprint.follow(Plan(1, release=(1, 2)), 1.0)
    assert (footprint.slabs, footprint.leaving) == (3, True)
    footprint.follow(Plan(2, commit=(2,)), 2.0)
    assert (footprint.slabs, footprint.leaving) == (2, False)
