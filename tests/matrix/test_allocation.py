"""Allocation through the patched entry points, on vLLM's own runners, layers and planning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu import attn_utils

from kvcached_patch.core.layers import plan_layers
from kvcached_patch.engines import vllm_worker
from kvcached_patch.errors import LayerPlanError, SeamMismatch
from kvcached_patch.seams.apply import armed
from tests.bare import (
    ONE_BACKING,
    Stage,
    bind,
    geometry,
    stock,
    stored_names,
    tensors,
    worker_of,
)
from tests.blocks import binding_of

KINDS = ["V1", "V2"]


def name(i: int) -> str:
    return f"model.layers.{i}.self_attn.attn"


def uniform(**engine: Any) -> Stage:
    """Four full-attention layers in one group, two layers sharing with the last two."""
    stage = Stage(**engine)
    for i in range(4):
        stage.attention(name(i))
    stage.attention(name(4), shares=name(2))
    stage.attention(name(5), shares=name(3))
    return stage


def hybrid() -> Stage:
    """Sliding and full layers with other head counts and sizes, sharing in both kinds."""
    stage = Stage()
    for i in range(4):
        stage.attention(name(i), heads=4, head_size=32, window=64)
    for i in range(4, 6):
        stage.attention(name(i), heads=1, head_size=64)
    stage.attention(name(6), heads=4, head_size=32, window=64, shares=name(3))
    stage.attention(name(7), heads=1, head_size=64, shares=name(5))
    return stage


SHAPES = {"uniform": uniform, "hybrid": hybrid}
SHARING = {
    "uniform": {name(4): name(2), name(5): name(3)},
    "hybrid": {name(6): name(3), name(7): name(5)},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def first_pass(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the patched entry points returned, before vLLM's own aliasing pass."""
    seen: list[dict[str, Any]] = []

    def record(owner: Any, attribute: str) -> None:
        patched = getattr(owner, attribute)

        def call(*args: Any, **kwargs: Any) -> Any:
            caches = patched(*args, **kwargs)
            seen.append(dict(caches))
            return caches

        monkeypatch.setattr(owner, attribute, call)

    if ONE_BACKING:
        record(gpu_model_runner, "allocate_kv_cache")
        record(attn_utils, "allocate_kv_cache")
    else:
        record(gpu_model_runner.GPUModelRunner, "_reshape_kv_cache_tensors")
        record(attn_utils, "_reshape_kv_cache")
    return seen


def report_of(runner: Any) -> dict[str, Any]:
    report = vllm_worker.report(worker_of(runner))
    assert report is not None
    return report


def test_owner_only_pool_count(kind: str, shape: str) -> None:
    stage = SHAPES[shape]()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    scheduler_group_size = max(len(group.layer_names) for group in plan.kv_cache_groups)

    bind(runner, plan)

    raw = sum(len(group.layer_names) for group in runner.kv_cache_config.kv_cache_groups)
    planned = sum(len(group.layer_names) for group in plan.kv_cache_groups)
    assert raw == planned + 2, "vLLM appended the two sharing layers on the worker's side"
    assert report_of(runner)["pools"] == scheduler_group_size
    assert report_of(runner)["aliased"] == 2


def test_kvcached_417_unfiltered_layers_raise_the_historical_key_error(shape: str) -> None:
    """Shaping or binding every name in `layer_names`, as kvcached did."""
    stage = SHAPES[shape]()
    runner = stage.runner("V1")
    plan = stage.plan(runner.get_kv_cache_spec())
    bind(runner, plan)
    assert report_of(runner)["aliased"] == 2, "with the filter the same layers are served"

    sharing = "|".join(SHARING[shape])
    stored = {layer: torch.empty(0) for names in stored_names(plan) for layer in names}
    groups = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
    with pytest.raises(KeyError, match=sharing):
        [stored[layer] for group in groups for layer in group]
    with pytest.raises(LayerPlanError, match=sharing):
        plan_layers(groups, [stored])
    if not ONE_BACKING:
        runner.runner_only_attn_layers.clear()
        raw = {
            t.shared_by[i]: torch.zeros(t.size, dtype=torch.int8)
            for t in plan.kv_cache_tensors
            for i in range(len(t.shared_by))
        }
        sizes = [group.kv_cache_spec.block_size for group in plan.kv_cache_groups]
        with pytest.raises(KeyError, match=sharing):
            runner._reshape_kv_cache_tensors(raw, sizes)


def test_sharing_layer_is_its_targets_object(
    kind: str, shape: str, first_pass: list[dict[str, Any]]
) -> None:
    stage = SHAPES[shape]()
    runner = stage.runner(kind)
    bound = bind(runner, stage.plan(runner.get_kv_cache_spec()))

    (first,) = first_pass
    for layer, target in SHARING[shape].items():
        assert first[layer] is first[target]
        assert stage.layers[layer].kv_cache is not None
        assert stage.layers[layer].kv_cache.data_ptr() == stage.layers[target].kv_cache.data_ptr()
    assert bound.keys() == first.keys()
    assert all(bound[layer] is first[layer] for layer in bound), "vLLM's second pass changed it"


def test_kvcached_494_v1_and_v2_runners_are_both_served(shape: str) -> None:
    """Each by its own functions of the release, which must all be in place."""
    applied = {entry.seam.id: entry.applied for entry in armed() if entry.seam.process == "worker"}
    assert all(applied.values()), applied
    for kind in KINDS:
        stage = SHAPES[shape]()
        runner = stage.runner(kind)
        bind(runner, stage.plan(runner.get_kv_cache_spec()))
        assert report_of(runner)["runner"] == kind
        assert report_of(runner)["reserved_bytes"] > 0


def test_vllm_43185_v2_sharing_layers_are_aliased_in_their_targets_group(shape: str) -> None:
    stage = SHAPES[shape]()
    runner = stage.runner("V2")
    bind(runner, stage.plan(runner.get_kv_cache_spec()))
    groups = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
    with_metadata = [[n for g in groups for n in g.layer_names] for groups in runner.attn_groups]
    for layer, target in SHARING[shape].items():
        assert binding_of(runner).caches[layer] is binding_of(runner).caches[target]
        assert [layer in group for group in groups] == [target in group for group in groups]
        assert [layer in group for group in with_metadata] == [target in g for g in with_metadata]


def test_bytes_are_ours_and_exactly_what_vllm_asked_for(kind: str, shape: str) -> None:
    stage = SHAPES[shape]()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    bound = bind(runner, plan)

    ours = {m.tensor.data_ptr(): m.tensor.numel() for m in binding_of(runner).memories}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(bound)}
    assert held == ours
    assert set(held.values()) == {tensor.size for tensor in plan.kv_cache_tensors}
    assert len(ours) == (1 if ONE_BACKING else len(plan.kv_cache_tensors))


def test_views_are_stock_vllms(kind: str, shape: str) -> None:
    stage = SHAPES[shape]()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    patched = geometry(bind(runner, plan))
    with stock():
        unpatched = geometry(bind(runner, plan))
    assert patched == unpatched
    assert all(not tensor.any() for tensor in tensors(bind(runner, plan)))


def test_allocation_outside_the_gate_is_stock(kind: str) -> None:
    """Profiling runs allocate through the same functions; the gate alone makes it real."""
    stage = uniform()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    runner.initialize_kv_cache(plan)
    assert vllm_worker.report(worker_of(runner)) is None

    bind(runner, plan)
    real = {m.tensor.data_ptr() for m in binding_of(runner).memories}
    runner.initialize_kv_cache(plan)
    assert real.isdisjoint(t.untyped_storage().data_ptr() for t in tensors(runner.bound))


def test_encoder_only_layers_get_nothing() -> None:
    stage = Stage()
    stage.attention(name(0))
    stage.encoder_only("encoder.layers.0.attn")
    runner = stage.runner("V1")
    bound = bind(runner, stage.plan(runner.get_kv_cache_spec()))
    assert runner.runner_only_attn_layers == {"encoder.layers.0.attn"}
    assert set(bound) == {name(0)}
    assert report_of(runner)["pools"] == 1


def test_model_without_kv_cache_is_left_alone() -> None:
    stage = Stage()
    stage.encoder_only("encoder.layers.0.attn")
    runner = stage.runner("V1")
    bound = bind(runner, stage.plan(runner.get_kv_cache_spec()))
    report = report_of(runner)
    assert not bound
    assert (report["pool"], report["pools"], report["reserved_bytes"]) == ("none", 0, 0)


BAD_SHARING = {
    "no cache": ({name(4): "model.layers.9.attn"}, rf"{name(4)} -> model.layers.9.attn"),
    "chain": (
        {name(4): name(5), name(5): name(3)},
        rf"chain.*{name(4)} -> {name(5)} -> {name(3)}",
    ),
}


@pytest.mark.parametrize("case", BAD_SHARING)
def test_bad_sharing_is_refused_and_the_next_call_works(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing, message = BAD_SHARING[case]
    stage = uniform()
    runner = stage.runner("V1")
    plan = stage.plan(runner.get_kv_cache_spec())
    with monkeypatch.context() as patch:
        patch.setattr(runner, "shared_kv_cache_layers", sharing)
        patch.setattr(runner, "maybe_add_kv_sharing_layers_to_kv_cache_groups", lambda _: None)
        with pytest.raises(LayerPlanError, match=message):
            bind(runner, plan)
    assert vllm_worker._active is None
    bind(runner, plan)
    assert report_of(runner)["aliased"] == 2


def test_layer_without_storage_is_refused_and_the_next_call_works(kind: str) -> None:
    stage = uniform()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    broken = copy.deepcopy(plan)
    names = next(iter(stored_names(broken)))
    if ONE_BACKING:
        names.remove(name(3))
    else:
        broken.kv_cache_tensors = [t for t in broken.kv_cache_tensors if name(3) not in t.shared_by]
    with pytest.raises(LayerPlanError, match=rf"neither an owner .*{name(3)}"):
        bind(runner, broken)
    bind(runner, plan)
    assert report_of(runner)["pools"] == 4


def test_allocation_that_avoids_the_seams_is_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = uniform()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    with monkeypatch.context() as patch:
        patch.setattr(runner, "initialize_kv_cache", lambda *args, **kwargs: None)
        with pytest.raises(SeamMismatch, match=f"the {kind} runner .*without passing"):
            bind(runner, plan)
    bind(runner, plan)
    assert report_of(runner)["pools"] == 4


def test_each_binding_has_memory_of_its_own(kind: str) -> None:
    stage = uniform()
    runner = stage.runner(kind)
    plan = stage.plan(runner.get_kv_cache_spec())
    for tensor in tensors(bind(runner, plan)):
        tensor.fill_(7)
    assert all(not tensor.any() for tensor in tensors(bind(runner, plan)))
