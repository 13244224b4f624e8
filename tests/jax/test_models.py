"""Decoding gives what a full prefill gives, whatever the order of the caches."""

from __future__ import annotations

from importlib.metadata import version

import jax
import numpy as np
import pytest

from kvcached_patch.errors import KvcachedPatchError
from tests.jax.conftest import Serve
from tools.maxtext.decoding import decode, decode_permuted, written
from tools.maxtext.models import MODELS
from tools.maxtext.served import in_layer_order

LIMIT = 1e-4  # float32
MAXTEXT = version("maxtext")
SERVED = [name for name, model in MODELS.items() if MAXTEXT not in model.refused]


@pytest.mark.parametrize("name", SERVED)
def test_decoding_is_prefilling(serve: Serve, name: str) -> None:
    served = serve(name)
    slots = [served.index_map[f"layer.{i}"] for i in range(served.model.layers)]
    decoded = decode(served)
    assert decoded.delta <= LIMIT
    assert written(decoded.caches) == [slot in slots for slot in range(len(decoded.caches))]
    shuffled, order = decode_permuted(served)
    assert shuffled.delta <= LIMIT
    for slot, cache in enumerate(decoded.caches):
        for one, other in zip(
            jax.tree.leaves(cache), jax.tree.leaves(shuffled.caches[order[slot]]), strict=True
        ):
            np.testing.assert_array_equal(one, other)


def test_a_runner_that_sorts_its_slots_gives_the_same(serve: Serve) -> None:
    served = serve("gemma4-e2b")
    index_map, order = in_layer_order(served.index_map, len(served.caches()))
    assert index_map != served.index_map
    assert decode(served, index_map, order).delta <= LIMIT


def test_what_this_maxtext_cannot_serve_is_refused(serve: Serve) -> None:
    for name in MODELS.keys() - SERVED:
        with pytest.raises(KvcachedPatchError, match=r"cannot serve|updated no KV cache of layers"):
            decode(serve(name))


@pytest.mark.skipif(MAXTEXT != "0.2.3", reason="the decoders of newer releases are not linen")
def test_scanned_linen_layers_cannot_have_metadata_of_groups(serve: Serve) -> None:
    served = serve("qwen3-scanned")
    batch = [(0, range(5))]
    grouped = dict.fromkeys(served.index_map, served.metadata(batch))
    with pytest.raises(KvcachedPatchError, match=r"share one attention metadata.*scan_layers"):
        served.step(served.caches(), batch, metadata=grouped)
