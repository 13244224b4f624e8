"""Memory of NVIDIA GPUs, committed and released page by page."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from kvcached_patch.errors import DriverError
from kvcached_patch.memory.device_pages import DevicePages
from kvcached_patch.memory.driver import load
from kvcached_patch.memory.mapped_range import MappedRange

_devices: weakref.WeakValueDictionary[int, DevicePages] = weakref.WeakValueDictionary()


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
    """The pages of a GPU in this process; the same for all who ask while anybody holds them."""
    pages = _devices.get(ordinal)
    if pages is None:
        pages = _devices[ordinal] = DevicePages(load(), ordinal)
    return pages


class CudaMemory:
    """One range of a GPU's addresses; see `MappedRange`.

    Everything is done in the order of the calling thread's current stream.
    """

    kind = "cuda"

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Reserve `nbytes` bytes (> 0); raises DriverError if `device` cannot serve them."""
        if device.type != "cuda":
            raise DriverError(f"cuda memory: cannot serve device {device}; expected cuda")
        self._ordinal = torch.cuda.current_device() if device.index is None else device.index
        self._reserve(nbytes)

    def _reserve(self, nbytes: int) -> None:
        self.backing: DevicePages = pages_of(self._ordinal)
        self._range = MappedRange(self.backing, nbytes)
        self._nbytes = nbytes
        self._view()

    def _view(self) -> None:
        self._bytes = _Bytes(self._range.address, self._nbytes)
        self.tensor = torch.as_tensor(self._bytes, device=torch.device("cuda", self._ordinal))

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._ordinal).cuda_stream)

    def resident_bytes(self) -> int:
        """Committed bytes of the range, in whole pages."""
        return self._range.committed * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """The unit in which memory is committed and released."""
        return self.backing.page_bytes

    def fence(self) -> None:
        """Wait for all work on the current stream: then pages may be exchanged."""
        self.backing.fence(self._stream)

    def commit(self, start: int, end: int) -> None:
        """See `MappedRange.commit`."""
        self._range.commit(start, end, self._stream)

    def release(self, start: int, end: int) -> None:
        """See `MappedRange.release`."""
        self._range.release(start, end, self._stream)

    def close(self) -> None:
        """Wait for the GPU and give the range back, with the last one all that is owned.

        Raises DriverError while a tensor still views it: its next use would end the process's
        context.
        """
        owner = weakref.ref(self._bytes)
        del self.tensor, self._bytes
        if owner() is not None:
            self._view()
            raise DriverError("closing a range of GPU memory: tensors still view it")
        self.fence()
        self._range.close()
        if not self.backing.ranges:
            _devices.pop(self._ordinal, None)
            self.backing.close()


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
