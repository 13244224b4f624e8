"""Physical layouts: block-outermost backings, packed descriptors, Mamba state lists."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config

from tests.bare import CPU, ONE_BACKING, VERSION, Stage, bind, geometry, planned, stock, tensors
from tests.blocks import binding_of
from tests.matrix.test_allocation import KINDS, name, report_of, uniform

SHARING = {name(4): name(2), name(5): name(3)}
LAYOUTS = ["LBNHC", "LBHNC", "LHBNC", "BLNHC", "BLHNC", "BHLNC"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.skipif(not ONE_BACKING, reason="vLLM < 0.29 has no layout of the whole backing")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_and_block_outermost_layouts(kind: str, layout: str) -> None:
    stage = uniform()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec(), layout=layout)
    bound = bind(runner, plan)
    patched = geometry(bound)
    report = report_of(runner)
    assert (report["ranges"], report["pools"], report["aliased"]) == (1, 4, 2)
    assert all(bound[layer] is bound[target] for layer, target in SHARING.items())
    block, heads, layers = bound[name(0)][0], 2, 4
    between = {"LBNHC": 1, "LBHNC": 1, "LHBNC": 1 / heads}.get(layout, layers)
    assert bound[name(0)].stride(0) == block.numel() * between
    with stock():
        assert geometry(bind(runner, plan)) == patched


@pytest.mark.skipif(not ONE_BACKING, reason="vLLM < 0.29 has no layout of the whole backing")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_variable_chooses_among_all_there_are(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    stage = uniform()
    runner = stage.runner(kind)
    chosen = resolve_kv_cache_layout(stage.config, [LAYOUTS])
    assert chosen.name == layout
    assert {each.name for each in type(chosen)} == set(LAYOUTS)
    with set_current_vllm_config(stage.config):
        plan = planned(stage.config, runner.get_kv_cache_spec(), 4 << 20)
    bind(runner, plan)
    assert report_of(runner)["pools"] == 4


@pytest.mark.skipif(ONE_BACKING or VERSION.release < (0, 24), reason="vLLM 0.24-0.28 packs")
def test_packed_descriptors_share_one_range(kind: str) -> None:
    """vLLM 0.24-0.28 `block_stride > 0`: one block of all layers, then the next."""
    stage = uniform()
    runner = stage.runner(kind)
    plan = copy.deepcopy(stage.plan(runner.get_kv_cache_spec()))
    block_bytes = plan.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    plan.kv_cache_tensors = [
        replace(
            tensor,
            size=tensor.size * 4,
            offset=i * block_bytes,
            block_stride=4 * block_bytes,
        )
        for i, tensor in enumerate(plan.kv_cache_tensors)
    ]
    bound = bind(runner, plan)
    patched = geometry(bound)
    report = report_of(runner)
    assert (report["ranges"], report["pools"], report["aliased"]) == (1, 4, 2)
    assert all(bound[layer] is bound[target] for layer, target in SHARING.items())
    (memory,) = binding_of(runner).memories
    assert {t.untyped_storage().data_ptr() for t in tensors(bound)} == {memory.tensor.data_ptr()}
    assert {cache[0].data_ptr() - memory.tensor.data_ptr() for cache in bound.values()} == {
        i * block_bytes for i in range(4)
    }
    with stock():
        assert geometry(bind(runner, plan)) == patched


def mamba_specs() -> dict[str, Any]:
    from vllm.v1.kv_cache_interface import MambaSpec

    spec = MambaSpec(
        block_size=16,
        shapes=((4, 8), (2, 16, 4)),
        dtypes=(torch.float32, torch.float32),
        page_size_padded=None,
    )
    return {f"model.layers.{i}.mamba": spec for i in range(3)}


def test_mamba_states_are_aliased_as_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharing layer's Mamba cache is its target's very list (or page view), not a copy."""
    stage = Stage()
    specs = mamba_specs()
    sharing = {"model.layers.3.mamba": "model.layers.1.mamba"}
    runner = stage.runner("V1")
    runner.shared_kv_cache_layers = sharing
    runner.runner_only_attn_layers = set(sharing)
    plan = stage.plan(specs)

    def initialize_kv_cache(config: Any, **context: Any) -> None:
        runner.kv_cache_config = config = copy.deepcopy(config)
        runner.attn_groups = mamba_groups(config)
        runner.maybe_add_kv_sharing_layers_to_kv_cache_groups(config)
        runner.bound = allocate(runner, config)

    monkeypatch.setattr(runner, "initialize_kv_cache", initialize_kv_cache)
    bound = bind(runner, plan)
    assert bound["model.layers.3.mamba"] is bound["model.layers.1.mamba"]
    assert bound["model.layers.3.mamba"] is not bound["model.layers.0.mamba"]
    assert report_of(runner)["aliased"] == 1
    held = {t.untyped_storage().data_ptr() for t in tensors(bound)}
    assert held == {m.tensor.data_ptr() for m in binding_of(runner).memories}


def mamba_groups(config: Any) -> list[list[Any]]:
    """vLLM's attention groups for these layers, as `initialize_attn_backend` makes them."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionBackend
    from vllm.v1.worker.utils import AttentionGroup

    return [
        [AttentionGroup(Mamba2AttentionBackend, list(g.layer_names), g.kv_cache_spec, i)]
        for i, g in enumerate(config.kv_cache_groups)
    ]


def allocate(runner: Any, config: Any) -> dict[str, Any]:
    """The runner's own allocation calls, through the patched names it uses."""
    from vllm.v1.worker import gpu_model_runner

    sizes = [16] * len(config.kv_cache_groups)
    if ONE_BACKING:
        layout = runner.cache_config.get_resolved_kv_cache_layout()
        return gpu_model_runner.allocate_kv_cache(config, CPU, layout, sizes)
    return runner._reshape_kv_cache_tensors(runner._allocate_kv_cache_tensors(config), sizes)
