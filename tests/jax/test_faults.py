"""Each fault of stock MaxText, which test_models shows to be gone."""

from __future__ import annotations

import pytest

from tests.jax.conftest import Serve
from tests.jax.stock import MARK, stock
from tools.maxtext.decoding import decode, written


def test_stock_loses_the_writes_of_layers_whose_slot_others_share(serve: Serve) -> None:
    served = serve("gemma4-e2b")
    layers = [served.index_map[f"layer.{i}"] for i in range(served.model.layers)]
    shared = {slot for slot in layers if layers.count(slot) > 1}
    with stock():
        decoded = decode(served, served.index_map | MARK)
    assert written(decoded.caches) == [slot not in shared for slot in range(len(set(layers)))]
    assert decoded.delta > decoded.scale / 10


@pytest.mark.parametrize("name", ["llama-scanned", "mistral-scanned", "gemma2-scanned"])
def test_stock_gets_no_caches_from_scanned_layers(serve: Serve, name: str) -> None:
    served = serve(name)
    with stock():
        caches = served.step(
            served.caches(),
            [(0, range(9))],
            index_map=tuple((served.index_map | MARK).items()),
        )[0]
    assert caches[: served.model.layers // served.model.per_layer] == (
        [None] * (served.model.layers // served.model.per_layer)
    )


@pytest.mark.parametrize("name", ["olmo3-scanned", "llama4-scanned", "gpt-oss-scanned"])
def test_stock_touches_one_cache_of_each_scanned_block(serve: Serve, name: str) -> None:
    served = serve(name)
    with stock():
        caches = served.step(
            served.caches(),
            [(0, range(9))],
            index_map=tuple((served.index_map | MARK).items()),
        )[0]
    touched = [cache is None or written([cache])[0] for cache in caches]
    assert 0 < sum(touched) < served.model.layers
