"""The seams of vLLM's EngineCore: every worker must prove that it applied the plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kvcached_patch import __version__
from kvcached_patch.core.layers import plan_layers
from kvcached_patch.engines.arguments import named
from kvcached_patch.engines.vllm_scheduler import Geometry, agree
from kvcached_patch.engines.vllm_worker import divide, report
from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.apply import tally

# Slabs of a few blocks keep the queue's work per block small at little cost in empty pages.
LEAST_SLAB_BLOCKS = 4

logger = logging.getLogger("vllm.kvcached_patch")


def initialize_from_config(
    wrapped: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Executor.initialize_from_config``: afterwards ask each worker what it bound.

    Raises SeamMismatch, after shutting the workers down, if one is unpatched or counts other
    pools than the scheduler. vLLM >= 0.24 waits without a time-out for workers that are still
    up when EngineCore fails (unified-cache-management#1399).
    """
    configs = named(wrapped, args, kwargs)["kv_cache_configs"]
    # Before the call: in one process the worker appends sharing layers to these very objects.
    planned = [planned_pools(kv_cache_config) for kv_cache_config in configs]
    result = wrapped(*args, **kwargs)
    reports = executor.collective_rpc(report)
    problem = "; ".join(
        f"worker {rank} {_problem(pools, found)}"
        for rank, (pools, found) in enumerate(zip(planned, reports, strict=True))
        if _problem(pools, found)
    )
    if problem:
        executor.shutdown()
        raise SeamMismatch(f"the plan is not in force everywhere: {problem}")
    _divide(executor, reports)
    if all(found["pid"] != os.getpid() for found in reports):
        logger.info(
            "kvcached-patch %s active: EngineCore, seams applied: %s, workers: %d, "
            "pools planned and bound: %s",
            __version__,
            tally(),
            len(reports),
            ", ".join(str(pools) for pools in planned),
        )
    return result


def _divide(executor: Any, reports: list[dict[str, Any]]) -> None:
    """Agree on slabs that cover a page in every pool of every worker."""
    geometry = None
    if all(found["min_slab_blocks"] for found in reports):
        geometry = Geometry(
            slab_blocks=max(LEAST_SLAB_BLOCKS, *(found["min_slab_blocks"] for found in reports)),
            block_bytes=sum(found["block_bytes"] for found in reports),
        )
        executor.collective_rpc(divide, args=(geometry.slab_blocks,))
    agree(geometry)


def planned_pools(kv_cache_config: Any) -> int:
    """The scheduler's own pool count: its groups name owners only."""
    names = [group.layer_names for group in kv_cache_config.kv_cache_groups]
    return plan_layers(names, stored=names).pool_count


def _problem(planned: int, found: dict[str, Any] | None) -> str:
    if found is None:
        return "is not patched"
    if found["version"] != __version__:
        return f"runs kvcached-patch {found['version']}; expected {__version__}"
    if found["pools"] != planned:
        return f"bound {found['pools']} pools; the scheduler planned {planned}"
    return ""
