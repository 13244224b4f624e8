"""What the adapter accepts and refuses, on the real step function."""

from __future__ import annotations

import inspect
import re
from typing import Any

import jax
import pytest

from kvcached_patch.errors import LayerPlanError, SeamMismatch
from kvcached_patch.seams.apply import armed, tally
from tests.jax.conftest import Serve
from tools.maxtext.decoding import decode, written
from tools.maxtext.served import Served

BATCH = [(0, range(5))]


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve("qwen3")  # four layers


def test_all_seams_are_in_place(served: Served) -> None:
    assert tally() == f"{len(armed())}/{len(armed())}"
    assert {entry.package for entry in armed()} >= {"maxtext"}
    assert "vllm" not in {entry.package for entry in armed()}


def test_the_signature_is_what_register_model_looks_for(served: Served) -> None:
    from tpu_inference.models.common.model_loader import _validate_model_interface

    model = type(served.interface.model)
    _validate_model_interface(model)
    names = list(inspect.signature(model.__call__).parameters)
    assert names[:4] == ["self", "kv_caches", "input_ids", "attention_metadata"]
    assert "spec_step_idx" not in names


@pytest.mark.parametrize("caches", [None, []])
def test_without_caches_it_is_a_dry_run(served: Served, caches: Any) -> None:
    returned, hidden, *_ = served.step(caches, BATCH)
    assert returned == caches
    assert hidden.shape[1] == 32


def test_no_map_means_the_order_of_the_list(served: Served) -> None:
    for index_map in (None, ()):
        caches, *_ = served.step(served.caches(), BATCH, index_map=index_map)
        assert type(caches) is list
        assert written(caches) == [True] * 4


def test_slots_of_drafts_and_other_caches_are_left_alone(served: Served) -> None:
    extra = served.caches()[:2]
    index_map = {f"layer.{i}": i + 1 for i in range(4)}
    index_map |= {"draft_layer.0": 0, "layer.0.rope": 5, 7: 0}
    caches = [extra[0], *served.caches(), extra[1]]
    returned, *_ = served.step(caches, BATCH, index_map=tuple(index_map.items()))
    assert written(returned) == [False, *[True] * 4, False]
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(caches))  # all were donated


WRONG_MAPS = {
    "longer": ({f"layer.{i}": i % 4 for i in range(6)}, None),
    "owners more than layers": ({f"layer.{i}": i for i in range(5)}, "no KV cache of layers [4]"),
    "shorter": ({f"layer.{i}": i for i in range(3)}, "layer.3: the KV cache map names 3 layers"),
    "gap": ({"layer.0": 0, "layer.2": 1}, "no entry for layer.1"),
    "out of range": ({"layer.0": 5}, "'layer.0': 5: expected an integer of the 5 slots"),
    "negative": ({"layer.0": -1}, "'layer.0': -1: expected"),
}


@pytest.mark.parametrize(("index_map", "message"), WRONG_MAPS.values(), ids=WRONG_MAPS)
def test_a_map_that_is_not_this_models(
    served: Served, index_map: dict[str, int], message: str | None
) -> None:
    caches = served.caches() + served.caches()[:1]
    pairs = tuple(index_map.items())
    if message is None:  # the two last are layers that no decoder layer is: they share slots
        assert written(served.step(caches, BATCH, index_map=pairs)[0]) == [*[True] * 4, False]
        return
    with pytest.raises(LayerPlanError, match=re.escape(message)):
        served.step(caches, BATCH, index_map=pairs)


def test_metadata_of_groups_reaches_each_layer_and_those_that_share_its_slot(
    serve: Serve,
) -> None:
    served = serve("gemma4-e2b")
    one = served.metadata([(0, range(5))])
    owners = {slot: name for name, slot in reversed(served.index_map.items())}
    grouped = dict.fromkeys(owners.values(), one)
    caches, *_ = served.step(served.caches(), [(0, range(5))], metadata=grouped)
    assert all(written(caches))
    del grouped[owners[0]]
    with pytest.raises(LayerPlanError, match=rf"no attention metadata for {owners[0]} or a layer"):
        served.step(served.caches(), [(0, range(5))], metadata=grouped)


def test_two_layers_of_one_slot_read_what_the_later_one_wrote(served: Served) -> None:
    index_map = {"layer.0": 0, "layer.1": 1, "layer.2": 2, "layer.3": 2}
    assert written(decode(served, index_map).caches) == [True, True, True, False]


def test_a_pair_of_releases_that_cannot_work_names_one_that_can(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    from kvcached_patch.engines import maxtext

    config = serve("qwen3-next").interface.model.maxtext_config
    monkeypatch.setattr(maxtext, "HYBRID_PAIRS", {">=0": "<0.27"})
    with pytest.raises(SeamMismatch, match=r"cannot serve qwen3_next on tpu-inference .*>=0\.30"):
        maxtext.configure(lambda: config, None, (), {})
