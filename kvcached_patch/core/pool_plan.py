"""Which decoder layers keep their KV caches in one array, so that a scan can run over them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvcached_patch.errors import LayerPlanError


@dataclass(frozen=True)
class PoolPlan:
    """pools: the layers of each, whose pages follow each other in this order.

    The pools of the places in the scanned cycle come first, in the order of the places.
    """

    pools: tuple[tuple[int, ...], ...]

    def where(self, layer: int) -> tuple[int, int]:
        """A layer's pool, and which of the pool's equal parts is the layer's.

        Its pages begin at that number times the pages that a layer has.
        """
        return next((n, each.index(layer)) for n, each in enumerate(self.pools) if layer in each)


def plan_pools(slots: Sequence[int], pages: Sequence[Hashable], cycle: int) -> PoolPlan:
    """One pool for each kind of layer: those of one place in the cycle, and alike in their pages.

    slots: by layer, which cache it has. pages: by layer, what that cache's pages are like. cycle:
    layers in one step of the scan; what fills no cycle at the end is not scanned.

    Raises LayerPlanError saying why these layers cannot be: some share a cache, or layers of one
    place differ in their pages though they are scanned.
    """
    first: dict[int, int] = {}
    for layer, slot in enumerate(slots):
        if first.setdefault(slot, layer) != layer:
            raise LayerPlanError(f"layer.{first[slot]} and layer.{layer} share a KV cache")
    kinds: dict[tuple[int, Hashable], list[int]] = {}
    for layer, each in enumerate(pages):
        kinds.setdefault((layer % cycle, each), []).append(layer)
    scanned = len(slots) // cycle * cycle
    for (place, each), (layer, *_) in kinds.items():
        if cycle <= layer < scanned:
            raise LayerPlanError(
                f"layer.{place} and layer.{layer} have one place in blocks of {cycle}, but other "
                f"pages: {pages[place]} and {each}"
            )
    return PoolPlan(tuple(map(tuple, kinds.values())))
