"""Each attention layer gets its own cache and metadata, also inside scanned decoder layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.layer_caches import LayerCaches

Attention = Callable[[Any, Any], tuple[Any, Any]]  # of cache and metadata: output, updated cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Supply:
    """What one attention layer needs; it passes for a cache where MaxText hands that on."""

    cache: Any
    metadata: Any

    def attend(self, attention: Attention) -> tuple[Any, Supply]:
        """Run the layer; returns its output and the supply with the updated cache."""
        output, cache = attention(self.cache, self.metadata)
        return output, Supply(cache, self.metadata)


class Feed:
    """The supplies of one decoder block, handed to its attention layers in the order they run.

    It lives for one call of the block, within one trace, so that no tracer outlives its trace
    (a rematerialised block is a trace of its own).
    """

    def __init__(self, block: str, supplies: Sequence[Supply]) -> None:
        """`block` names the block in errors."""
        self._block = block
        self._supplies = supplies
        self._updated: list[Supply] = []

    def attend(self, attention: Attention) -> tuple[Any, Supply]:
        """Run the next attention layer on what is its own."""
        if len(self._updated) == len(self._supplies):
            raise self._mismatch("more")
        output, supply = self._supplies[len(self._updated)].attend(attention)
        self._updated.append(supply)
        return output, supply

    def updated(self) -> tuple[Supply, ...]:
        """The supplies with the updated caches, once the block has run."""
        if len(self._updated) < len(self._supplies):
            raise self._mismatch(f"only {len(self._updated)}")
        return tuple(self._updated)

    def _mismatch(self, found: str) -> LayerPlanError:
        return LayerPlanError(
            f"{self._block}: expected {len(self._supplies)} attention layers, one for each of its "
            f"KV caches; found {found}. Set scan_layers: false to serve this model"
        )


_feed: ContextVar[Feed | None] = ContextVar("feed", default=None)


@contextmanager
def feeding(feed: Feed) -> Iterator[Feed]:
    """Meanwhile attention layers take what they need from the feed."""
    token = _feed.set(feed)
    try:
        yield feed
    finally:
        _feed.reset(token)


def attend(attention: Attention, cache: Any, metadata: Any) -> tuple[Any, Any]:
    """Run an attention layer: on its block's feed, on its supply, or on what it was given."""
    feed = _feed.get()
    if feed is not None:
        return feed.attend(attention)
    if isinstance(cache, Supply):
        return cache.attend(attention)
    return attention(cache, metadata)


def layers_per_block(caches: int, blocks: int) -> int:
    """Caches of each of the equal blocks; raises LayerPlanError if they cannot be shared out."""
    size, rest = divmod(caches, blocks)
    if rest:
        raise LayerPlanError(f"{caches} KV caches for {blocks} scanned blocks; expected a multiple")
    return size


def apply_layers(
    apply: Callable[[list[Any]], Any],
    layers: Any,
    caches: LayerCaches,
    length: int,
    metadata: Any,
) -> Any:
    """Run MaxText's loop over `length` equal blocks of layers, and store the updated caches.

    apply: the loop, told the list of what each block gets as its cache; it replaces the items.
    metadata: that of every layer whose entry in `caches` is no supply already.
    """
    size = layers_per_block(len(caches), length)
    supplies = [cache if isinstance(cache, Supply) else Supply(cache, metadata) for cache in caches]
    blocks = [tuple(supplies[i : i + size]) for i in range(0, len(supplies), size)]
    with fed(layers):
        result = apply(blocks)
    for layer, supply in enumerate(supply for block in blocks for supply in block):
        caches[layer] = supply if isinstance(caches[layer], Supply) else supply.cache
    return result


@contextmanager
def fed(layers: Any) -> Iterator[None]:
    """Have these stacked layers, and what MaxText makes of their slices, run on a feed."""
    layer_class: Any = type(layers)
    object.__setattr__(layers, "__class__", _fed_class(layer_class))
    try:
        yield
    finally:
        object.__setattr__(layers, "__class__", layer_class)


@functools.cache
def _fed_class(layer_class: type) -> type:
    """The class of a decoder layer or block with a ``kv_cache`` that is a sequence of supplies.

    MaxText inspects the signature of ``__call__`` and takes the updated cache from its result,
    which many classes leave out (maxtext#3372).
    """

    @functools.wraps(layer_class.__call__)
    def call(self: Any, *args: Any, kv_cache: Sequence[Supply], **kwargs: Any) -> Any:
        with feeding(Feed(layer_class.__name__, kv_cache)) as feed:
            result = layer_class.__call__(self, *args, **kwargs)
        return (result[0] if isinstance(result, tuple) else result), feed.updated()

    return type(layer_class.__name__, (layer_class,), {"__call__": call})
