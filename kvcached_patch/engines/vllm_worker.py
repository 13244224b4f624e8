"""The seams of vLLM's worker: storage from our pools, sharing layers aliased."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from kvcached_patch import config
from kvcached_patch.core.pages import PLAN, Plan
from kvcached_patch.engines.arguments import named
from kvcached_patch.engines.binding import Binding, Report
from kvcached_patch.engines.vllm_sizing import keep_activations
from kvcached_patch.errors import SeamMismatch
from kvcached_patch.pool import ElasticPool
from kvcached_patch.seams.apply import armed, tally

logger = logging.getLogger("vllm.kvcached_patch")


# What a worker may take to answer before it is given up, as vLLM gives it up in a step.
TIMEOUT_SECONDS = 300.0

_active: Binding | None = None
# The attribute of a worker that holds its binding, which knows the runner: see `ELASTIC`.
BINDING = "kvcached_patch_binding"


def initialize_from_config(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Worker.initialize_from_config``, the gate: only what it allocates is the real cache.

    vLLM's profiling runs use the same allocation functions, but never from here. Where the cache
    must stay in place, vLLM allocates it as it came.
    """
    kv_cache_config = named(wrapped, args, kwargs)["kv_cache_config"]
    binding = Binding(worker)
    if binding.stock:
        result = wrapped(*args, **kwargs)
    else:
        result = _allocated(binding, kv_cache_config, partial(wrapped, *args, **kwargs))
    setattr(worker, BINDING, binding)
    _announce(binding.report())
    return result


def _allocated(binding: Binding, kv_cache_config: Any, call: Callable[[], Any]) -> Any:
    with _activated(binding):
        result = call()
    if kv_cache_config.kv_cache_tensors and not binding.memories:
        raise SeamMismatch(
            f"the {binding.runner_kind} runner ({type(binding.runner).__module__}) allocated its "
            "KV cache without passing an allocation seam; expected "
            f"{', '.join(e.seam.id for e in armed() if e.seam.process == 'worker')}. Set "
            f"{config.TOGGLE}=0 to run this configuration unpatched"
        )
    binding.measure(kv_cache_config.num_blocks)
    return result


def allocate_v1(
    wrapped: Callable[..., Any], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``GPUModelRunner._allocate_kv_cache_tensors`` of the V1 runner, up to 0.28."""
    call = partial(wrapped, *args, **kwargs)
    if _active is None:
        return call()
    kv_cache_config = named(wrapped, args, kwargs)["kv_cache_config"]
    return _active.allocate(
        kv_cache_config,
        stored=[tensor.shared_by for tensor in kv_cache_config.kv_cache_tensors],
        runner_only=runner.runner_only_attn_layers,
        sharing=runner.shared_kv_cache_layers,
        ranges=_ranges_by_descriptor(kv_cache_config),
        call=call,
    )


def allocate_v2(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``attn_utils._allocate_kv_cache`` of the V2 runner, up to 0.28."""
    call = partial(wrapped, *args, **kwargs)
    if _active is None:
        return call()
    arguments = named(wrapped, args, kwargs)
    kv_cache_config = arguments["kv_cache_config"]
    return _active.allocate(
        kv_cache_config,
        stored=[tensor.shared_by for tensor in kv_cache_config.kv_cache_tensors],
        runner_only=(),
        sharing=arguments["shared_layers"],
        ranges=_ranges_by_descriptor(kv_cache_config),
        call=call,
    )


def reshape(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``_reshape_kv_cache_tensors`` (V1) and ``_reshape_kv_cache`` (V2), up to 0.28."""
    caches = wrapped(*args, **kwargs)
    if _active is None:
        return caches
    kernel_block_sizes = named(wrapped, args, kwargs)["kernel_block_sizes"]
    return _active.shaped(caches, _block_dims(_active.runner, kernel_block_sizes))


def allocate_uniform(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``allocate_uniform_kv_caches`` of the V1 runner, up to 0.28: one cache across layers.

    For KV connectors that prefer it; vLLM allocates and shapes it in one function.
    """
    call = partial(wrapped, *args, **kwargs)
    if _active is None:
        return call()
    arguments = named(wrapped, args, kwargs)
    kv_cache_config, runner = arguments["kv_cache_config"], _active.runner
    caches, backing, backend = _active.allocate(
        kv_cache_config,
        stored=[tensor.shared_by for tensor in kv_cache_config.kv_cache_tensors],
        runner_only=runner.runner_only_attn_layers,
        sharing=runner.shared_kv_cache_layers,
        ranges=1,
        call=call,
    )
    block_dims = _block_dims(runner, arguments["kernel_block_sizes"])
    return _active.shaped(caches, block_dims), backing, backend


def allocate_backing(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``worker.utils.allocate_kv_cache`` of both runners, from 0.29: one backing for all."""
    call = partial(wrapped, *args, **kwargs)
    if _active is None:
        return call()
    kv_cache_config = named(wrapped, args, kwargs)["kv_cache_config"]
    runner_only, sharing = _sharing_of(_active)
    caches = _active.allocate(
        kv_cache_config,
        stored=[tensor.layers for tensor in kv_cache_config.kv_cache_tensors],
        runner_only=runner_only,
        sharing=sharing,
        ranges=1 if kv_cache_config.kv_cache_tensors else 0,
        call=call,
    )
    return _active.shaped(caches, block_dims={})  # all views are [block, head, token, content]


def execute_model(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Worker.execute_model``: carry out the step's plan first.

    Outputs without a plan exist before the first one (V2's ``warmup_kernels``).
    """
    binding = vars(worker).get(BINDING)
    if binding is not None and binding.pool is not None:
        output = args[0] if args else kwargs["scheduler_output"]
        plan = vars(output).get(PLAN)
        if plan is None:
            binding.pool.missing()
        else:
            _apply(binding, binding.pool, plan, idle=not output.total_num_scheduled_tokens)
    return wrapped(*args, **kwargs)


# The functions below run in every worker by ``collective_rpc``, which passes them the
# ``WorkerWrapperBase`` around the worker.


def report(worker: Any) -> dict[str, Any] | None:
    """What this worker bound, None if it bound nothing."""
    binding = _binding_of(worker)
    return asdict(binding.report()) if binding else None


def divide(worker: Any, slab_blocks: int) -> None:
    """Make this worker's memory elastic, in slabs of so many blocks."""
    _bound(worker).divide(slab_blocks)


def supply(worker: Any, slabs: int) -> int:
    """Own pages for so many slabs, or for as many as the device has; returns how many."""
    return _pool_of(worker).supply(slabs)


def apply_idle_plan(worker: Any, plan: Plan) -> None:
    """Carry out a plan that no step goes with: the engine is quiet."""
    _apply(_bound(worker), _pool_of(worker), plan, idle=True)


def _apply(binding: Binding, pool: ElasticPool, plan: Plan, *, idle: bool) -> None:
    pool.apply(plan, idle=idle)
    if not plan.sequence and binding.memories[0].kind == "cuda":
        keep_activations(binding.worker(), binding.memories[0].tensor.device)


def _pool_of(worker: Any) -> ElasticPool:
    pool = _bound(worker).pool
    assert pool is not None, "a plan for memory that is not elastic"
    return pool


def _binding_of(worker: Any) -> Binding | None:
    return vars(getattr(worker, "worker", worker)).get(BINDING)


def _bound(worker: Any) -> Binding:
    binding = _binding_of(worker)
    assert binding is not None, "a worker that EngineCore found patched"
    return binding


@contextmanager
def _activated(binding: Binding) -> Iterator[None]:
    global _active
    _active = binding
    try:
        yield
    finally:
        _active = None


def _ranges_by_descriptor(kv_cache_config: Any) -> int:
    """One range for each plain descriptor, one for all packed ones."""
    from vllm.v1.kv_cache_interface import KVCacheTensor

    tensors = kv_cache_config.kv_cache_tensors
    if "block_stride" not in KVCacheTensor.__dataclass_fields__:  # before 0.24: nothing is packed
        return len(tensors)
    strides = [tensor.block_stride for tensor in tensors]
    return strides.count(0) + any(strides)


def _block_dims(runner: Any, kernel_block_sizes: Sequence[int]) -> dict[str, int]:
    """Layer -> dimension of its view that counts blocks, as vLLM's KVBlockZeroer asks for it.

    Up to 0.22, and up to 0.28 on ROCm, backends put keys and values before blocks. Mamba's states
    and pages count blocks first.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec

    return {
        name: group.backend.get_kv_cache_block_dim(
            kernel_block_sizes[group.kv_cache_group_id],
            group.kv_cache_spec.num_kv_heads,
            group.kv_cache_spec.head_size,
            cache_dtype_str=runner.vllm_config.cache_config.cache_dtype,
        )
        for groups in runner.attn_groups
        for group in groups
        if isinstance(group.kv_cache_spec, AttentionSpec)
        # Encoder-only layers make a last group, without a cache.
        and group.kv_cache_group_id < len(kernel_block_sizes)
        for name in group.layer_names
    }


def _sharing_of(binding: Binding) -> tuple[Collection[str], Mapping[str, str]]:
    """Runner-only layers, and sharing layers with their targets, as the runner knows them."""
    runner = binding.runner
    if binding.runner_kind == "V1":
        return runner.runner_only_attn_layers, runner.shared_kv_cache_layers
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    return (), get_shared_kv_cache_layers(runner.vllm_config)


def _announce(report: Report) -> None:
    if report.pool == "stock":
        memory = "the KV cache is vLLM's own"
    elif report.pool == "none":
        memory = "no KV cache"
    else:
        memory = (
            f"pools: {report.pools}, sharing layers aliased: {report.aliased}, "
            f"{report.pool} memory reserved: {report.reserved_bytes / 2**30:.2f} GiB"
        )
    logger.info(
        "kvcached-patch %s active: worker, seams applied: %s, %s runner, %s",
        report.version,
        tally(),
        report.runner,
        memory,
    )
