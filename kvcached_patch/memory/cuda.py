"""Memory of NVIDIA GPUs, committed and released page by page."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from kvcached_patch.errors import DriverError
from kvcached_patch.memory.device_pages import DevicePages
from kvcached_patch.memory.driver import load
from kvcached_patch.memory.mapped_range import MappedRange

_devices: dict[int, DevicePages] = {}


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


def pages_of(ordinal: int) -> DevicePages:
    """The pages of a GPU in this process: the same for all ranges that are open at a time."""
    if ordinal not in _devices:
        _devices[ordinal] = DevicePages(load(), ordinal)
    return _devices[ordinal]


class CudaMemory(MappedRange):
    """A `MappedRange` that PyTorch sees as a tensor, in the order of each caller's stream."""

    kind = "cuda"

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Reserve `nbytes` bytes (> 0); raises DriverError if `device` cannot serve them."""
        if device.type != "cuda":
            raise DriverError(f"cuda memory: cannot serve device {device}; expected cuda")
        ordinal = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(
            pages_of(ordinal), nbytes, lambda: torch.cuda.current_stream(ordinal).cuda_stream
        )
        self._ordinal = ordinal
        self._nbytes = nbytes
        try:
            self._view()
        except BaseException:
            super().close()
            raise

    def _view(self) -> None:
        self._bytes: _Bytes | None = _Bytes(self.address, self._nbytes)
        self.tensor = torch.as_tensor(self._bytes, device=torch.device("cuda", self._ordinal))

    def close(self) -> None:
        """Wait for the GPU and give the range back, with the last one all that is owned.

        Raises DriverError while a tensor still views it: its next use would end the process's
        context. After an error of the driver the next call goes on from there.
        """
        if self._bytes is not None:
            self.fence()
            owner = weakref.ref(self._bytes)
            self._bytes = None
            del self.tensor
            if owner() is not None:
                self._view()
                raise DriverError("closing a range of GPU memory: tensors still view it")
        super().close()
        if not self.backing.ranges:
            self.backing.close()
            del _devices[self._ordinal]


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
