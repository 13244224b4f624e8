"""Which layers' KV caches are of one pool, and where in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.pool_plan import plan_pools
from kvcached_patch.errors import LayerPlanError


@given(st.integers(1, 40), st.integers(1, 8), st.randoms())
def test_every_layer_has_a_part_of_its_own(layers: int, cycle: int, random: object) -> None:
    slots = list(range(layers))
    random.shuffle(slots)  # type: ignore[attr-defined]
    kinds = [layer % cycle % 3 for layer in range(layers)]
    plan = plan_pools(slots, kinds, cycle)
    assert sorted(layer for pool in plan.pools for layer in pool) == list(range(layers))
    for layer in range(layers):
        pool, part = plan.where(layer)
        assert plan.pools[pool][part] == layer
        assert (pool, part) == (layer % cycle, layer // cycle)
        assert {kinds[other] for other in plan.pools[pool]} == {kinds[layer]}


def test_a_layer_after_the_last_block_may_be_of_its_own_kind() -> None:
    plan = plan_pools(range(7), ["a"] * 6 + ["b"], 6)
    assert plan.pools == ((0,), (1,), (2,), (3,), (4,), (5,), (6,))
    assert plan_pools(range(7), ["a"] * 7, 6).pools[0] == (0, 6)
    assert plan.where(6) == (6, 0)


def test_layers_of_one_place_that_differ_cannot_be_scanned() -> None:
    with pytest.raises(LayerPlanError, match=r"layer\.1 and layer\.3 .* blocks of 2.*: a and b"):
        plan_pools(range(4), "aaab", 2)


def test_layers_that_share_a_cache_cannot_be_scanned() -> None:
    with pytest.raises(LayerPlanError, match=r"layer\.0 and layer\.2 share a KV cache"):
        plan_pools([3, 1, 3], "aaa", 1)
