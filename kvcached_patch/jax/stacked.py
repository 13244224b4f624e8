"""Scanned layers of MaxText's linen decoders, which carry the caches of all layers stacked."""

from __future__ import annotations

import functools
from typing import Any

import jax

from kvcached_patch.jax.scan import Feed, Supply, feeding, layers_per_block


def is_carry(inputs: Any) -> bool:
    """Whether these are hidden states, the stacked caches and the number of the next block."""
    return isinstance(inputs, tuple) and len(inputs) == 3


@functools.cache
def block_class(layer_class: type, blocks: int) -> type:
    """The linen class of a layer, or block of layers, that takes its caches out of the carry.

    Many of MaxText's own do not know the carry, and those that do take one cache for a whole block
    (maxtext#3372, #4964). blocks: how many are scanned; the caches are shared out among them.
    """

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_carry(inputs):
            return layer_class.__call__(self, inputs, *args, **kwargs)
        hidden, caches, block = inputs
        *others, _, metadata = args
        size = layers_per_block(len(caches), blocks)
        places = [block * size + i for i in range(size)]
        supplies = [
            Supply(jax.lax.dynamic_index_in_dim(caches, place, keepdims=False), metadata)
            for place in places
        ]
        with feeding(Feed(layer_class.__name__, supplies)) as feed:
            result = layer_class.__call__(self, hidden, *others, None, metadata, **kwargs)
        for place, supply in zip(places, feed.updated(), strict=True):
            caches = jax.lax.dynamic_update_index_in_dim(caches, supply.cache, place, 0)
        hidden = result[0] if isinstance(result, tuple) else result
        return (hidden, caches, block + 1), None

    return type(layer_class.__name__, (layer_class,), {"__call__": call})
