"""The seams of vLLM's sizing on GPUs: capacity without regard to what neighbours hold now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvcached_patch import config
from kvcached_patch.engines.binding import pool_kind
from kvcached_patch.engines.vllm_static import static_because

logger = logging.getLogger("vllm.kvcached_patch")

# Whether the memory of this process's worker is supplied as it is used. Set when its device is,
# read by snapshots, which know no worker.
_supplied = False


def init_device(
    wrapped: Callable[..., Any], worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Worker.init_device``: from here on snapshots are for this worker."""
    global _supplied
    vllm_config = worker.vllm_config
    _supplied = static_because(vllm_config) is None and (
        pool_kind(vllm_config.device_config.device_type) == "cuda"
    )
    return wrapped(*args, **kwargs)


def measure(
    wrapped: Callable[..., Any], snapshot: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``MemorySnapshot.measure``: all that this process does not hold by PyTorch counts as free.

    VLLM takes what is free on the device for what it may have, and any change of it for its own
    doing: an engine does not start where neighbours hold memory, dies when one releases some while
    it profiles (kvcached#193, #110, #448), and sizes its cache by what they did meanwhile. But of
    memory that is supplied as it is used the capacity may be the device's: total memory times
    utilization, less weights, less the peak of activations. What NCCL and CUDA's modules take is
    not PyTorch's to know and must fit in what the utilization leaves.
    """
    result = wrapped(*args, **kwargs)
    if _supplied:
        snapshot.free_memory = snapshot.total_memory - snapshot.torch_memory
        snapshot.cuda_memory = snapshot.torch_memory
        snapshot.non_torch_memory = 0
    return result


def profile_graphs(
    wrapped: Callable[..., Any], runner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``profile_cudagraph_memory``: what a CUDA graph takes, told from PyTorch's memory as well.

    VLLM takes what is free on the device before and after one graph is captured, and multiplies
    the difference: one step of a neighbour would cost half the cache.
    """
    if not _supplied:
        return wrapped(*args, **kwargs)
    with _own_memory_alone():
        return wrapped(*args, **kwargs)


@contextmanager
def _own_memory_alone() -> Iterator[None]:
    """Within, what is free on a device is all that PyTorch does not hold in this process."""
    asked = [(torch.cuda, "mem_get_info"), (torch.accelerator, "get_memory_info")]
    # The second is there from PyTorch 2.9.
    real = [(module, name, vars(module)[name]) for module, name in asked if name in vars(module)]

    def told(ask: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        def info(device: Any = None) -> tuple[int, int]:
            total = ask(device)[1]
            return total - torch.accelerator.memory_reserved(device), total

        return info

    try:
        for module, name, ask in real:
            setattr(module, name, told(ask))
        yield
    finally:
        for module, name, ask in real:
            setattr(module, name, ask)


def keep_activations(worker: Any, device: torch.device) -> None:
    """Have PyTorch hold what activations take at their peak, before neighbours take it.

    After profiling vLLM gives that memory back to the device and counts on finding it there. Where
    it took no profile (``kv_cache_memory_bytes``) nothing is known of it.
    """
    peak = int(vars(worker).get("peak_activation_memory", 0))
    nbytes = max(peak - _graphs_in_it(worker), 0)
    try:
        torch.empty(nbytes, dtype=torch.int8, device=device)
    except torch.OutOfMemoryError:
        logger.warning(
            "kvcached-patch: %s has no %d bytes left for activations: others hold them; expected "
            "lower limits or a budget",
            device,
            nbytes,
        )


def _graphs_in_it(worker: Any) -> int:
    """Bytes of ``peak_activation_memory`` that graphs were to take, and have by now.

    From 0.27 vLLM counts them in, unless it is told not to (v1/worker/gpu_worker.py).
    """
    from vllm.utils.mem_utils import MemoryProfilingResult

    counted = "transient_peak_headroom" in MemoryProfilingResult.__dataclass_fields__
    if not (counted and int(config.raw("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS") or 1)):
        return 0
    return int(vars(worker).get("cudagraph_memory_estimate", 0))
