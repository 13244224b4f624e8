"""Short calls of the driver model, for tests."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cuda

from tests.driver_memory import READ, WRITE, Device
from tests.driver_model import Driver

G = 16  # granularity, bytes
Code = cuda.CUresult
INVALID = Code.CUDA_ERROR_INVALID_VALUE
NO_CONTEXT = Code.CUDA_ERROR_INVALID_CONTEXT
NO_MEMORY = Code.CUDA_ERROR_OUT_OF_MEMORY


def code(result: tuple[Any, ...]) -> Code:
    return result[0]


def ok(result: tuple[Any, ...]) -> Any:
    """The value of a call that succeeds, several as a tuple."""
    assert result[0] == Code.CUDA_SUCCESS
    return result[1] if len(result) == 2 else result[1:]


def started(*devices: Device) -> Driver:
    """A process whose thread has the context of device 0."""
    driver = Driver(*devices)
    ok(driver.cuInit(0))
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(0))))
    return driver


def prop(ordinal: int = 0) -> cuda.CUmemAllocationProp:
    found = cuda.CUmemAllocationProp()
    found.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = ordinal
    return found


def desc(ordinal: int = 0, right: int = READ | WRITE) -> cuda.CUmemAccessDesc:
    found = cuda.CUmemAccessDesc()
    found.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = ordinal
    found.flags = cuda.CUmemAccess_flags(right)
    return found


def reserve(driver: Driver, nbytes: int = 8 * G) -> int:
    return int(ok(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))


def create(driver: Driver, nbytes: int = G) -> cuda.CUmemGenericAllocationHandle:
    return ok(driver.cuMemCreate(nbytes, prop(), 0))


def mapped(driver: Driver, address: int, nbytes: int = G) -> cuda.CUmemGenericAllocationHandle:
    """A new handle, mapped without access."""
    handle = create(driver, nbytes)
    ok(driver.cuMemMap(address, nbytes, 0, handle, 0))
    return handle


def usable(driver: Driver, address: int, nbytes: int = G) -> cuda.CUmemGenericAllocationHandle:
    handle = mapped(driver, address, nbytes)
    ok(driver.cuMemSetAccess(address, nbytes, [desc()], 1))
    return handle
