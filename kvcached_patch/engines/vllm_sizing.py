"""The seams of vLLM's sizing on GPUs: capacity without regard to what neighbours hold now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcached_patch.engines.binding import pool_kind
from kvcached_patch.engines.vllm_static import static_because

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
