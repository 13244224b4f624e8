"""The seams of vLLM's worker: storage from our pools, sharing layers aliased."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from kvcached_patch import __version__, config
from kvcached_patch.core.extents import Cells, View, block_cells, slab_blocks
from kvcached_patch.core.layers import LayerPlan, alias_sharing, plan_layers
from kvcached_patch.core.pages import PLAN, Plan
from kvcached_patch.engines.arguments import named
from kvcached_patch.engines.supply import StorageSupply
from kvcached_patch.errors import ConfigError, SeamMismatch
from kvcached_patch.memory import Memory, reserve
from kvcached_patch.pool import ElasticPool
from kvcached_patch.seams.apply import armed, tally

logger = logging.getLogger("vllm.kvcached_patch")


@dataclass(frozen=True)
class Report:
    """What one worker did: the proof of activity that EngineCore asks each worker for.

    pools: owner-only pool count. aliased: sharing layers bound to their target's cache.
    ranges: separate ranges of memory the pools lie in. reserved_bytes: their total length.
    min_slab_blocks: blocks per slab that cover a page in every pool; 0 if the memory cannot be
    given back in parts. block_bytes: of one block, in all pools together. seams: ids in place in
    the worker's process.
    """

    pid: int
    version: str
    runner: str
    pool: str
    pools: int
    aliased: int
    ranges: int
    reserved_bytes: int
    min_slab_blocks: int
    block_bytes: int
    seams: tuple[str, ...]


class Binding:
    """One real allocation in progress: opened by the gate, filled by the allocation seams."""

    def __init__(self, worker: Any) -> None:
        """Bind the storage of `worker`, a vLLM ``Worker`` with its model loaded."""
        self.runner = worker.model_runner
        # vLLM's own two classes: v1/worker/gpu_model_runner.py, v1/worker/gpu/model_runner.py.
        is_v2 = any(
            cls.__module__.startswith("vllm.v1.worker.gpu.") for cls in type(self.runner).__mro__
        )
        self.runner_kind = "V2" if is_v2 else "V1"
        self.plan = LayerPlan(owners=(), aliases={})
        self.memories: list[Memory] = []
        self.caches: dict[str, Any] = {}
        self.cells: tuple[Cells, ...] = ()
        self.num_blocks = 0
        self.pool: ElasticPool | None = None

    def allocate(
        self,
        kv_cache_config: Any,
        stored: list[Collection[str]],
        runner_only: Collection[str],
        sharing: Mapping[str, str],
        ranges: int,
        call: Callable[[], Any],
    ) -> Any:
        """Run vLLM's allocation with our memory under it; `ranges` of them must be drawn."""
        plan = plan_layers(
            [group.layer_names for group in kv_cache_config.kv_cache_groups],
            stored,
            runner_only=runner_only,
            sharing=sharing,
        )
        with StorageSupply(_reserve) as supply:
            result = call()
        if len(supply.taken) != ranges:
            raise SeamMismatch(
                f"vLLM's allocation drew {len(supply.taken)} ranges of memory; expected {ranges}: "
                "its code allocates in a way this version of kvcached-patch does not know"
            )
        self.plan, self.memories = plan, supply.taken
        return result

    def shaped(self, caches: dict[str, Any]) -> dict[str, Any]:
        """Alias the sharing layers in vLLM's finished layer -> cache map, and remember it."""
        alias_sharing(caches, self.plan.aliases)
        self.caches = dict(caches)
        return caches

    def measure(self, num_blocks: int) -> None:
        """Read off the finished views which bytes each block covers."""
        self.num_blocks = num_blocks
        if self.page_bytes:
            self.cells = block_cells(self._views(), num_blocks)

    def divide(self, slab_blocks: int) -> None:
        """Become elastic, in slabs of so many blocks."""
        sizes = [memory.tensor.numel() for memory in self.memories]
        self.pool = ElasticPool(self.memories, sizes, self.cells, self.num_blocks, slab_blocks)

    @property
    def page_bytes(self) -> int:
        """The memory's page, 0 if it cannot be given back in parts."""
        return self.memories[0].page_bytes if self.memories else 0

    def _views(self) -> Iterator[View]:
        starts = [memory.tensor.data_ptr() for memory in self.memories]
        for name, cache in self.caches.items():
            for tensor in cache if isinstance(cache, list) else [cache]:
                start = tensor.untyped_storage().data_ptr()
                yield View(
                    name,
                    starts.index(start),
                    tensor.data_ptr() - start,
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.element_size(),
                )

    def report(self) -> Report:
        """State what was bound."""
        return Report(
            pid=os.getpid(),
            version=__version__,
            runner=self.runner_kind,
            pool=self.memories[0].kind if self.memories else "none",
            pools=self.plan.pool_count,
            aliased=len(self.plan.aliases),
            ranges=len(self.memories),
            reserved_bytes=sum(memory.tensor.numel() for memory in self.memories),
            min_slab_blocks=slab_blocks(self.cells, self.page_bytes) if self.cells else 0,
            block_bytes=sum(cell.stride for cell in self.cells),
            seams=tuple(entry.seam.id for entry in armed() if entry.applied),
        )


_active: Binding | None = None
_bindings: WeakKeyDictionary[Any, Binding] = WeakKeyDictionary()


def initialize_from_config(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Worker.initialize_from_config``, the gate: only what it allocates is the real cache.

    vLLM's profiling runs use the same allocation functions, but never from here.
    """
    kv_cache_config = named(wrapped, args, kwargs)["kv_cache_config"]
    binding = Binding(worker)
    with _activated(binding):
        result = wrapped(*args, **kwargs)
    if kv_cache_config.kv_cache_tensors and not binding.memories:
        raise SeamMismatch(
            f"the {binding.runner_kind} runner ({type(binding.runner).__module__}) allocated its "
            "KV cache without passing an allocation seam; expected "
            f"{', '.join(e.seam.id for e in armed() if e.seam.process == 'worker')}. Set "
            f"{config.TOGGLE}=0 to run this configuration unpatched"
        )
    binding.measure(kv_cache_config.num_blocks)
    _bindings[worker] = binding
    _announce(binding.report())
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
    return caches if _active is None else _active.shaped(caches)


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
    return _active.shaped(caches)


def execute_model(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Worker.execute_model``: carry out the step's plan first.

    Outputs without a plan exist before the first one (V2's ``warmup_kernels``).
    """
    binding = _bindings.get(worker)
    if binding is not None and binding.pool is not None:
        output = args[0] if args else kwargs["scheduler_output"]
        plan = vars(output).get(PLAN)
        if plan is None:
            binding.pool.missing()
        else:
            binding.pool.apply(plan, idle=not output.total_num_scheduled_tokens)
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


def apply_idle_plan(worker: Any, plan: Plan) -> None:
    """Carry out a plan that no step goes with: the engine is quiet."""
    pool = _bound(worker).pool
    assert pool is not None, "a plan for memory that is not elastic"
    pool.apply(plan, idle=True)


def _binding_of(worker: Any) -> Binding | None:
    return _bindings.get(getattr(worker, "worker", worker))


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


def _reserve(nbytes: int, device: torch.device) -> Memory:
    kind = config.load().pool
    if kind == "auto":
        kind = "host" if device.type == "cpu" else "static"
    if kind == "host" and device.type != "cpu":
        raise ConfigError(
            f"{config.POOL}={kind!r}: the KV cache is on {device}; expected one of: auto, static"
        )
    return reserve(kind, nbytes, device)


def _ranges_by_descriptor(kv_cache_config: Any) -> int:
    """One range for each plain descriptor, one for all packed ones (0.24-0.28)."""
    strides = [tensor.block_stride for tensor in kv_cache_config.kv_cache_tensors]
    return strides.count(0) + any(strides)


def _sharing_of(binding: Binding) -> tuple[Collection[str], Mapping[str, str]]:
    """Runner-only layers, and sharing layers with their targets, as the runner knows them."""
    runner = binding.runner
    if binding.runner_kind == "V1":
        return runner.runner_only_attn_layers, runner.shared_kv_cache_layers
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    return (), get_shared_kv_cache_layers(runner.vllm_config)


def _announce(report: Report) -> None:
    logger.info(
        "kvcached-patch %s active: worker, seams applied: %s, %s runner, pools: %d, "
        "sharing layers aliased: %d, %s memory reserved: %.2f GiB",
        report.version,
        tally(),
        report.runner,
        report.pools,
        report.aliased,
        report.pool,
        report.reserved_bytes / 2**30,
    )
