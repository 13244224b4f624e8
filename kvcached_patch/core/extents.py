"""Which bytes a block covers, read off finished cache views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvcached_patch.errors import LayerPlanError


@dataclass(frozen=True)
class View:
    """One cache tensor as vLLM shaped it.

    range_index: which range of memory it lies in. offset: bytes from the range's start.
    strides: elements. itemsize: bytes. block_dim: the dimension that counts blocks.
    """

    name: str
    range_index: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    block_dim: int = 0


@dataclass(frozen=True)
class Cells:
    """A region divided into one cell per block.

    Block b covers ``[base + b * stride, base + (b + 1) * stride)`` bytes of the range and nothing
    else in the region; cells of different regions never overlap. A cell may end behind the range
    by a gap that no view reaches.
    """

    range_index: int
    base: int
    stride: int


@dataclass(frozen=True)
class _Lane:
    """Block b covers ``[start + b * stride, start + b * stride + length)`` bytes."""

    name: str
    range_index: int
    start: int
    stride: int
    length: int


def block_cells(views: Iterable[View], num_blocks: int) -> tuple[Cells, ...]:
    """Divide all memory that the views can write into cells.

    Layers of different KV cache groups may overlay the same bytes, since a block id belongs to one
    group at a time: then a cell is the union. Raises LayerPlanError naming the layers if a view
    does not count blocks in its block dimension, or if some byte would belong to two blocks.
    """
    lanes = sorted(
        {lane for view in views for lane in _lanes(view, num_blocks)},
        key=lambda lane: (lane.range_index, lane.start, lane.stride),
    )
    cells: list[Cells] = []
    members: list[_Lane] = []
    for lane in lanes:
        if members and _in_region(lane, cells[-1], num_blocks):
            members.append(lane)
        else:
            members = [lane]
            cells.append(Cells(lane.range_index, lane.start, lane.stride))
        cell = cells[-1]
        if lane.stride != cell.stride or lane.start - cell.base + lane.length > cell.stride:
            raise LayerPlanError(
                "KV cache layers whose blocks overlap other blocks: "
                f"{', '.join(sorted({member.name for member in members}))}"
            )
    return tuple(cells)


def _in_region(lane: _Lane, cell: Cells, num_blocks: int) -> bool:
    end = cell.base + num_blocks * cell.stride
    return lane.range_index == cell.range_index and lane.start < end


def _lanes(view: View, num_blocks: int) -> Iterator[_Lane]:
    """The lanes of a view; kernel blocks that subdivide a block are merged.

    A single dimension is a raw range without blocks (vLLM's HiSparse).
    """
    dim = view.block_dim
    strides = view.strides
    countable = len(strides) > 1 and strides[dim] > 0 and min(strides) >= 0
    if not countable or view.shape[dim] % num_blocks:
        raise LayerPlanError(
            f"KV cache layer {view.name} of shape {view.shape}: expected {num_blocks} blocks, or a "
            f"multiple, in dimension {dim} of several"
        )
    ratio = view.shape[dim] // num_blocks
    stride = strides[dim] * ratio
    shape = (*view.shape[:dim], ratio, *view.shape[dim + 1 :])
    for start, length in _runs(shape, strides, stride):
        item = view.itemsize
        yield _Lane(
            view.name, view.range_index, view.offset + start * item, stride * item, length * item
        )


def _runs(shape: Sequence[int], strides: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """(start, length) runs in elements of one block, each no longer than the block stride.

    Where the whole block fits between its neighbours it is one run, gaps included; a layout with
    heads, or keys and values, outside blocks has one run for each.
    """
    span = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    if span <= limit:
        yield 0, span
        return
    outer = max(range(len(shape)), key=lambda d: strides[d] if shape[d] > 1 else -1)
    inner_shape = [1 if d == outer else n for d, n in enumerate(shape)]
    for i in range(shape[outer]):
        for start, length in _runs(inner_shape, strides, limit):
            yield i * strides[outer] + start, length


def slab_blocks(cells: Iterable[Cells], page_bytes: int) -> int:
    """Blocks per slab: the fewest that cover at least one page in every region."""
    return max((-(-page_bytes // cell.stride) for cell in cells), default=1)
