"""MaxText's scanned layers as a real scan, whose carry holds the pools of their KV caches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.pools import PooledCaches, moved
from kvcached_patch.jax.scan import Supply, fed

# MaxText's loop over one block: the block, the hidden states, and a list of what it gets as its
# caches, which the loop replaces; it returns the hidden states.
Loop = Callable[[Any, Any, list[Any]], Any]


def scan_pools(
    loop: Loop, layers: Any, hidden: Any, view: PooledCaches, steps: range, axis: int, *, feed: bool
) -> Any:
    """Run equal blocks of layers; returns the hidden states and stores the pools.

    layers: MaxText's stacked module, whose parameters are stacked along `axis`. steps: the first
    layers of the blocks. feed: whether the block's attention layers are to be handed their caches,
    since the block itself does not.
    """
    cycle, length = steps.step, len(steps)
    slots = view.slots[:cycle]
    for place, slot in enumerate(slots):
        if (found := view.layers[slot][:length]) != [first + place for first in steps]:
            raise LayerPlanError(
                f"{type(layers).__name__}: expected number {place} of each of {length} blocks of "
                f"{cycle} layers in one pool; found there layers {found}. "
                "Unset KVCACHED_PATCH_SCAN to serve this model"
            )
    graphdef, parameters, rest = nnx.split(layers, nnx.Param, ...)
    metadata = [_Metadata(view.metadata[place : steps.stop : cycle]) for place in range(cycle)]

    def body(carry: tuple[Any, tuple[Any, ...]], step: jax.Array) -> tuple[Any, None]:
        hidden, caches = carry
        block = nnx.merge(graphdef, _part(parameters, step, axis), _part(rest, step, 0))
        supplies = tuple(
            Supply(cache, moved(of_place.at(step), step * view.pages(slot)))
            for cache, of_place, slot in zip(caches, metadata, slots, strict=True)
        )
        given = [supplies]
        if feed:
            with fed(block):
                hidden = loop(block, hidden, given)
        else:
            hidden = loop(block, hidden, given)
        return (hidden, _updated(given[0], supplies, type(layers).__name__)), None

    carry = hidden, tuple(view.pool(slot).cache for slot in slots)
    (hidden, caches), _ = jax.lax.scan(body, carry, jnp.arange(length, dtype=jnp.int32))
    for place, cache in enumerate(caches):
        view.store(cache, [first + place for first in steps])
    return hidden


def _part(state: Any, step: jax.Array, axis: int) -> Any:
    """One block's part of stacked values, still stacked: what MaxText's loop takes apart.

    Taken inside the scan, whatever the axis: no weights are moved or cut up before it.
    """
    return jax.tree.map(
        lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, step, 1, axis if leaf.ndim > axis else 0),
        state,
    )


class _Metadata:
    """Attention metadata of the layers of one place, which may be of several groups."""

    def __init__(self, by_step: Sequence[Any]) -> None:
        self._groups = list({id(each): each for each in by_step}.values())
        numbers = {id(group): number for number, group in enumerate(self._groups)}
        self._by_step = [numbers[id(each)] for each in by_step]

    def at(self, step: jax.Array) -> Any:
        """What holds in a step, chosen inside the scan."""
        first, *others = self._groups
        if not others:
            return first
        group = jnp.array(self._by_step, jnp.int32)[step]
        return jax.tree.map(lambda *each: jnp.stack(each)[group], first, *others)


def _updated(found: Any, given: tuple[Supply, ...], block: str) -> tuple[Any, ...]:
    """The caches that come back from a block, one for each layer."""
    if (
        not isinstance(found, tuple)
        or len(found) != len(given)
        or not all(isinstance(supply, Supply) for supply in found)
    ):
        raise LayerPlanError(
            f"{block}: expected an updated KV cache of each of its {len(given)} layers. "
            "Unset KVCACHED_PATCH_SCAN to serve this model"
        )
    return tuple(supply.cache for supply in found)
