"""Caches of single model families, shaped by their own backends, looked up block by block."""

from __future__ import annotations

from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flash_attn_diffkv import FlashAttentionDiffKVBackend
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec

from tests.bare import ONE_BACKING, VERSION, Stage
from tests.blocks import binding_of, check_blocks, register, use_backend
from tests.matrix.test_allocation import KINDS, name, report_of, uniform
from tests.matrix.test_extents_real import LATENT, MODEST, bound, of_spec

STATES = "tokens_per_state"


def has(spec: Any, name_of_field: str) -> bool:
    return name_of_field in {field.name for field in fields(spec)}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.driven("latents of several compressions (DeepSeek V4)")
def test_deepseek_v4_latents_of_several_compressions(kind: str) -> None:
    """Full layers of two page sizes, windows of a third, in several groups of mixed sizes."""
    compression = "compress_ratio" if has(MLAAttentionSpec, "compress_ratio") else STATES
    latent = LATENT | {"head_size": 512, "block_size": 256}
    specs: dict[str, Any] = {}
    for i in range(4):
        specs[name(i)] = MLAAttentionSpec(**latent | {compression: 4 if i % 2 else 128})
        specs[f"{name(i)}.window"] = kv_cache_interface.SlidingWindowMLASpec(
            **latent | {"block_size": 64, "sliding_window": 128}
        )
    stage = Stage()
    register(stage, specs, TritonMLABackend)
    runner = bound(stage, kind, nbytes=4 << 20, layout="BLNHC")
    assert len(runner.kv_cache_config.kv_cache_groups) > 1
    # Packed from 0.24; before, tensors of their own for each page size.
    assert len(binding_of(runner).memories) == (4 if VERSION.release < (0, 24) else 1)
    check_blocks(runner)


@pytest.mark.driven("values of another size than keys")
def test_values_of_another_size_than_keys(kind: str) -> None:
    spec = FullAttentionSpec(**MODEST | {"head_size": 96, "head_size_v": 64})
    FlashAttentionDiffKVBackend.set_head_size_v(64)
    check_blocks(bound(of_spec(spec, FlashAttentionDiffKVBackend), kind))


def test_whispers_cross_attention_beside_rocms_keys_first(kind: str) -> None:
    """Layers that overlay one another, but do not agree on where a block is, up to 0.28.

    V1 lays them page by page from 0.26; where vLLM does not, nothing is given back.
    """
    lays_by_page = kind == "V1" and VERSION.release >= (0, 26)
    if kind == "V2" and (0, 26) <= VERSION.release < (0, 29):
        pytest.skip("the V2 runner takes heads for keys and values there")
    stage = Stage()
    own = {name(i): FullAttentionSpec(**MODEST) for i in range(3)}
    cross = {f"{name(i)}.cross": kv_cache_interface.CrossAttentionSpec(**MODEST) for i in range(3)}
    register(stage, own, RocmAttentionBackend)
    register(stage, cross, FlashAttentionBackend)
    runner = bound(stage, kind)
    if ONE_BACKING or lays_by_page:
        check_blocks(runner, keys_first=() if ONE_BACKING else own)
    else:
        assert not binding_of(runner).cells


@pytest.mark.driven("full attention, speculation by a draft model")
def test_a_draft_models_layers_beside_the_models(kind: str) -> None:
    """They have heads and pages of their own; vLLM plans and binds them with the model's."""
    stage = Stage()
    register(stage, {name(i): FullAttentionSpec(**MODEST) for i in range(4)}, FlashAttentionBackend)
    smaller = FullAttentionSpec(**MODEST | {"num_kv_heads": 1})
    register(stage, {f"draft_{name(i)}": smaller for i in range(3)}, FlashAttentionBackend)
    runner = bound(stage, kind)
    assert report_of(runner)["pools"] == 4 + 3
    check_blocks(runner)


@pytest.mark.driven("layers that share caches, speculation by n-grams")
def test_speculation_by_n_grams_has_no_caches_of_its_own(kind: str) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    plain, stage = uniform(), uniform(speculative_config=ngram)
    assert stage.config.speculative_config.method == "ngram"
    use_backend(plain, FlashAttentionBackend)
    use_backend(stage, FlashAttentionBackend)
    one, other = bound(plain, kind), bound(stage, kind)
    assert report_of(other)["aliased"] == report_of(one)["aliased"] == 2
    assert binding_of(other).cells == binding_of(one).cells
    check_blocks(other)


def test_layers_that_keep_another_dtype(kind: str) -> None:
    """As ``kv_cache_dtype_skip_layers`` has it: some layers fp8, some not."""
    stage = Stage()
    kept, packed = FullAttentionSpec(**MODEST), FullAttentionSpec(**MODEST | {"dtype": torch.uint8})
    specs = {name(i): packed if i % 2 else kept for i in range(4)}
    register(stage, specs, FlashAttentionBackend)
    runner = bound(stage, kind)
    assert {cache.dtype for cache in runner.bound.values()} == {torch.float16, torch.uint8}
    check_blocks(runner)


@pytest.mark.driven("Mamba alone")
def test_mamba_alone(kind: str) -> None:
    spec = MambaSpec(
        block_size=16, shapes=((4, 8), (2, 16, 4)), dtypes=(torch.float32, torch.float16)
    )
    check_blocks(bound(of_spec(spec, Mamba2AttentionBackend), kind, nbytes=64 << 10))


@pytest.mark.driven("TurboQuant")
def test_turboquant(kind: str) -> None:
    """Slots of packed keys and values, a byte count that no head size gives."""
    if kind == "V1" and VERSION.release[:2] == (0, 26):
        pytest.skip("vLLM 0.26's V1 runner asks TurboQuant for the shape of dtype auto, and fails")
    dtype = "turboquant_4bit_nc"
    mode = kv_cache_interface.get_kv_quant_mode(dtype)
    common = MODEST | {"dtype": torch.int8, "kv_quant_mode": mode}
    if "TQFullAttentionSpec" in vars(kv_cache_interface):
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig

        slot = TurboQuantConfig.from_cache_dtype(dtype, MODEST["head_size"]).slot_size_aligned
        spec = kv_cache_interface.TQFullAttentionSpec(**common | {"tq_slot_size": slot})
    else:
        spec = FullAttentionSpec(**common)
    stage = of_spec(spec, TurboQuantAttentionBackend)
    stage.config.cache_config.cache_dtype = dtype
    check_blocks(bound(stage, kind, nbytes=256 << 10))


@pytest.mark.skipif(not has(FullAttentionSpec, STATES), reason="one state per token")
def test_whispers_several_states_per_token(kind: str) -> None:
    spec = FullAttentionSpec(**MODEST | {STATES: Fraction(1, 4)})
    assert spec.page_size_bytes == 4 * FullAttentionSpec(**MODEST).page_size_bytes
    check_blocks(bound(of_spec(spec, FlashAttentionBackend), kind, nbytes=2 << 20))


ALIGNMENT = "block_stride_alignment"


@pytest.mark.skipif(not has(FullAttentionSpec, ALIGNMENT), reason="blocks are a page apart")
@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
def test_blocks_further_apart_than_a_page(kind: str, layout: str) -> None:
    spec = FullAttentionSpec(**MODEST | {ALIGNMENT: 12288})
    runner = bound(of_spec(spec, FlashAttentionBackend), kind, layout=layout)
    assert spec.page_size_bytes % 12288
    if layout == "BLNHC" or VERSION.release >= (0, 32):
        assert {cell.stride % 12288 for cell in binding_of(runner).cells} == {0}
    check_blocks(runner)
