"""A block's attention layers get its caches in order, one each, and nothing is left over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.layer_caches import LayerCaches
from kvcached_patch.jax.scan import Supply, apply_layers, attend
from kvcached_patch.jax.stacked import block_class


def attention(cache: Any, metadata: Any) -> tuple[Any, Any]:
    return metadata, cache + 10


class Block:
    """A block that hands its layers nothing and forgets what they return, as some of MaxText's."""

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def __call__(self, x: Any, kv_cache: Any = None) -> Any:
        for _ in range(self.layers):
            attend(attention, kv_cache, None)
        return x, None


def loop(block: Block) -> Callable[[list[Any]], None]:
    """MaxText's loop over blocks."""

    def apply(caches: list[Any]) -> None:
        for i, cache in enumerate(caches):
            x, caches[i] = block(i, kv_cache=cache)
            assert x == i

    return apply


def caches(count: int) -> LayerCaches:
    return LayerCaches([jnp.full(2, i) for i in range(count)], range(count))


@pytest.mark.parametrize(("layers", "length"), [(1, 4), (2, 2), (4, 1)])
def test_each_layer_updates_its_own(layers: int, length: int) -> None:
    view, block = caches(4), Block(layers)
    apply_layers(loop(block), block, view, length, "metadata")
    assert [int(cache[0]) for cache in view] == [10, 11, 12, 13]
    assert view.unwritten() == []
    assert type(block) is Block


def test_a_layer_has_the_metadata_that_comes_with_its_cache() -> None:
    seen = []
    view = LayerCaches([Supply(jnp.zeros(2), jnp.array(i)) for i in range(2)], range(2))

    class Watched(Block):
        def __call__(self, x: Any, kv_cache: Any = None) -> Any:
            seen.append(int(attend(attention, kv_cache, None)[0]))
            return x

    block = Watched(1)
    apply_layers(loop(block), block, view, 2, None)
    assert seen == [0, 1]
    assert [int(supply.cache[0]) for supply in view] == [10, 10]
    assert attend(attention, view[1], None)[0] is view[1].metadata


@pytest.mark.parametrize(("layers", "found"), [(1, "only 1"), (3, "more")])
def test_a_block_with_another_number_of_layers_is_named(layers: int, found: str) -> None:
    block = Block(layers)
    with pytest.raises(LayerPlanError, match=f"Block: expected 2 attention layers.* {found}"):
        apply_layers(loop(block), block, caches(4), 2, "metadata")
    assert type(block) is Block
    assert attend(attention, jnp.zeros(2), "outside")[0] == "outside"


def test_blocks_must_be_equal() -> None:
    with pytest.raises(LayerPlanError, match="4 KV caches for 3 scanned blocks"):
        apply_layers(loop(Block(1)), Block(1), caches(4), 3, None)


class LinenBlock(Block):
    """The same with the arguments that linen's scan passes, all of them by position."""

    def __call__(self, x: Any, *arguments: Any) -> Any:
        assert arguments[-2] is None, "the cache comes with the carry"
        for _ in range(self.layers):
            x = x + attend(attention, None, None)[0]
        return x, None


@pytest.mark.parametrize(("layers", "blocks"), [(1, 4), (2, 2), (4, 1)])
def test_each_layer_of_a_stack_updates_its_own(layers: int, blocks: int) -> None:
    block = block_class(LinenBlock, blocks)(layers)
    stack = jnp.stack([jnp.full(2, i) for i in range(4)])

    def scan(x: Any, stack: Any) -> Any:
        body = jax.checkpoint(lambda carry, _: block(carry, "positions", None, 1))
        return jax.lax.scan(body, (x, stack, 0), None, length=blocks)[0]

    x, updated, count = jax.jit(scan)(jnp.zeros((), int), stack)
    assert updated[:, 0].tolist() == [10, 11, 12, 13]
    assert (int(x), int(count)) == (4, blocks)


def test_a_block_of_a_stack_without_the_carry_is_as_it_was() -> None:
    block = block_class(LinenBlock, 2)(0)
    assert block(7, None, None) == (7, None)
    with pytest.raises(LayerPlanError, match="3 KV caches for 2 scanned blocks"):
        block((0, jnp.zeros((3, 2)), 0), None, None)
