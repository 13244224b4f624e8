"""A vLLM plugin by which engines on the CPU use our GPU memory, on a driver made of mmap(2).

What a GPU would do at addresses without access is what the CPU does: the process dies. Only the
driver's functions and PyTorch's view of the bytes are others; what calls them is the product's.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from cuda_emulated.driver import Driver
from kvcached_patch import memory
from kvcached_patch.memory import cuda

_driver: Driver | None = None
ordinal = 0  # of the GPU that ranges are reserved on


def load() -> Driver:
    global _driver
    _driver = _driver or Driver()
    return _driver


class EmulatedMemory(cuda.CudaMemory):
    """On the CPU, whose steps are done when they return."""

    @staticmethod
    def _ordinal_of(device: torch.device) -> int:
        assert device.type == "cpu"
        return ordinal

    @staticmethod
    def _stream(ordinal: int) -> int:
        return 0

    @staticmethod
    def _bytes_at(address: int, nbytes: int) -> Any:
        return (ctypes.c_int8 * nbytes).from_address(address)

    @staticmethod
    def _tensor_of(viewed: Any, ordinal: int) -> torch.Tensor:
        return torch.frombuffer(viewed, dtype=torch.int8)


def register() -> None:
    """What vLLM calls in each of its processes."""
    memory.DEVICE_TYPES["cuda"] = "cpu"
    cuda.load = load
    cuda.CudaMemory = EmulatedMemory  # type: ignore[misc,assignment]


def device(worker: Any) -> dict[str, int]:
    """A probe: the device's bytes in use, and the most since this was last asked."""
    return {"used": load().used(), "peak": load().peak()}
