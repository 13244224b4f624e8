"""Each block's bytes, written through vLLM's own views and looked up in the pool's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends import utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from tests.bare import ONE_BACKING, VERSION, Stage, bind
from tests.blocks import binding_of, check_blocks, register, use_backend
from tests.matrix.test_allocation import KINDS, hybrid, name, report_of, uniform

NBYTES = 1 << 20
LAYOUTS = ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]
before_0_29 = pytest.mark.skipif(ONE_BACKING, reason="vLLM >= 0.29: every view is blocks first")
from_0_29 = pytest.mark.skipif(not ONE_BACKING, reason="vLLM < 0.29: NHD and HND only")

MODEST = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float16}
LATENT = MODEST | {"num_kv_heads": 1, "head_size": 576}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def bound(stage: Stage, kind: str, *, nbytes: int = NBYTES, layout: str = "LBNHC") -> Any:
    """A runner of this kind that has bound the stage's layers, as vLLM plans them."""
    runner = stage.runner(kind)
    bind(runner, stage.plan(runner.get_kv_cache_spec(), nbytes, layout))
    return runner


def of_spec(spec: Any, backend: Any, layers: int = 3) -> Stage:
    stage = Stage()
    register(stage, {name(i): spec for i in range(layers)}, backend)
    return stage


@contextmanager
def kv_cache_layout(layout: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`VLLM_KV_CACHE_LAYOUT` of vLLM <= 0.28, without the layout that its CPU backend asked for."""
    asked = utils._KV_CACHE_LAYOUT_OVERRIDE
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
        utils.set_kv_cache_layout(None)
        yield
    utils.set_kv_cache_layout(asked)


@pytest.mark.driven(
    "layers that share caches, head sizes by kind", "head sizes by kind, keys used as values"
)
@pytest.mark.parametrize("shape", [uniform, hybrid])
def test_attention_layers(kind: str, shape: Any) -> None:
    check_blocks(bound(shape(), kind))


@pytest.mark.driven("keys before blocks (ROCm up to 0.28)")
@before_0_29
@pytest.mark.parametrize("shape", [uniform, hybrid])
def test_keys_before_blocks_are_two_lanes(kind: str, shape: Any) -> None:
    """The layout of <= 0.22 everywhere and of ROCm's <= 0.28."""
    stage = shape()
    use_backend(stage, RocmAttentionBackend)
    runner = bound(stage, kind)
    cells = binding_of(runner).cells
    assert len(cells) == 2 * len(binding_of(runner).memories)
    assert {runner.bound[layer].shape[0] for layer in runner.bound} == {2}
    check_blocks(runner, keys_first=runner.bound)


@pytest.mark.driven("layouts NHD and HND")
@before_0_29
def test_kvcached_205_shape_and_stride_order_are_the_backends(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strides = set()
    for layout in ("NHD", "HND"):
        stage = uniform()
        use_backend(stage, FlashAttentionBackend)
        with kv_cache_layout(layout, monkeypatch):
            runner = bound(stage, kind)
        strides.add(runner.bound[name(0)].stride())
        check_blocks(runner)
    assert len(strides) == 2


@pytest.mark.driven("layouts LBNHC, LBHNC, LHBNC, BLNHC, BLHNC, BHLNC")
@from_0_29
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kvcached_205_every_layout_of_the_whole_backing(kind: str, layout: str) -> None:
    runner = bound(uniform(), kind, layout=layout)
    heads, layers = 2, 4
    regions = {"LBNHC": layers, "LBHNC": layers, "LHBNC": layers * heads}
    assert len(binding_of(runner).cells) == regions.get(layout, 1)
    check_blocks(runner)


@from_0_29
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC"])
def test_layouts_of_hybrids(kind: str, layout: str) -> None:
    """Sizes mixed inside a group; without sharing layers, which vLLM has no spec for there."""
    stage = Stage()
    for i in range(6):
        stage.attention(name(i), heads=1 + i // 4, head_size=32, window=64 if i < 4 else None)
    runner = bound(stage, kind, layout=layout)
    assert len(runner.kv_cache_config.kv_cache_groups) > 1
    check_blocks(runner)


@pytest.mark.driven("kernel block smaller than the manager's")
def test_kvcached_330_kernel_block_smaller_than_the_managers(kind: str) -> None:
    """FlashMLA's kernels take blocks of 64 tokens, the manager's here have 256."""
    spec = MLAAttentionSpec(**LATENT | {"block_size": 256})
    runner = bound(of_spec(spec, FlashMLABackend, layers=2), kind, nbytes=8 << 20)
    binding = binding_of(runner)
    assert {len(view) for view in runner.bound.values()} == {4 * binding.num_blocks}
    check_blocks(runner)


def test_kvcached_367_block_larger_than_a_page(kind: str) -> None:
    stage = Stage()
    for i in range(2):
        stage.attention(name(i), heads=4, head_size=256)
    runner = bound(stage, kind, nbytes=4 << 20)
    binding = binding_of(runner)
    assert min(cell.stride for cell in binding.cells) > binding.page_bytes
    assert report_of(runner)["min_slab_blocks"] == 1
    check_blocks(runner)


@pytest.mark.driven("padded blocks")
@pytest.mark.skipif(VERSION.release < (0, 24), reason="vLLM < 0.24 refuses such layers")
def test_kvcached_399_padded_page_size(kind: str) -> None:
    """Page sizes that do not divide one another, as Gemma 4 12B's: vLLM pads the smaller."""
    stage = Stage()
    small = kv_cache_interface.SlidingWindowSpec(**MODEST | {"sliding_window": 64})
    large = FullAttentionSpec(**MODEST | {"head_size": 80})
    register(stage, {name(i): small for i in range(3)}, FlashAttentionBackend)
    register(stage, {name(i): large for i in range(3, 6)}, FlashAttentionBackend)
    runner = bound(stage, kind)
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    assert large.page_size_bytes in {spec.page_size_padded for spec in specs}
    check_blocks(runner)


def test_kvcached_426_padded_page_of_one_group(kind: str) -> None:
    spec = MLAAttentionSpec(**LATENT | {"page_size_padded": 20480})
    runner = bound(of_spec(spec, TritonMLABackend), kind)
    assert {view.stride(0) for view in runner.bound.values()} == {10240}
    check_blocks(runner)


@pytest.mark.driven("fp8 with scales per token and head")
def test_kvcached_424_fp8_scales_inside_the_raw_storage(kind: str) -> None:
    """Scales that the backend carves out of the raw storage are in their block's extent."""
    stage = Stage()
    stage.config.cache_config.cache_dtype = "fp8_per_token_head"
    mode = kv_cache_interface.KVQuantMode.FP8_PER_TOKEN_HEAD
    spec = FullAttentionSpec(**MODEST | {"dtype": torch.uint8, "kv_quant_mode": mode})
    register(stage, {name(i): spec for i in range(3)}, TritonAttentionBackend)
    runner = bound(stage, kind, nbytes=512 << 10)
    binding = binding_of(runner)
    (memory, *_), cell = binding.memories, binding.cells[0]
    raw = memory.tensor.view(torch.uint8)

    implementation = object.__new__(TritonAttentionImpl)
    implementation._ensure_scale_caches(runner.bound[name(0)])
    scales = implementation._k_scale_cache, implementation._v_scale_cache
    raw.zero_()
    for scale in scales:
        for block in range(binding.num_blocks):
            scale[block].fill_(1.0)
            (at,) = raw.nonzero(as_tuple=True)
            assert set((at // cell.stride).tolist()) == {block}
            raw.zero_()
    check_blocks(runner)


SPECS = {
    "SlidingWindowSpec": MODEST | {"sliding_window": 64},
    "ChunkedLocalAttentionSpec": MODEST | {"attention_chunk_size": 32},
    "CrossAttentionSpec": MODEST,
    "SinkFullAttentionSpec": MODEST | {"sink_len": 4},
    "RSWASpec": MODEST | {"rswa_window": 64},
    "CircularBufferSpec": MODEST,
    "MLAAttentionSpec": LATENT,
    "SlidingWindowMLASpec": LATENT | {"sliding_window": 64},
    "HiddenStateCacheSpec": LATENT,
}

DRIVEN = {
    "SlidingWindowSpec": "sliding window",
    "ChunkedLocalAttentionSpec": "chunked local and full attention",
    "CrossAttentionSpec": "self and cross attention (encoder and decoder)",
    "SinkFullAttentionSpec": "full attention with sinks",
    "RSWASpec": "RSWA",
    "CircularBufferSpec": "circular buffers",
    "MLAAttentionSpec": "latent attention (MLA)",
    "SlidingWindowMLASpec": "latent attention with a sliding window",
    "HiddenStateCacheSpec": "caches of hidden states",
}


@pytest.mark.parametrize(
    "name_of_spec", [pytest.param(each, marks=pytest.mark.driven(DRIVEN[each])) for each in SPECS]
)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside full attention"])
def test_specs(kind: str, name_of_spec: str, beside: bool) -> None:
    arguments = SPECS[name_of_spec]
    if name_of_spec not in vars(kv_cache_interface):
        pytest.skip(f"vLLM {VERSION} has no {name_of_spec}")
    backend = TritonMLABackend if arguments["num_kv_heads"] == 1 else FlashAttentionBackend
    stage = of_spec(vars(kv_cache_interface)[name_of_spec](**arguments), backend)
    if beside:
        full = MLAAttentionSpec if backend is TritonMLABackend else FullAttentionSpec
        plain = full(**LATENT if backend is TritonMLABackend else MODEST)
        register(stage, {name(i): plain for i in range(3, 6)}, backend)
    check_blocks(bound(stage, kind))


@pytest.mark.driven("layers of different sizes in one group")
def test_layers_of_different_sizes_in_one_group(kind: str) -> None:
    stage = Stage()
    for i, heads in enumerate((1, 2, 4)):
        stage.attention(name(i), heads=heads)
    layout = "BLNHC" if ONE_BACKING else ""
    runner = bound(stage, kind, nbytes=2 << 20, layout=layout)
    (group,) = runner.kv_cache_config.kv_cache_groups
    assert isinstance(group.kv_cache_spec, kv_cache_interface.UniformTypeKVCacheSpecs)
    check_blocks(runner)


@pytest.mark.driven(
    "attention and Mamba in every layer",
    "attention and Mamba layers",
    "attention and gated delta-net layers",
)
@pytest.mark.parametrize("backend", [FlashAttentionBackend, RocmAttentionBackend])
def test_hybrid_with_mamba(kind: str, backend: Any) -> None:
    """Attention and Mamba overlay the same pages: a block's states are where its tokens are."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend

    stage = Stage()
    full = FullAttentionSpec(**MODEST)
    mamba = MambaSpec(
        block_size=16,
        shapes=((4, 8), (2, 16, 4)),
        dtypes=(torch.float32, torch.float16),
        page_size_padded=full.page_size_bytes,
    )
    register(stage, {name(i): full for i in range(3)}, backend)
    mambas = {f"model.layers.{i}.mamba": mamba for i in range(3, 6)}
    register(stage, mambas, Mamba2AttentionBackend)
    runner = bound(stage, kind)
    keys_first = not ONE_BACKING and backend is RocmAttentionBackend
    assert len(binding_of(runner).cells) == 3
    check_blocks(runner, keys_first=[name(i) for i in range(3)] if keys_first else ())


@pytest.mark.driven("packed: one block of all layers, then the next")
@pytest.mark.skipif(ONE_BACKING or VERSION.release < (0, 24), reason="vLLM 0.24-0.28 packs")
def test_packed_by_vllms_own_planning(kind: str) -> None:
    """`enable_cross_layers_blocks`: one block of all layers of a group, then the next."""
    from vllm.config import KVTransferConfig

    stage = hybrid()
    runner = stage.runner(kind)
    specs = runner.get_kv_cache_spec()
    stage.config.kv_transfer_config = KVTransferConfig(
        kv_connector_extra_config={"enable_cross_layers_blocks": "True"}
    )
    plan = stage.plan(specs, NBYTES)
    stage.config.kv_transfer_config = None
    assert all(tensor.block_stride for tensor in plan.kv_cache_tensors)
    bind(runner, plan)
    (cell,) = binding_of(runner).cells
    assert cell.stride == plan.kv_cache_tensors[0].block_stride
    check_blocks(runner)


class PrefersCrossLayerBlocks(ExampleConnector):
    """One of vLLM's own connectors, which asks for the cache that others ask for."""

    prefer_cross_layer_blocks = True


@pytest.mark.driven("one cache across layers, for KV connectors")
@before_0_29
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_cache_across_layers(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`allocate_uniform_kv_caches`, which only the V1 runner has."""
    connector = object.__new__(PrefersCrossLayerBlocks)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", connector)
    stage = uniform()
    use_backend(stage, FlashAttentionBackend)
    with kv_cache_layout(layout, monkeypatch):
        runner = bound(stage, "V1")
    report = report_of(runner)
    assert (report["ranges"], report["pools"], report["aliased"]) == (1, 4, 2)
    assert runner.bound[name(4)] is runner.bound[name(2)]
    (memory,) = binding_of(runner).memories
    assert runner.cross_layers_kv_cache.data_ptr() == memory.tensor.data_ptr()
    assert runner.cross_layers_kv_cache.nbytes == memory.tensor.nbytes
    check_blocks(runner)


@from_0_29
def test_blocks_that_cannot_be_told_apart_are_never_given_back(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Heads outside of blocks, in groups that overlay one another with other numbers of heads."""
    runner = bound(hybrid(), kind, layout="LHBNC")
    assert not binding_of(runner).cells
    assert report_of(runner)["min_slab_blocks"] == 0
    warnings = [r.getMessage() for r in caplog.records if "stays committed" in r.getMessage()]
    assert len(warnings) == 1
    assert "blocks overlap other blocks" in warnings[0]
