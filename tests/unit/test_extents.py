"""The bytes of a block, told from shapes and strides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.extents import Cells, View, block_cells, slab_blocks
from kvcached_patch.errors import LayerPlanError

BLOCKS = 6


def dense(*shape: int) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.insert(0, strides[0] * n)
    return tuple(strides)


def view(
    name: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int = 2
) -> View:
    return View(name, 0, offset, shape, strides, item)


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


@given(
    blocks=st.integers(1, 5),
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 3),
    width=st.integers(1, 4),
    order=st.permutations(range(5)),
)
def test_every_byte_of_a_view_is_in_its_blocks_cell(
    blocks: int, layers: int, heads: int, tokens: int, width: int, order: list[int]
) -> None:
    """Any physical order of (layer, block, head, token, content): right, or refused."""
    sizes = (layers, blocks, heads, tokens, width)
    steps = dict(zip(order, dense(*(sizes[d] for d in order)), strict=True))
    views = [
        View(f"l{layer}", 0, layer * steps[0], sizes[1:], tuple(steps[d] for d in range(1, 5)), 1)
        for layer in range(layers)
    ]
    try:
        cells = block_cells(views, blocks)
    except LayerPlanError:
        return
    owner: dict[int, int] = {}
    for cell in cells:
        for block in range(blocks):
            for byte in range(
                cell.base + block * cell.stride, cell.base + (block + 1) * cell.stride
            ):
                assert owner.setdefault(byte, block) == block
    for v in views:
        for block in range(blocks):
            for h in range(heads):
                for t in range(tokens):
                    for w in range(width):
                        index = (block, h, t, w)
                        byte = v.offset + sum(i * s for i, s in zip(index, v.strides, strict=True))
                        assert owner[byte] == block


def test_a_slab_covers_a_page_in_every_region() -> None:
    assert slab_blocks([Cells(0, 0, 4096), Cells(0, 1 << 20, 1000)], 4096) == 5
    assert slab_blocks([Cells(0, 0, 8192)], 4096) == 1
