"""The view of pools by layer: what is read and written, and what of that is an error."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvcached_patch.core.pool_plan import PoolPlan
from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax import pools
from kvcached_patch.jax.pools import Pool, PooledCaches, pages_of, pooled
from kvcached_patch.jax.scan import Supply

SLOTS = (1, 2, 1, 2)  # of four layers; slot 0 is a draft's
PAGES = 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Metadata:
    block_tables: Any
    mamba_state_indices: Any = None


def cache(layers: int = 2) -> jax.Array:
    return jnp.zeros((layers * PAGES, 4))


@pytest.fixture
def view() -> PooledCaches:
    caches = [cache(1), Pool(cache(), 1), Pool((cache(), cache()), 1)]
    return PooledCaches(caches, SLOTS, [Metadata(jnp.array([1]), jnp.array([2]))] * 4)


def test_each_layer_has_the_pool_and_tables_that_are_its_own(view: PooledCaches) -> None:
    for layer, pages in enumerate((0, 0, PAGES, PAGES)):
        supply = view[layer]
        assert int(supply.metadata.block_tables[0]) == 1 + pages
        assert int(supply.metadata.mamba_state_indices[0]) == 2 + pages
    assert view[0].cache is view[2].cache
    assert isinstance(view[3].cache, tuple)


def test_each_layer_has_to_write(view: PooledCaches) -> None:
    assert view.unwritten() == [0, 1, 2, 3]
    for layer in (0, 3, 1):
        supply = view[layer]
        view[layer] = Supply(jax.tree.map(lambda leaf: leaf + 1, supply.cache), supply.metadata)
    assert view.unwritten() == [2]
    draft, one, two = view.by_slot()
    assert (float(one.cache.max()), float(two.cache[1].max())) == (1, 2)
    assert (type(draft), type(one), one.shards) == (type(cache()), Pool, 1)


def test_what_was_written_back_as_it_was_is_no_write(view: PooledCaches) -> None:
    view[0] = view[0]
    assert view.unwritten() == [0, 1, 2, 3]


def test_of_layers_that_were_read_together_one_can_be_written(view: PooledCaches) -> None:
    first, _, third, _ = view[:]
    view[0] = Supply(first.cache + 1, first.metadata)
    with pytest.raises(LayerPlanError, match=r"layer\.2: another layer of its pool was written"):
        view[2] = Supply(third.cache + 1, third.metadata)
    again = view[2]
    view[2] = Supply(again.cache + 1, again.metadata)
    assert float(view.by_slot()[1].cache.max()) == 2


@pytest.mark.parametrize("wrong", [None, [], jnp.zeros((1, 4)), "supply"])
def test_what_is_no_such_cache_is_refused(view: PooledCaches, wrong: Any) -> None:
    supply = view[0]
    given = Supply(jnp.zeros(3), supply.metadata) if wrong == "supply" else wrong
    with pytest.raises(LayerPlanError, match=r"KV cache of layer\.0 \(slot 1\): expected float32"):
        view[0] = given


def test_a_map_to_what_is_no_pool_is_refused() -> None:
    with pytest.raises(LayerPlanError, match=r"layer\.1: slot 0 is no pool"):
        PooledCaches([cache(1), Pool(cache(), 1)], (1, 0), [None, None])


def test_all_caches_are_gone_before_a_pool_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of caches that lay among others would find no hole of its size."""
    caches, made, maker = [cache(1) for _ in range(4)], [], pools._maker

    def watched(of: Any) -> Any:
        make = maker(of)

        def made_now() -> Pool:
            made.append([each.is_deleted() for each in caches])
            return make()

        return made_now

    monkeypatch.setattr(pools, "_maker", watched)
    found = pooled(caches, PoolPlan(((0, 2), (1, 3))))
    assert made == [[True] * 4] * 2
    assert [pool.cache.shape for pool in found] == [(2 * PAGES, 4)] * 2
    assert [pool.pages(2) for pool in found] == [PAGES] * 2


def test_states_that_differ_in_their_pages_cannot_be_pooled() -> None:
    mesh = Mesh(jax.devices()[:2], ("data",))
    split, whole = (
        jax.device_put(jnp.zeros((4, 2)), NamedSharding(mesh, PartitionSpec(*axes)))
        for axes in (("data",), ())
    )
    assert pages_of((split, split)).count("float32[4, 2] over") == 2
    with pytest.raises(
        LayerPlanError, match="states of a layer differ in the number of their page"
    ):
        pages_of((split, whole))
