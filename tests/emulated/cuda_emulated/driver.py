"""NVIDIA's virtual memory on the host's: reserved, mapped and unmapped by mmap(2).

A page of physical memory is a stretch of an anonymous file. New pages hold what floating-point
kernels show as NaN. ``CUDA_EMULATED_USED`` names a file with the bytes in use of the one device
that all processes share, and their peak; ``CUDA_EMULATED_CAPACITY`` says how many it has.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

Code = cuda.CUresult
OK = (Code.CUDA_SUCCESS,)
GRANULARITY = 4 << 10
FIXED, NORESERVE = 0x10, 0x4000  # <asm-generic/mman.h>
NONE, READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
PUNCH_HOLE = 0x3  # with FALLOC_FL_KEEP_SIZE, <linux/falloc.h>

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long
]  # fmt: skip
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class Driver:
    """What of `cuda.bindings.driver` is called, with its names, and its types for the rest."""

    def __init__(self) -> None:
        self._file = os.memfd_create("gpu")
        self._used = Path(os.environ["CUDA_EMULATED_USED"])
        self._size = 0
        self._free: list[int] = []
        self._mapped: dict[int, int] = {}  # address -> handle
        self._released: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(cuda, name)

    def used(self) -> int:
        return self._account(0)

    def peak(self) -> int:
        """The most bytes that were in use at once since this was last asked."""
        return self._account(0, peak=True)

    def _account(self, nbytes: int, *, peak: bool = False) -> int:
        """Bytes in use after so many more were taken; -1, and none are, if there are not."""
        with self._used.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = self._used.read_bytes()
            before, most = struct.unpack("<qq", data) if data else (0, 0)
            used = before + nbytes
            if nbytes > 0 and used > self._capacity():
                return -1
            self._used.write_bytes(struct.pack("<qq", used, used if peak else max(most, used)))
            return most if peak else used

    def _capacity(self) -> int:
        return int(os.environ["CUDA_EMULATED_CAPACITY"])

    def cuInit(self, flags: int) -> Any:
        return OK

    def cuDeviceGet(self, ordinal: int) -> Any:
        return *OK, ordinal

    def cuDeviceGetAttribute(self, attribute: Any, device: int) -> Any:
        return *OK, 1

    def cuDeviceGetUuid(self, device: int) -> Any:
        uuid = cuda.CUuuid()
        ctypes.memset(uuid.getPtr(), device, 16)
        return *OK, uuid

    cuDeviceGetUuid_v2 = cuDeviceGetUuid

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        return *OK, 1

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        return OK

    def cuCtxSetCurrent(self, context: int) -> Any:
        return OK

    def cuCtxGetCurrent(self) -> Any:
        return *OK, 1

    def cuCtxSynchronize(self) -> Any:
        return OK

    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> Any:
        return *OK, GRANULARITY

    def cuMemGetInfo(self) -> Any:
        return *OK, self._capacity() - self.used(), self._capacity()

    def cuEventCreate(self, flags: int) -> Any:
        return *OK, 1

    def cuEventDestroy(self, event: int) -> Any:
        return OK

    def cuEventRecord(self, event: int, stream: int) -> Any:
        return OK

    def cuEventSynchronize(self, event: int) -> Any:
        return OK

    def cuStreamSynchronize(self, stream: int) -> Any:
        return OK

    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> Any:
        return *OK, self._map(None, size, NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)

    def cuMemAddressFree(self, address: int, size: int) -> Any:
        assert not _libc.munmap(address, size)
        return OK

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        if self._account(size) < 0:
            return Code.CUDA_ERROR_OUT_OF_MEMORY, None
        if not self._free:
            self._free.append(self._size)
            self._size += size
            os.ftruncate(self._file, self._size)
        handle = self._free.pop()
        os.pwrite(self._file, b"\xff" * size, handle)
        return *OK, handle

    def cuMemRelease(self, handle: int) -> Any:
        self._released.add(handle)
        self._settle(handle)
        return OK

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> Any:
        if address in self._mapped:
            return (Code.CUDA_ERROR_INVALID_VALUE,)
        self._map(address, size, NONE, mmap.MAP_SHARED | FIXED, self._file, handle)
        self._mapped[address] = handle
        return OK

    def cuMemUnmap(self, address: int, size: int) -> Any:
        if address not in self._mapped:
            return (Code.CUDA_ERROR_INVALID_VALUE,)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED
        self._map(address, size, NONE, flags, -1, 0)
        self._settle(self._mapped.pop(address))
        return OK

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> Any:
        assert not _libc.mprotect(address, size, READ_WRITE)
        return OK

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> Any:
        ctypes.memset(address, value, size)
        return OK

    def _settle(self, handle: int) -> None:
        if handle in self._released and handle not in self._mapped.values():
            self._released.remove(handle)
            assert not _libc.fallocate(self._file, PUNCH_HOLE, handle, GRANULARITY)
            self._free.append(handle)
            self._account(-GRANULARITY)

    def _map(
        self, address: int | None, size: int, access: int, flags: int, file: int, offset: int
    ) -> int:
        found = _libc.mmap(address, size, access, flags | NORESERVE, file, offset)
        assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return int(found)
