"""The seams of vLLM's EngineCore: every worker must prove that it applied the plan."""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

from kvcached_patch import __version__, config
from kvcached_patch.core.extents import Cells
from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.layers import plan_layers
from kvcached_patch.core.pages import PageCounts
from kvcached_patch.engines.allowance import Agreement
from kvcached_patch.engines.arguments import named
from kvcached_patch.engines.binding import pool_kind
from kvcached_patch.engines.budget import Geometry
from kvcached_patch.engines.budgets import join_all
from kvcached_patch.engines.page_supply import PageSupply
from kvcached_patch.engines.vllm_scheduler import agree
from kvcached_patch.engines.vllm_static import Reason, static_because
from kvcached_patch.engines.vllm_worker import TIMEOUT_SECONDS, divide, report
from kvcached_patch.engines.vllm_worker import supply as supply_worker
from kvcached_patch.errors import ConfigError, SeamMismatch
from kvcached_patch.seams.apply import tally

# Slabs of a few blocks keep the queue's work per block small at little cost in empty pages.
LEAST_SLAB_BLOCKS = 4

logger = logging.getLogger("vllm.kvcached_patch")


def initialize_from_config(
    wrapped: Callable[..., Any], executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Executor.initialize_from_config``: afterwards ask each worker what it bound.

    Raises SeamMismatch if one is unpatched or counts other pools than the scheduler, ConfigError
    for memory bounds that no request fits in, or that cannot be kept. Whatever is raised here, the
    workers are shut down first: vLLM >= 0.24 waits without a time-out for workers that are still
    up when EngineCore fails (unified-cache-management#1399).
    """
    configs = named(wrapped, args, kwargs)["kv_cache_configs"]
    static = static_because(executor.vllm_config)
    # In one process the worker may append sharing layers to these very objects.
    before = copy.deepcopy(configs)
    planned = [planned_pools(each) if static is None else 0 for each in before]
    try:
        if static is not None:
            _stay_in_place(static, executor.vllm_config.device_config.device_type)
        result = wrapped(*args, **kwargs)
        reports = executor.collective_rpc(report)
        problem = "; ".join(
            f"worker {rank} {_problem(pools, found)}"
            for rank, (pools, found) in enumerate(zip(planned, reports, strict=True))
            if _problem(pools, found)
        )
        if problem:
            raise SeamMismatch(f"the plan is not in force everywhere: {problem}")
        if static is None:
            _divide(executor, before[0], reports)
        else:
            agree(None)
    except BaseException:
        executor.shutdown()
        raise
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


def _stay_in_place(reason: Reason, device_type: str) -> None:
    """Say why memory will not follow the load, where it would else.

    Raises ConfigError if it was asked to.
    """
    settings = config.load()
    for name, asked, expected in (
        (config.POOL, settings.pool not in ("auto", "static"), "one of: auto, static"),
        (config.LIMIT, settings.limit is not None, "no bound"),
        (config.BUDGET, settings.budget is not None, "no bound"),
    ):
        if asked:
            raise ConfigError(
                f"{name}={config.raw(name)!r}: this engine's memory cannot be given back in parts "
                f"({reason.feature}: {reason.why}); expected {expected}; or {reason.remedy}"
            )
    if pool_kind(device_type) != "static":
        logger.warning("kvcached-patch: memory once touched stays committed: %s", reason)


def _divide(executor: Any, kv_cache_config: Any, reports: list[dict[str, Any]]) -> None:
    """Agree on slabs that cover a page in every pool of every worker, and enter the ledger.

    Raises ConfigError for bounds that cannot be kept, PoolExhausted if there are no pages at all.
    """
    rigid = _rigid(executor, reports)
    if rigid is not None:
        settings = config.load()
        if any(found["ranges"] for found in reports):
            for name, value in ((config.LIMIT, settings.limit), (config.BUDGET, settings.budget)):
                if value is not None:
                    raise ConfigError(
                        f"{name}={config.raw(name)!r}: this engine's memory ({rigid}) cannot be "
                        "given back in parts; expected no bound"
                    )
        agree(None)
        return
    slab_blocks = max(LEAST_SLAB_BLOCKS, *(found["min_slab_blocks"] for found in reports))
    blocks = _blocks_of_longest(executor.vllm_config, kv_cache_config)
    pages = [_page_counts(found, kv_cache_config.num_blocks, slab_blocks) for found in reports]
    common = Geometry(
        slab_blocks=slab_blocks,
        block_bytes=0,
        least_slabs=1 + -(-blocks // slab_blocks),
        # vLLM keeps a batch for each pipeline stage in flight, and one more when asynchronous
        # (VllmConfig.max_concurrent_batches); a release is in force one plan after it is made.
        in_flight=executor.parallel_config.pipeline_parallel_size + 2,
        model=str(executor.model_config.model),
    )
    executor.collective_rpc(divide, args=(slab_blocks,))
    supply = footprint = None
    if any(found["supplied"] for found in reports):
        supply = PageSupply(partial(_supply_workers, ref(executor)), common.in_flight)
        shared = not all(each.exact for each in pages)
        footprint = Footprint(common.in_flight, pages if shared else [])
    geometries = _by_device(common, reports, pages)
    if supply is not None:  # for the null block's; where it is lacking, workers are shut down here
        supply.need(1, geometries[0].slab_bytes)
    agree(Agreement(geometries[0], join_all(geometries), footprint, supply))


def _supply_workers(executor: Callable[[], Any], slabs: int) -> int:
    """Have all workers own pages for so many slabs; returns for how many all do.

    executor: a weak reference to it. What holds this may outlive the engine, but not use it then.
    """
    rpc = partial(executor().collective_rpc, supply_worker, TIMEOUT_SECONDS)
    found = rpc(args=(slabs,))
    least: int = min(found)
    if least < max(found):  # the others keep no more than all have
        rpc(args=(least,))
    return least


def _by_device(
    common: Geometry, reports: list[dict[str, Any]], pages: list[PageCounts]
) -> list[Geometry]:
    """What the workers on each device agreed on; `common`: what all did."""
    ranks: dict[str | None, list[int]] = {}
    for rank, found in enumerate(reports):
        here = found["machine"] == socket.gethostname()
        ranks.setdefault(found["device"] if here else None, []).append(rank)

    def total(of: list[int], name: str) -> int:
        return sum(int(reports[rank][name]) for rank in of)

    return [
        replace(
            common,
            block_bytes=total(of, "block_bytes"),
            reserved_bytes=total(of, "reserved_bytes"),
            slab_pages=sum(pages[rank].price for rank in of),
            page_bytes=sum(
                pages[rank].price * reports[rank]["page_bytes"] * reports[rank]["supplied"]
                for rank in of
            ),
            device=device,
        )
        for device, of in ranks.items()
    ]


def _page_counts(found: dict[str, Any], num_blocks: int, slab_blocks: int) -> PageCounts:
    """What a worker will count; see its `Report`."""
    cells = [Cells(**cell) for cell in found["cells"]]
    return PageCounts(cells, found["range_bytes"], num_blocks, slab_blocks, found["page_bytes"])


def _rigid(executor: Any, reports: list[dict[str, Any]]) -> str | None:
    """Why the workers' memory cannot follow the load; None if it can."""
    # Ray's older executor, the default of no release and gone in 0.33, lets its workers run the
    # model without Worker.execute_model (v1/executor/ray_utils.py): no plan would reach them.
    if any(cls.__module__ == "vllm.v1.executor.ray_executor" for cls in type(executor).__mro__):
        logger.warning(
            "kvcached-patch: memory once touched stays committed: Ray's older executor passes no "
            "plans on; set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"
        )
        return "under Ray's older executor"
    if not all(found["min_slab_blocks"] for found in reports):
        return str(reports[0]["pool"])
    return None


def _blocks_of_longest(vllm_config: Any, kv_cache_config: Any) -> int:
    """Blocks that one request of max_model_len can need; each group takes its own."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    needs = [(spec.max_memory_usage_bytes(vllm_config), spec.page_size_bytes) for spec in specs]
    return sum(-(-nbytes // block_bytes) for nbytes, block_bytes in needs)


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
