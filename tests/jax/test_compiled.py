"""A map costs nothing: the same equations, every cache donated, none copied, no retracing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.jax.conftest import Serve
from tests.jax.stock import MARK, stock
from tools.maxtext import kernels
from tools.maxtext.served import Served, copied_bytes, permuted

BATCH = [(0, range(9)), (1, range(12))]


def step(served: Served, index_map: dict[str, int]) -> Any:
    """The runner's step as a function of caches and weights alone."""
    return lambda caches, leaves: served.step(
        caches, BATCH, index_map=tuple(index_map.items()), state_leaves=leaves
    )


def equations(served: Served, index_map: dict[str, int], caches: list[Any]) -> list[str]:
    traced = jax.make_jaxpr(step(served, index_map))(caches, served.interface.state_leaves)
    return list(primitives(traced.jaxpr))


def primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(parameter):
                yield from primitives(getattr(parameter, "jaxpr", parameter))


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)


def shuffled(served: Served) -> tuple[dict[str, int], list[Any]]:
    caches = served.caches()
    index_map, order = permuted(served.index_map, len(caches), seed=2)
    return index_map, [caches[order.index(slot)] for slot in range(len(caches))]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-scanned", "gemma4-e2b", "olmo3-scanned"])
def test_a_permuted_map_adds_no_equation(serve: Serve, name: str) -> None:
    served = serve(name)
    assert equations(served, *shuffled(served)) == (
        equations(served, served.index_map, served.caches())
    )


@pytest.mark.parametrize("name", ["qwen3", "qwen3-scanned", "gemma3-scanned"])
def test_the_patch_adds_no_equation_where_stock_is_right(serve: Serve, name: str) -> None:
    served = serve(name)
    patched = equations(served, served.index_map, served.caches())
    with stock():
        assert equations(served, served.index_map | MARK, served.caches()) == patched


def touch(
    mesh: Any, q: Any, k: Any, v: Any, cache: Any, *_: Any, update_kv_cache: bool = True, **__: Any
) -> Any:
    """Write to the cache in place, then read it: opaque to XLA, as the TPU kernel is.

    XLA's own gathers and scatters may be fused across each other, for which it copies.
    """
    if update_kv_cache:
        row = jax.numpy.broadcast_to(k.sum() + v.sum(), (1, *cache.shape[1:]))
        written = jax.lax.dynamic_update_slice(cache, row, (0,) * cache.ndim)
        cache = jax.lax.optimization_barrier(written)
    return q + cache[:2].sum(), cache


@pytest.mark.parametrize("name", ["qwen3-scanned", "gemma4-e2b", "olmo3-scanned"])
def test_every_cache_is_donated_and_none_is_copied(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from tpu_inference.layers.common import attention_interface

    monkeypatch.setattr(attention_interface, "sharded_ragged_paged_attention", touch)
    served = serve(name)
    index_map, caches = shuffled(served)
    leaves = jax.tree.leaves(caches)
    jitted = jax.jit(step(served, index_map | {"touched": 0}), donate_argnums=0)
    compiled = jitted.lower(caches, served.interface.state_leaves).compile()
    nbytes = compiled.memory_analysis().alias_size_in_bytes
    assert nbytes == sum(leaf.nbytes for leaf in leaves)
    assert copied_bytes(compiled, leaves) == 0


def test_only_a_new_map_is_traced_and_only_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpu_inference.layers.common import attention_interface

    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return kernels.ragged_paged_attention(*args, **kwargs)

    monkeypatch.setattr(attention_interface, "sharded_ragged_paged_attention", counted)
    served = serve("qwen3")
    caches = served.caches()
    index_map, _ = permuted(served.index_map, len(caches), seed=3)
    for _ in range(3):
        given = caches
        caches, *_ = served.step(given, BATCH, index_map=tuple(index_map.items()))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))  # donated
    assert len(calls) == served.model.layers
    other, _ = permuted(served.index_map, len(caches), seed=4)
    for _ in range(2):
        caches, *_ = served.step(caches, BATCH, index_map=tuple(other.items()))
    assert len(calls) == 2 * served.model.layers
