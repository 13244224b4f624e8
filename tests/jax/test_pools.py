"""KVCACHED_PATCH_SCAN=pool: what is computed, and by which program."""

from __future__ import annotations

import dataclasses
import re
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvcached_patch import config
from kvcached_patch.engines import maxtext_pools
from kvcached_patch.errors import ConfigError, LayerPlanError
from kvcached_patch.jax.pools import Pool
from tests.jax.conftest import Serve
from tests.jax.stock import stock
from tools.maxtext import kernels
from tools.maxtext.decoding import PROMPTS, decode, decode_permuted, written
from tools.maxtext.models import MODELS, deep
from tools.maxtext.served import PAGES, REQUESTS, TOKENS, Served, copied_bytes, lowered, token

LIMIT = 1e-4  # float32
MAXTEXT = version("maxtext")
LINEN = MAXTEXT == "0.2.3"
SCANNED = [name for name, m in MODELS.items() if m.scan and MAXTEXT not in m.refused]
DEPTHS = (8, 32, 64)
BATCH = [(0, range(9)), (1, range(12))]


def scanned(*names: str) -> list[str]:
    """Those of them that this MaxText can serve."""
    return [name for name in names if name in SCANNED]


pytestmark = pytest.mark.skipif(LINEN, reason="linen decoders are not served with pools")


@pytest.mark.parametrize("name", SCANNED)
def test_decoding_is_prefilling_and_bit_by_bit_what_unrolled_layers_give(
    serve: Serve, name: str
) -> None:
    served, unrolled = serve(name, "pool"), decode(serve(name))
    decoded = decode(served)
    assert decoded.delta <= LIMIT
    assert all(written(decoded.caches))
    for ours, theirs in zip(decoded.hidden, unrolled.hidden, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for layer in range(served.model.layers):
        cache = unrolled.caches[serve(name).index_map[f"layer.{layer}"]]
        pool = decoded.caches[served.index_map[f"layer.{layer}"]]
        layers = layers_of(served, layer)
        pages = pool.pages(len(layers))
        first = layers.index(layer) * pages
        for one, other in zip(jax.tree.leaves(pool.cache), jax.tree.leaves(cache), strict=True):
            np.testing.assert_array_equal(one[first : first + pages], other)


def layers_of(served: Served, layer: int) -> list[int]:
    """All layers of a layer's pool."""
    index_map = served.index_map
    every = range(served.model.layers)
    return [i for i in every if index_map[f"layer.{i}"] == index_map[f"layer.{layer}"]]


@pytest.mark.parametrize("name", scanned("gemma3-scanned", "qwen3-next-scanned"))
def test_the_runner_may_keep_its_pools_in_any_order(serve: Serve, name: str) -> None:
    assert decode_permuted(serve(name, "pool"))[0].delta <= LIMIT


@pytest.mark.parametrize("name", SCANNED)
def test_there_is_a_pool_for_each_kind_and_not_a_byte_more(serve: Serve, name: str) -> None:
    pools, caches = serve(name, "pool").caches(), serve(name).caches()
    assert all(isinstance(pool, Pool) for pool in pools)
    assert len(pools) < len(caches) or name in ("gemma4-31b", "llama4-scanned")  # one block
    assert sum(a.nbytes for a in jax.tree.leaves(pools)) == (
        sum(a.nbytes for a in jax.tree.leaves(caches))
    )


@pytest.mark.parametrize("name", scanned("qwen3-scanned", "gpt-oss-scanned", "qwen3-next-scanned"))
def test_the_program_does_not_grow_with_depth_and_copies_no_cache(
    stand_ins: None, name: str
) -> None:
    sizes, temporaries = [], []
    for layers in DEPTHS:
        served = Served(deep(MODELS[name], layers))
        caches = jax.tree.leaves(served.caches())
        program = lowered(served)
        sizes.append(len(program.as_text()))
        compiled = program.compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == sum(cache.nbytes for cache in caches)  # donated
        assert copied_bytes(compiled, caches) == 0
        temporaries.append(memory.temp_size_in_bytes)
    assert max(sizes) <= 1.15 * min(sizes)
    assert max(temporaries) <= 1.15 * min(temporaries)


@pytest.mark.parametrize("name", ["qwen3-scanned", "llama-scanned-first", "olmo3-scanned"])
def test_weights_are_neither_moved_nor_cut_up_outside_the_scan(serve: Serve, name: str) -> None:
    served = serve(name, "pool")
    leaves = served.interface.state_leaves
    traced = jax.make_jaxpr(
        lambda caches, weights: served.step(caches, BATCH, state_leaves=weights)
    )(served.caches(), leaves)
    inside = traced.jaxpr
    while not (scans := [e for e in inside.eqns if e.primitive.name == "scan"]):
        (call,) = (e for e in inside.eqns if e.primitive.name in ("pjit", "jit"))
        inside = call.params["jaxpr"].jaxpr
    weights = [each for each in inside.invars if each.aval.ndim > 2]
    used = [each for each in scans[0].invars if each in weights]
    assert len(scans) == 1
    assert len(used) > 5
    touched = [
        e for e in inside.eqns if e is not scans[0] and set(map(id, e.invars)) & set(map(id, used))
    ]
    assert touched == []


def test_layers_of_one_place_may_be_of_several_groups(serve: Serve) -> None:
    pool, unrolled = serve("qwen3-scanned", "pool"), serve("qwen3-scanned")
    one = pool.metadata(BATCH)
    other = dataclasses.replace(one, block_tables=one.block_tables + REQUESTS * PAGES)
    metadata = {f"layer.{i}": (one, other)[i in (1, 2)] for i in range(4)}
    ours, theirs = (
        served.step(served.caches(), BATCH, metadata=metadata)[1] for served in (pool, unrolled)
    )
    np.testing.assert_array_equal(ours, theirs)


class TestSharded:
    """On a mesh of two devices."""

    @pytest.mark.parametrize("name", ["qwen3-scanned", "gemma3-scanned"])
    def test_heads(self, stand_ins: None, name: str) -> None:
        served = Served(MODELS[name], devices=2)
        pool = served.caches()[0]
        assert pool.cache.sharding.shard_shape(pool.cache.shape)[2] == pool.cache.shape[2] // 2
        decoded = decode(served)
        assert decoded.delta <= LIMIT
        assert decoded.caches[0].cache.sharding == pool.cache.sharding

    @pytest.mark.parametrize("name", ["qwen3-scanned", "gemma3-scanned"])
    def test_pages_of_data_parallel_ranks(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """Each rank has requests and block numbers of its own, as tpu-inference gives them."""
        from tpu_inference.layers.common import attention_interface

        alone = serve(name, "pool")
        expected, held = [], []
        for request, tokens in enumerate(PROMPTS):
            caches, hidden, *_ = alone.step(alone.caches(), [(request, range(tokens))])
            expected.append(np.asarray(hidden)[:tokens])
            held.append(caches)
        monkeypatch.setattr(attention_interface, "sharded_ragged_paged_attention", by_rank)
        served = Served(MODELS[name], devices=2, axis="data")
        pools = served.caches()
        assert [pool.shards for pool in pools] == [2] * len(pools)
        metadata = [served.metadata([(r, range(tokens))]) for r, tokens in enumerate(PROMPTS)]
        both = jax.tree.map(lambda *each: jnp.concatenate(each), *metadata)
        both.padded_num_reqs = 2 * REQUESTS
        ids = [token for r, n in enumerate(PROMPTS) for token in padded(r, n)]
        caches, hidden, *_ = served.interface.model_fn(
            served.interface.state_leaves,
            pools,
            jnp.array(ids, jnp.int32),
            both,
            None,
            both.input_positions,
            tuple(served.index_map.items()),
            *[None, None, True, True],
            shared_attention_metadata=None,
        )
        for rank, (tokens, theirs) in enumerate(zip(PROMPTS, expected, strict=True)):
            ours = np.asarray(hidden)[rank * TOKENS : rank * TOKENS + tokens]
            np.testing.assert_allclose(ours, theirs, atol=LIMIT)
        for place, pool in enumerate(caches):
            assert pool.cache.sharding == served.caches()[place].cache.sharding
            shards = np.split(np.asarray(pool.cache), 2)
            parts = list(served.index_map.values()).count(place)
            pages = pool.pages(parts)
            for part in range(parts):
                for rank, shard in enumerate(shards):
                    mine = shard[part * pages : (part + 1) * pages]
                    theirs = held[rank][place]
                    first = part * theirs.pages(parts)
                    one = np.asarray(theirs.cache)[first : first + pages]
                    np.testing.assert_allclose(mine, one, atol=LIMIT)


def padded(request: int, tokens: int) -> list[int]:
    return [token(request, p) for p in range(tokens)] + [0] * (TOKENS - tokens)


def by_rank(mesh: Any, *args: Any, **kwargs: Any) -> Any:
    """The stand-in as the real function runs: each rank on its tokens and its pages."""
    from jax.sharding import PartitionSpec
    from tpu_inference.layers.common.sharding import ShardingAxisName

    arrays, rest = args[:8], args[8:]
    spec = PartitionSpec(ShardingAxisName.ATTN_DATA)
    return jax.shard_map(
        lambda *each: kernels.ragged_paged_attention(None, *each, *rest, **kwargs),
        mesh=mesh,
        in_specs=(spec,) * len(arrays),
        out_specs=(spec, spec),
        check_vma=False,
    )(*arrays)


class TestOthers:
    """What else the runner has to do with its caches."""

    def test_a_draft_s_cache_stays_as_it_is(self, stand_ins: None) -> None:
        served = Served(MODELS["qwen3-scanned"], draft=True)
        _, draft = served.caches()
        assert [served.index_map[name] for name in ("layer.3", "draft_layer.0")] == [0, 1]
        assert isinstance(draft, jax.Array)
        decoded = decode(served)
        assert decoded.delta <= LIMIT
        assert written(decoded.caches) == [True, False]

    def test_a_draft_that_reads_a_layer_s_cache_is_refused(self, stand_ins: None) -> None:
        served = Served(MODELS["qwen3-scanned"])
        served.manager.shared_kv_cache_layers["draft_layer.0"] = "layer.3"
        with pytest.raises(ConfigError, match=r"SCAN=pool: draft_layer\.0 addresses the KV"):
            served.allocate()
        served.manager.shared_kv_cache_layers.clear()
        served.allocate()
        assert decode(served).delta <= LIMIT

    def test_a_connector_is_refused_by_name(self, stand_ins: None) -> None:
        from vllm.config import KVTransferConfig

        served = Served(MODELS["qwen3-scanned"])
        settings = served.manager.runner.vllm_config
        settings.kv_transfer_config = KVTransferConfig(
            kv_connector="TPUConnector",
            kv_connector_module_path="tpu_inference.distributed.tpu_connector",
            kv_role="kv_both",
        )
        with pytest.raises(ConfigError, match=r"SCAN=pool: the KV connector TPUConnector addr"):
            served.allocate()
        settings.kv_transfer_config = None
        served.allocate()
        assert decode(served).delta <= LIMIT

    def test_disaggregated_serving_is_refused_by_name(
        self, stand_ins: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        served = Served(MODELS["qwen3-scanned"])
        monkeypatch.setenv("PREFILL_SLICES", "1x1")
        with pytest.raises(ConfigError, match=r"SCAN=pool: disaggregated serving \(PREFILL_SLICE"):
            served.allocate()

    def test_caches_of_another_size_in_the_same_process(self, stand_ins: None) -> None:
        """tpu-inference knows step functions again by their caches' shardings alone."""
        served = Served(MODELS["qwen3-scanned"])
        assert decode(served).delta <= LIMIT
        had = served.caches()[0].cache.shape
        served.manager.runner.cache_config.num_gpu_blocks_override = 40
        served.allocate()
        assert served.caches()[0].cache.shape != had
        assert decode(served).delta <= LIMIT

    @pytest.mark.parametrize("name", scanned("olmo3-scanned", "qwen3.5-scanned"))
    def test_what_maxtext_does_not_scan_is_not_passed_over(
        self, stand_ins: None, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        served = Served(deep(MODELS[name], 10))
        assert "in whole blocks of 4, not 10 layers" in caplog.text
        with pytest.raises(LayerPlanError):
            decode(served)

    @pytest.mark.parametrize(
        ("name", "why"),
        [("qwen3", r"not scanned \(scan_layers: false\)"), ("gemma4-e2b", "not scanned")],
    )
    def test_what_is_not_scanned_stays_as_it_is(
        self, stand_ins: None, caplog: pytest.LogCaptureFixture, name: str, why: str
    ) -> None:
        served = Served(MODELS[name])
        (said,) = [r.getMessage() for r in caplog.records if config.SCAN in r.getMessage()]
        assert re.search(f"KV caches stay as they are: its layers are {why}", said)
        assert decode(served).delta <= LIMIT

    def test_a_maxtext_that_is_not_patched_gets_no_pools(
        self,
        stand_ins: None,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """With KVCACHED_PATCH=auto one of the two libraries may be left as it is."""
        with monkeypatch.context() as patch:
            patch.setattr(maxtext_pools, "armed", lambda: ())
            served = Served(MODELS["qwen3-scanned"])
        assert all(isinstance(cache, jax.Array) for cache in served.caches())
        assert "KV caches stay as they are: MaxText is not patched" in caplog.text
        with stock():
            decode(served)

    def test_the_log_names_the_pools(
        self, stand_ins: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "vllm.kvcached_patch")
        Served(MODELS["olmo3-scanned"])
        (said,) = [r.getMessage() for r in caplog.records if config.SCAN in r.getMessage()]
        assert said.endswith("8 KV caches in 4 pools of layers [0, 4], [1, 5], [2, 6], [3, 7]")
