"""Host memory that is reserved at once but committed by first touch."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from kvcached_patch.errors import DriverError

# MAP_NORESERVE is in Python's mmap module only from 3.13; the value is <asm-generic/mman.h>'s.
_MAP_NORESERVE = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)


class HostMemory:
    """An anonymous private mapping; untouched pages read as zeros and cost nothing (mmap(2))."""

    kind = "host"
    backing = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Reserve `nbytes` bytes (> 0).

        Raises DriverError if `device` is not the CPU or the kernel refuses the mapping.
        """
        if device.type != "cpu":
            raise DriverError(f"host memory: cannot serve device {device}; expected cpu")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, nbytes, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise DriverError(f"mmap of {nbytes} bytes: {error}") from error
        self.tensor = self._view()

    def _view(self) -> torch.Tensor:
        # torch.frombuffer keeps the object it was given but not its buffer; the memoryview in
        # between holds the buffer, so that the mapping cannot be closed under a tensor.
        return torch.frombuffer(memoryview(self._map), dtype=torch.int8)

    def resident_bytes(self) -> int:
        """Committed bytes of the range, in whole system pages."""
        return resident_bytes(self.tensor.data_ptr(), self.tensor.numel())

    @property
    def page_bytes(self) -> int:
        """The unit in which memory is committed and released."""
        return mmap.PAGESIZE

    def fence(self) -> None:
        """Nothing to do: a worker's steps on the CPU are over when they return."""

    def commit(self, start: int, end: int) -> None:
        """Nothing to do: the first touch of a page commits it, as zeros."""

    def release(self, start: int, end: int) -> None:
        """Give the pages of ``[start, end)`` back; they read as zeros again (MADV_DONTNEED).

        start: a multiple of `page_bytes`; end: another, or the range's end. Raises DriverError if
        the kernel refuses.
        """
        try:
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        except (OSError, ValueError) as error:
            raise DriverError(f"madvise of {end - start} bytes at {start}: {error}") from error

    def close(self) -> None:
        """Unmap the range.

        Raises DriverError while a tensor still views it: a stray read would crash the process.
        """
        del self.tensor
        try:
            self._map.close()
        except BufferError as error:
            self.tensor = self._view()
            raise DriverError("munmap: tensors still view this range") from error


def resident_bytes(address: int, nbytes: int) -> int:
    """Bytes of ``[address, address + nbytes)`` that are resident, in whole system pages.

    Raises DriverError if mincore(2) refuses the range (part of it is not mapped).
    """
    page = mmap.PAGESIZE
    start = address // page * page
    pages = -(-(address + nbytes - start) // page)
    vector = (ctypes.c_ubyte * pages)()
    if _libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), vector):
        code = ctypes.get_errno()
        raise DriverError(f"mincore of {nbytes} bytes at {address:#x}: {os.strerror(code)}")
    return bytes(vector).translate(_LOW_BIT).count(1) * page


# mincore(2): only the lowest bit of each byte is defined.
_LOW_BIT = bytes(value & 1 for value in range(256))
