"""A model of NVIDIA's driver, in place of `cuda.bindings.driver`: its rules for virtual memory.

Written from the CUDA Driver API manual ("manual"; CUDA 13), the CUDA Programming Guide's chapter
on virtual memory ("guide") and allocators in use. Where these leave something open the model takes
the strict reading, so that what passes here relies on nothing that is not promised. Each rule has
a test of its name in tests/unit/test_driver_*.py.

Contexts
  initialised: before cuInit every call returns NOT_INITIALIZED. [manual: cuInit]
  context_per_thread: contexts are a stack per thread. Without one, a call that works in a context
    returns INVALID_CONTEXT. [manual: cuCtxPushCurrent, and the codes of each function. Those for
    virtual memory do not list that code; strict: vLLM's csrc/cumem_allocator.cpp makes sure of a
    context before them too (ensure_context)]
  primary_context: it is released as often as it was retained; once more is INVALID_CONTEXT. The
    last release resets it and pops it from no stack. [manual: cuDevicePrimaryCtxRelease]
  set_current: it takes the place of the top of the stack; NULL pops it. [manual: cuCtxSetCurrent]
Addresses
  granularity: addresses, sizes and offsets are multiples of the granularity. [manual: cuMemCreate,
    cuMemMap. cuMemAddressReserve asks for the host's page only: strict]
  reserve_alignment: a power of two or zero. [manual: cuMemAddressReserve, where the address is a
    hint. Strict: the hint is not followed, no address is used twice]
  free_whole_reservation: its address and its size. [manual: cuMemAddressFree]
  free_unmapped_reservation: nothing is mapped in it. [guide: "Users must ensure"; that the call is
    refused otherwise is not promised]
Memory
  map_offset: zero. [cuda.h, cuMemMap: "currently must be zero"]
  map_inside_reservation: of one reservation, and no more bytes than the handle has. [manual:
    cuMemMap]
  map_once: nothing is mapped there. [manual: cuMemMap]
  alias: a handle may be mapped at many addresses; what is written at one can be read at all, once
    the work that wrote it is complete. [guide: virtual aliasing support]
  unmap_one_mapping: exactly the range of one cuMemMap. [manual: "cuMemUnmap cannot unmap a
    sub-range of an address range mapped by cuMemCreate / cuMemMap". Strict: what one call does
    with several mappings is left unused; so does PyTorch's c10/cuda/CUDACachingAllocator.cpp,
    unmapHandles]
  remap: an unmapped range is still reserved, and can be mapped again. [manual: cuMemUnmap]
  memory_returns: once the handle is released and has no mapping, in either order. [manual:
    cuMemRelease, cuMemUnmap]
  release_once: a second release is undefined. [manual: cuMemRelease] Here: refused.
  garbage: new memory holds anything. [no function's manual promises a content]
  out_of_memory: cuMemCreate of more than the processes on the device left. [manual: cuMemCreate]
Access
  no_access_at_first: a new mapping has none, also where an older one had. [manual: cuMemMap,
    cuMemUnmap]
  access_whole_mappings: a range without holes, of one or several whole mappings. [manual:
    cuMemSetAccess, "a fully mapped address range containing all allocations"; PyTorch's setAccess
    spans several. Strict: never a part of one]
  access_per_device: each device has its own rights. [manual: cuMemSetAccess]
Streams
  asynchronous: work runs when its stream or an event after it is waited for, or at any time
    before; in order within a stream, in any order between two. [manual: cuStreamSynchronize.
    Strict: the default stream too is ordered with no other (CU_STREAM_NON_BLOCKING)]
  fault: work that touches an address without access when it runs kills its context. [guide:
    "would result in a program crash"] Here: Fault.
  unmap_in_flight: cuMemUnmap does not wait for work that touches the range. [PyTorch's
    unmapHandles: it does "not appear to synchronize in all cases"] Here: Fault, at once.
  memset_is_work: it touches its range when it runs. [manual: cuMemsetD8Async]
  copy_waits: cuMemcpyDtoH is done when it returns. [manual: API synchronization behavior. Strict:
    it waits for no stream but the default one]
  event_captures: an event is complete when that work is which its stream held when it was last
    recorded, or if it never was. [manual: cuEventRecord]
  event_context: it is recorded in the context that made it, else INVALID_HANDLE. [manual:
    cuEventRecord]

Where the manual names no code for a refusal it is INVALID_VALUE.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver as cuda

from tests.driver_memory import GARBAGE, Handle, refuse
from tests.driver_process import CONTEXTS, Code, Process, call, number
from tests.driver_streams import Event

_VMM = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_TIMING_OFF = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING
_INTERPROCESS = cuda.CUevent_flags.CU_EVENT_INTERPROCESS


class Driver(Process):
    """One process's driver; called as `cuda.bindings.driver` is, and with its types."""

    def __getattr__(self, name: str) -> Any:
        """Types and constants of the real module; a function that is not modelled is an error."""
        value = getattr(cuda, name)
        if isinstance(value, (type, int)):
            return value
        raise AttributeError(f"{name}: not modelled")

    @call(context=False, initialised=False)
    def cuInit(self, Flags: int) -> None:
        refuse(Flags != 0)
        self.initialised = True

    @call(1, context=False)
    def cuDeviceGetCount(self) -> int:
        return len(self.devices)

    @call(1, context=False)
    def cuDeviceGet(self, ordinal: int) -> cuda.CUdevice:
        return cuda.CUdevice(self.ordinal(ordinal))

    @call(1, context=False)
    def cuDeviceGetAttribute(self, attrib: cuda.CUdevice_attribute, dev: Any) -> int:
        if attrib != _VMM:
            raise NotImplementedError(f"cuDeviceGetAttribute: {attrib!r}: not modelled")
        return int(self.devices[self.ordinal(dev)].vmm)

    @call(1, context=False)
    def cuDeviceGetUuid(self, dev: Any) -> cuda.CUuuid:
        uuid = cuda.CUuuid()
        ctypes.memmove(uuid.getPtr(), self.devices[self.ordinal(dev)].uuid, 16)
        return uuid

    @call(1, context=False)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> cuda.CUcontext:
        ordinal = self.ordinal(dev)
        self.retained[ordinal] += 1
        return cuda.CUcontext(CONTEXTS + ordinal)

    @call(context=False)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        ordinal = self.ordinal(dev)
        refuse(not self.retained[ordinal], Code.CUDA_ERROR_INVALID_CONTEXT)
        self.retained[ordinal] -= 1

    @call(context=False)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self.stack().append(self.context(ctx))

    @call(context=False)
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        self.stack()[-1:] = [self.context(ctx)] if number(ctx) else []

    @call(1, context=False)
    def cuCtxPopCurrent(self) -> cuda.CUcontext:
        refuse(not self.stack(), Code.CUDA_ERROR_INVALID_CONTEXT)
        return cuda.CUcontext(CONTEXTS + self.stack().pop())

    @call(1, context=False)
    def cuCtxGetCurrent(self) -> cuda.CUcontext:
        return cuda.CUcontext(CONTEXTS + self.stack()[-1] if self.stack() else 0)

    @call()
    def cuCtxSynchronize(self) -> None:
        """Waits for all of the context's work. [manual: cuCtxSynchronize]"""
        self.streams.run_all(self.current())

    @call(1, context=False)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        return self.place(prop).granularity

    @call(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        device = self.devices[self.current()]
        return device.free, device.capacity

    @call(1)
    def cuMemAddressReserve(
        self, size: int, alignment: int, addr: Any, flags: int
    ) -> cuda.CUdeviceptr:
        refuse(flags != 0)
        hint = number(addr)
        return cuda.CUdeviceptr(self.space.reserve(size, alignment, hint))

    @call()
    def cuMemAddressFree(self, ptr: Any, size: int) -> None:
        self.space.free(number(ptr), size)

    @call(1)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> cuda.CUmemGenericAllocationHandle:
        device = self.place(prop)
        refuse(flags != 0 or size <= 0 or size % device.granularity != 0)
        device.take(size)
        key = next(self.ids)
        self.handles[key] = Handle(device, bytearray([GARBAGE]) * size)
        return cuda.CUmemGenericAllocationHandle(key)

    @call()
    def cuMemRelease(self, handle: Any) -> None:
        found = self.handle(handle)
        found.released = True
        found.settle()

    @call()
    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        refuse(flags != 0)
        self.space.map(number(ptr), size, offset, self.handle(handle))

    @call()
    def cuMemUnmap(self, ptr: Any, size: int) -> None:
        self.space.unmap(number(ptr), size, self.streams.in_flight)

    @call()
    def cuMemSetAccess(
        self, ptr: Any, size: int, desc: Sequence[cuda.CUmemAccessDesc], count: int
    ) -> None:
        if not all(isinstance(one, cuda.CUmemAccessDesc) for one in desc):
            raise TypeError(f"desc: {desc!r}; expected a sequence of CUmemAccessDesc")
        if count > len(desc):
            raise RuntimeError(f"List is too small: {len(desc)} < {count}")
        access = [(self.located(one.location), int(one.flags)) for one in desc[:count]]
        self.space.set_access(number(ptr), size, access)

    @call()
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        if uc not in range(256):
            raise OverflowError(f"uc: {uc}; expected an unsigned char")
        stream = number(hStream)
        writes = [(number(dstDevice), uc, N)]
        self.launch(stream, writes=writes, device=self.current())

    @call()
    def cuMemcpyDtoH(self, dstHost: Any, srcDevice: Any, ByteCount: int) -> None:
        device = self.current()
        self.streams.run_until(self.streams.last((device, 0)))
        data = self.space.read(number(srcDevice), ByteCount, device)
        memoryview(dstHost).cast("B")[:ByteCount] = data

    @call()
    def cuStreamSynchronize(self, hStream: Any) -> None:
        stream = (self.current(), number(hStream))
        self.streams.run_until(self.streams.last(stream))

    @call(1)
    def cuEventCreate(self, Flags: int) -> cuda.CUevent:
        refuse(Flags not in range(8) or bool(Flags & _INTERPROCESS and not Flags & _TIMING_OFF))
        key = next(self.ids)
        self.events[key] = Event(self.current())
        return cuda.CUevent(key)

    @call()
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        event = self.event(hEvent)
        refuse(event.device != self.current(), Code.CUDA_ERROR_INVALID_HANDLE)
        event.after = self.streams.last((event.device, number(hStream)))

    @call(context=False)
    def cuEventQuery(self, hEvent: Any) -> None:
        refuse(not self.event(hEvent).complete, Code.CUDA_ERROR_NOT_READY)

    @call()
    def cuEventSynchronize(self, hEvent: Any) -> None:
        self.streams.run_until(self.event(hEvent).after)

    @call()
    def cuEventDestroy(self, hEvent: Any) -> None:
        refuse(self.events.pop(number(hEvent), None) is None, Code.CUDA_ERROR_INVALID_HANDLE)

    def cuGetErrorName(self, error: Code) -> tuple[Any, ...]:
        return Code.CUDA_SUCCESS, Code(error).name.encode()

    def cuGetErrorString(self, error: Code) -> tuple[Any, ...]:
        """Not the driver's text, but one that says as much."""
        name = Code(error).name.removeprefix("CUDA_").removeprefix("ERROR_")
        return Code.CUDA_SUCCESS, name.replace("_", " ").lower().encode()
