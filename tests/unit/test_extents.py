"""The bytes of a block, told from shapes and strides."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.extents import Cells, View, block_cells, slab_blocks
from kvcached_patch.core.pages import PageCounts
from kvcached_patch.errors import LayerPlanError

BLOCKS = 6


def dense(*shape: int) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)


def view(
    name: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], block_dim: int = 0
) -> View:
    return View(name, 0, offset, shape, strides, 2, block_dim)


def test_layer_outermost_has_a_region_per_layer() -> None:
    shape = (BLOCKS, 2, 4, 8)
    layer = 2 * BLOCKS * 64
    views = [view(f"l{i}", i * layer, shape, dense(*shape)) for i in range(3)]
    assert block_cells(views, BLOCKS) == tuple(Cells(0, i * layer, 128) for i in range(3))


def test_block_outermost_has_one_region() -> None:
    block = 3 * 128
    strides = (block // 2, 32, 8, 1)
    views = [view(f"l{i}", i * 128, (BLOCKS, 2, 4, 8), strides) for i in range(3)]
    assert block_cells(views, BLOCKS) == (Cells(0, 0, block),)


def test_heads_outside_blocks_have_a_region_per_head() -> None:
    """LHBNC: one run for each head slot."""
    strides = (32, BLOCKS * 32, 8, 1)
    found = block_cells([view("l", 0, (BLOCKS, 2, 4, 8), strides)], BLOCKS)
    assert found == (Cells(0, 0, 64), Cells(0, BLOCKS * 64, 64))


def test_kernel_blocks_make_up_a_block() -> None:
    shape = (BLOCKS * 4, 2, 1, 8)
    assert block_cells([view("l", 0, shape, dense(*shape))], BLOCKS) == (Cells(0, 0, 128),)


def test_keys_before_blocks_have_a_region_each() -> None:
    """Up to vLLM 0.22, and on ROCm up to 0.28; kernel blocks make up a block there too."""
    for ratio in (1, 4):
        shape = (2, BLOCKS * ratio, 8 // ratio, 8)
        found = block_cells([view("l", 0, shape, dense(*shape), block_dim=1)], BLOCKS)
        assert found == (Cells(0, 0, 128), Cells(0, BLOCKS * 128, 128))


def test_keys_before_blocks_that_lie_page_by_page_are_one_region() -> None:
    """How vLLM restrides such layers where Mamba overlays them."""
    strides = (64, 128, 8, 1)
    found = block_cells([view("l", 0, (2, BLOCKS, 8, 8), strides, block_dim=1)], BLOCKS)
    assert found == (Cells(0, 0, 256),)


def test_padded_pages_and_overlaid_groups_are_one_region() -> None:
    padded = view("sliding", 0, (BLOCKS, 40), (64, 1))
    other = view("mamba", 0, (BLOCKS, 64), (64, 1))
    assert block_cells([padded, other], BLOCKS) == (Cells(0, 0, 128),)


def test_ranges_are_apart() -> None:
    views = [View(f"l{i}", i, 0, (BLOCKS, 8), (8, 1), 4) for i in range(2)]
    assert block_cells(views, BLOCKS) == (Cells(0, 0, 32), Cells(1, 0, 32))


@pytest.mark.parametrize(
    ("views", "names"),
    [
        ([view("kv first", 0, (2, BLOCKS + 1, 8), dense(2, BLOCKS + 1, 8))], "kv first"),
        ([view("kv first", 0, (2, BLOCKS, 8), dense(2, BLOCKS, 8))], "kv first"),
        ([view("raw", 0, (BLOCKS * 8,), (1,))], "raw"),
        ([view("expanded", 0, (BLOCKS, 8), (0, 1))], "expanded"),
        ([view("reversed", 0, (BLOCKS, 8), (8, -1))], "reversed"),
        (
            [view("small", 0, (BLOCKS, 8), (8, 1)), view("large", 0, (BLOCKS, 16), (16, 1))],
            "large, small",
        ),
        (
            [view("a", 0, (BLOCKS, 8), (8, 1)), view("shifted", 8, (BLOCKS, 8), (8, 1))],
            "a, shifted",
        ),
        ([view("overlapping", 0, (BLOCKS, 16), (8, 1))], "overlapping"),
    ],
)
def test_bytes_of_two_blocks_are_refused(views: list[View], names: str) -> None:
    with pytest.raises(LayerPlanError, match=names):
        block_cells(views, BLOCKS)


@given(data=st.data())
def test_every_byte_of_a_view_is_in_its_blocks_cell(data: st.DataObject) -> None:
    """Any physical order, padding, offset, item size, block dimension and ratio of kernel blocks.

    Right, or refused; and where the blocks of each layer are one run, never refused.
    """
    draw = data.draw
    blocks, layers = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    ratio, item = draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 4)))
    inner = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    sizes = (layers, blocks * ratio, *inner)
    order = draw(st.permutations(range(len(sizes))))
    steps, end = [0] * len(sizes), 1
    for dim in reversed(order):
        steps[dim] = end + draw(st.integers(0, 2))  # a gap between two of this dimension
        end = steps[dim] * sizes[dim]
    dim = draw(st.integers(0, len(inner)))  # the dimension that counts blocks, as vLLM shows it
    shape, strides = [*inner], [*steps[2:]]
    shape.insert(dim, sizes[1])
    strides.insert(dim, steps[1])
    offset = draw(st.integers(0, 3)) * item
    views = [
        View(f"l{n}", 0, offset + n * steps[0] * item, tuple(shape), tuple(strides), item, dim)
        for n in range(layers)
    ]
    try:
        cells = block_cells(views, blocks)
    except LayerPlanError:
        assert set(order[:2]) != {0, 1}
        return
    owner: dict[int, int] = {}
    for cell, block in product(cells, range(blocks)):
        for byte in range(cell.base + block * cell.stride, cell.base + (block + 1) * cell.stride):
            assert owner.setdefault(byte, block) == block
    written: dict[int, int] = {}
    for v, index in product(views, product(*map(range, shape))):
        start = v.offset + sum(i * s for i, s in zip(index, strides, strict=True)) * item
        written.update(dict.fromkeys(range(start, start + item), index[dim] // ratio))
    assert all(owner[byte] == block for byte, block in written.items())

    end = max(written) + 1  # the range ends with what is written, before the last block's gap
    for page, slab_size in product((1, 3, 8), (1, 2)):
        counts = PageCounts(cells, [end], blocks, slab_size, page)
        for slab in range(counts.slabs):
            runs = counts.commit([slab])
            assert all(0 <= first < after <= end for _, first, after in runs)
            pages = {byte for _, first, after in runs for byte in range(first, after)}
            assert {b for b, block in written.items() if block // slab_size == slab} <= pages
            counts.release([slab])


def test_a_slab_covers_a_page_in_every_region() -> None:
    assert slab_blocks([Cells(0, 0, 4096), Cells(0, 1 << 20, 1000)], 4096) == 5
    assert slab_blocks([Cells(0, 0, 8192)], 4096) == 1
