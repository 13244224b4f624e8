"""Host memory that is reserved at once but committed by first touch."""

from __future__ import annotations

import mmap

import torch

from kvcached_patch.errors import DriverError

# MAP_NORESERVE is in Python's mmap module only from 3.13; the value is <asm-generic/mman.h>'s.
_MAP_NORESERVE = 0x4000


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
