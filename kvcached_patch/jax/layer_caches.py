"""The runner's KV caches as a list by layer whose writes reach the runner's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from kvcached_patch.errors import LayerPlanError


class LayerCaches(list[Any]):
    """One entry per decoder layer; layers that share a slot always hold the same cache.

    It is a list whose items *are* the layers' caches, so that whatever reads a list reads it
    right. Writing a layer's cache writes it for every layer of the slot: nothing that was read
    before a write can undo it. The length is fixed.
    """

    def __init__(self, caches: Sequence[Any], slots: Sequence[int]) -> None:
        """View `caches`, one per slot, by layer; `slots` are the layers' slots."""
        super().__init__(caches[slot] for slot in slots)
        self.slots = tuple(slots)
        self._caches = tuple(caches)
        self._written: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        """Read one layer's cache, or those of a slice of layers."""
        return super().__getitem__(index if isinstance(index, slice) else self._layer(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        """Replace one layer's cache, or those of a slice of layers, by updated ones."""
        if not isinstance(index, slice):
            self._write(self._layer(index), value)
            return
        layers, values = range(len(self))[index], tuple(value)
        if len(layers) != len(values):
            raise ValueError(f"{len(values)} caches for {len(layers)} layers")
        for layer, cache in zip(layers, values, strict=True):
            self._write(layer, cache)

    def unwritten(self) -> list[int]:
        """The layers whose slot was not written since the view was made."""
        return [i for i, slot in enumerate(self.slots) if slot not in self._written]

    def by_slot(self) -> list[Any]:
        """The caches as the runner keeps them; slots that no layer wrote hold what they held."""
        caches = list(self._caches)
        for slot, cache in zip(self.slots, self, strict=True):
            caches[slot] = cache
        return caches

    def _layer(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise LayerPlanError(f"layer.{index}: the KV cache map names {len(self)} layers only")
        return index % len(self)

    def _write(self, layer: int, cache: Any) -> None:
        slot = self._take(layer, cache)
        for other, other_slot in enumerate(self.slots):
            if other_slot == slot:
                super().__setitem__(other, cache)

    def _take(self, layer: int, cache: Any) -> int:
        """Note that a layer's slot is written, if that may be its cache."""
        slot = self.slots[layer]
        expected, found = _shape(self._caches[slot]), _shape(cache)
        if found != expected:
            raise LayerPlanError(
                f"KV cache of layer.{layer} (slot {slot}): expected {expected}, found {found}"
                + " (MaxText's dry run: the layer was given no cache or no metadata)"
                * (not jax.tree.leaves(cache))
            )
        self._written.add(slot)
        return slot

    def _fixed(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"a list of {len(self)} layers' caches cannot change its length or order")

    append = extend = insert = pop = remove = clear = sort = reverse = _fixed
    __delitem__ = __iadd__ = __imul__ = _fixed


def _shape(cache: Any) -> Any:
    """What must not change in an update: the structure, shapes and dtypes."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", cache)
