"""Memory of NVIDIA GPUs, committed and released page by page."""

from __future__ import annotations

import logging
import os
import weakref
from functools import partial
from typing import Any

import torch

from kvcached_patch.errors import DriverError
from kvcached_patch.memory.device_pages import DevicePages
from kvcached_patch.memory.driver import load
from kvcached_patch.memory.mapped_range import MappedRange

logger = logging.getLogger("vllm.kvcached_patch")


def missing() -> str | None:
    """What this machine lacks for memory of this kind; None if it has all. Makes no context."""
    try:
        driver = load()
    except DriverError as error:
        return str(error)
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__}: built without CUDA"
    code, count = driver.cuDeviceGetCount()
    return None if count else f"GPU: none found ({code.name})"


class CudaMemory:
    """A `MappedRange` that PyTorch sees as a tensor, in the order of each caller's stream.

    It lasts as long as anything views it: where nobody closes it, as vLLM's engines in one process
    with their caller do not, it goes with the last view.
    """

    kind = "cuda"

    def __init__(self, nbytes: int, device: torch.device, beside: CudaMemory | None = None) -> None:
        """Reserve `nbytes` bytes (> 0).

        beside: memory of the same GPU and owner, with whose pages it is counted. Raises DriverError
        if `device` cannot serve them, PoolExhausted.
        """
        self._ordinal = self._ordinal_of(device)
        shared = beside.backing if beside else None
        self.backing: DevicePages = shared or DevicePages(load(), self._ordinal)
        try:
            stream = partial(self._stream, self._ordinal)
            self._range = MappedRange(self.backing, nbytes, stream)
        except BaseException:
            if not self.backing.ranges:
                self.backing.close()
            raise
        try:
            self._view(self._bytes_at(self._range.address, nbytes))
        except BaseException:
            _give_back(self._range)
            raise

    @staticmethod
    def _ordinal_of(device: torch.device) -> int:
        if device.type != "cuda":
            raise DriverError(f"cuda memory: cannot serve device {device}; expected cuda")
        return int(torch.cuda.current_device() if device.index is None else device.index)

    @staticmethod
    def _stream(ordinal: int) -> int:
        return int(torch.cuda.current_stream(ordinal).cuda_stream)

    @staticmethod
    def _bytes_at(address: int, nbytes: int) -> Any:
        """What PyTorch is given to view."""
        return _Bytes(address, nbytes)

    @staticmethod
    def _tensor_of(viewed: Any, ordinal: int) -> torch.Tensor:
        return torch.as_tensor(viewed, device=torch.device("cuda", ordinal))

    def _view(self, viewed: Any) -> None:
        self.tensor = self._tensor_of(viewed, self._ordinal)
        self._viewed: weakref.ref[Any] | None = weakref.ref(viewed)
        self._unviewed = weakref.finalize(viewed, _left, self._range, os.getpid())
        self._unviewed.atexit = False

    @property
    def page_bytes(self) -> int:
        """The unit in which memory is committed and released."""
        return self._range.page_bytes

    def fence(self) -> None:
        """See `MappedRange.fence`."""
        self._range.fence()

    def commit(self, start: int, end: int) -> None:
        """See `MappedRange.commit`."""
        self._range.commit(start, end)

    def release(self, start: int, end: int) -> None:
        """See `MappedRange.release`."""
        self._range.release(start, end)

    def close(self) -> None:
        """Wait for the GPU and give the range back, with the last one all that is owned.

        Raises DriverError while a tensor still views it: its next use would end the process's
        context. After an error of the driver the next call goes on from there.
        """
        if self._viewed is not None:
            self.fence()
            self._unviewed.detach()
            del self.tensor
            viewed = self._viewed()
            if viewed is not None:
                self._view(viewed)
                raise DriverError("closing a range of GPU memory: tensors still view it")
            self._viewed = None
        _give_back(self._range)


def _give_back(range_: MappedRange) -> None:
    """Close a range, and with the last one the pages."""
    range_.close()
    if not range_.backing.ranges:
        range_.backing.close()


def _left(range_: MappedRange, process: int) -> None:
    """Nobody views the range any more, and nobody closed it.

    It may be in the midst of anything that this thread was at; not of a graph's capture, before
    which vLLM collects what is garbage, and which waiting would end.
    """
    if os.getpid() != process:  # a fork, which has no context
        return
    try:
        with range_.backing.aside():
            _give_back(range_)
    except DriverError as error:  # as all calls after an illegal access, of which others tell
        logger.debug("kvcached-patch: GPU memory is kept until this process ends: %s", error)


class _Bytes:
    """What PyTorch is given to view: every tensor of these bytes keeps it alive.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html, version 3.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|i1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }
