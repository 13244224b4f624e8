"""Which slot each decoder layer uses, from tpu-inference's map."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.index_map import resolve

# Name -> map, slots, what comes of it.
RIGHT: dict[str, tuple[Any, int, tuple[int, ...] | None]] = {
    "none": (None, 3, None),
    "empty": ({}, 3, None),
    "no pairs": ((), 3, None),
    "no layer": ({"draft_layer.0": 0, "layer.0.rope": 1, "mtp.layer.0": 2}, 3, None),
    "dict": ({"layer.0": 1, "layer.1": 0}, 2, (1, 0)),
    "pairs": ((("layer.1", 0), ("layer.0", 1)), 2, (1, 0)),
    "shared slot": ({"layer.0": 0, "layer.1": 1, "layer.2": 0}, 2, (0, 1, 0)),
    "same entry twice": ((("layer.0", 1), ("layer.0", 1)), 2, (1,)),
    "drafts last": ({"layer.0": 0, "draft_layer.0": 1}, 2, (0,)),
    "a draft's slot is not looked at": ({"layer.0": 0, "draft_layer.0": 9}, 1, (0,)),
    "fewer layers than slots": ({"layer.0": 2}, 3, (2,)),
    "other names": (
        {0: 0, None: 0, "layer.x": 0, "layer.": 0, "layer.01": 0, "layer.0": 0},
        1,
        (0,),
    ),
    "spaces and signs": ({"layer. 1": 0, "layer.+1": 0, "layer.1 ": 0, "layer.²": 0}, 1, None),
    "more than nine": ({f"layer.{i}": 11 - i for i in range(12)}, 12, tuple(range(11, -1, -1))),
}
WRONG: dict[str, tuple[Any, int, str]] = {
    "too high": ({"layer.0": 2}, 2, "'layer.0': 2: expected an integer of the 2 slots 0..1"),
    "negative": ({"layer.0": 0, "layer.1": -1}, 2, "'layer.1': -1: expected an integer"),
    "bool": ({"layer.0": True}, 2, "'layer.0': True: expected an integer"),
    "float": ({"layer.0": 1.0}, 2, "'layer.0': 1.0: expected an integer"),
    "text": ({"layer.0": "1"}, 2, "'layer.0': '1': expected an integer"),
    "nothing": ({"layer.0": None}, 2, "'layer.0': None: expected an integer"),
    "gap": ({"layer.0": 0, "layer.2": 1}, 2, "no entry for layer.1; expected layer.0 to layer.2"),
    "far gap": ({"layer.0": 0, "layer.9999999999": 1}, 2, "no entry for layer.1; expected"),
    "no first": (
        {"layer.2": 1, "layer.3": 0},
        2,
        "no entry for layer.0; expected layer.0 to layer.3",
    ),
    "two slots": ((("layer.0", 0), ("layer.0", 1)), 2, "'layer.0': 1: expected one slot, found"),
}


@pytest.mark.parametrize(("index_map", "slots", "expected"), RIGHT.values(), ids=RIGHT)
def test_a_map_is_resolved(index_map: Any, slots: int, expected: tuple[int, ...] | None) -> None:
    assert resolve(index_map, slots) == expected


@pytest.mark.parametrize(("index_map", "slots", "message"), WRONG.values(), ids=WRONG)
def test_a_bad_entry_is_named(index_map: Any, slots: int, message: str) -> None:
    with pytest.raises(LayerPlanError, match=re.escape(message)):
        resolve(index_map, slots)


@given(st.lists(st.integers(0, 5), min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_matter(slots: list[int], random: Any) -> None:
    pairs = [(f"layer.{i}", slot) for i, slot in enumerate(slots)] + [("draft_layer.0", 5)]
    random.shuffle(pairs)
    assert resolve(tuple(pairs), 6) == resolve(dict(pairs), 6) == tuple(slots)
