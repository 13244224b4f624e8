"""The live layer view: a list by layer, whose writes reach the runner's slots."""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.layer_caches import LayerCaches

SLOTS = (2, 0, 2, 3)  # of four layers, the third sharing the first one's; slot 1 is a draft's


def cache(value: float, *shape: int, dtype: Any = jnp.float32) -> Any:
    return jnp.full(shape or (2, 3), value, dtype)


@pytest.fixture
def caches() -> list[Any]:
    return [cache(0), cache(1), cache(2), (cache(3), cache(3, 4))]


@pytest.fixture
def view(caches: list[Any]) -> LayerCaches:
    return LayerCaches(caches, SLOTS)


def test_it_is_a_list_with_one_entry_per_layer(view: LayerCaches, caches: list[Any]) -> None:
    assert isinstance(view, list)
    assert len(view) == 4
    by_layer = [caches[slot] for slot in SLOTS]
    for found in (
        [view[i] for i in range(4)],
        [view[i - 4] for i in range(4)],
        view[:],
        view[1:3][:0] + view[0:4],
        list(view),
        [*view],
        list(reversed(view))[::-1],
        tuple(view),
        [each for _, each in enumerate(view)],
        view.copy(),
    ):
        assert [id(each) for each in found] == [id(each) for each in by_layer]
    first, *_, last = view
    assert (first is by_layer[0], last is by_layer[3]) == (True, True)


def test_it_stacks(caches: list[Any]) -> None:
    stacked = jnp.stack(LayerCaches(caches, (2, 0, 1, 2)))
    np.testing.assert_array_equal(stacked[:, 0, 0], [2, 0, 1, 2])


def test_a_write_is_seen_by_every_layer_of_the_slot(view: LayerCaches) -> None:
    new = cache(9)
    view[2] = new
    assert view[0] is view[2] is new
    assert next(iter(view)) is new
    newer = cache(10)
    view[-4] = newer
    assert view[2] is newer


def test_a_slice_is_written_in_order(view: LayerCaches) -> None:
    new = [cache(5), cache(6), cache(7)]
    view[:3] = new
    assert [view[i] for i in range(3)] == [new[2], new[1], new[2]]
    with pytest.raises(ValueError, match="2 caches for 3 layers"):
        view[:3] = new[:2]


def test_the_runner_gets_a_plain_list_in_its_own_order(
    view: LayerCaches, caches: list[Any]
) -> None:
    new = cache(9)
    view[2] = new
    returned = view.by_slot()
    assert type(returned) is list
    assert [id(each) for each in returned] == [id(c) for c in (*caches[:2], new, caches[3])]


def test_it_knows_the_layers_that_were_not_written(view: LayerCaches) -> None:
    assert view.unwritten() == [0, 1, 2, 3]
    view[2] = cache(9)
    assert view.unwritten() == [1, 3]


WRONG = {
    "none": (1, None, "layer.1 (slot 0): expected float32[2, 3], found None (MaxText's dry run"),
    "dry run": (1, [], "layer.1 (slot 0): expected float32[2, 3], found [] (MaxText's dry run"),
    "shape": (2, cache(0, 3, 2), "layer.2 (slot 2): expected float32[2, 3], found float32[3, 2]"),
    "dtype": (
        0,
        cache(0, dtype=jnp.int32),
        "layer.0 (slot 2): expected float32[2, 3], found int32",
    ),
    "structure": (3, cache(0), "layer.3 (slot 3): expected ('float32[2, 3]', 'float32[4]'), found"),
    "list for tuple": (3, [cache(3), cache(3, 4)], "layer.3 (slot 3): expected ("),
}


@pytest.mark.parametrize(("layer", "value", "message"), WRONG.values(), ids=WRONG)
def test_another_kind_of_cache_is_refused(
    view: LayerCaches, layer: int, value: Any, message: str
) -> None:
    with pytest.raises(LayerPlanError, match=re.escape(message)):
        view[layer] = value
    assert view.unwritten() == [0, 1, 2, 3]


def test_a_layer_that_has_no_cache_is_named(view: LayerCaches) -> None:
    with pytest.raises(LayerPlanError, match=r"layer\.4: .* 4 layers"):
        view[4]
    with pytest.raises(LayerPlanError, match=r"layer\.4: .* 4 layers"):
        view[4] = cache(0)


CHANGES = {
    "append": lambda view: view.append(1),
    "extend": lambda view: view.extend([1]),
    "insert": lambda view: view.insert(0, 1),
    "pop": lambda view: view.pop(),
    "remove": lambda view: view.remove(1),
    "clear": lambda view: view.clear(),
    "sort": lambda view: view.sort(),
    "reverse": lambda view: view.reverse(),
    "delete": lambda view: view.__delitem__(0),
    "add": lambda view: view.__iadd__([1]),
    "multiply": lambda view: view.__imul__(2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_its_length_is_fixed(view: LayerCaches, change: Any) -> None:
    with pytest.raises(TypeError, match="4 layers' caches cannot change"):
        change(view)
