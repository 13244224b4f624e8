"""One sequence of driver calls for the model and for a real device: the rules of virtual memory.

It launches no kernel and touches nothing that is not mapped, so a real device takes no harm.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cuda.bindings.driver import (
    CUdevice_attribute,
    CUmemAccess_flags,
    CUmemAccessDesc,
    CUmemAllocationGranularity_flags,
    CUmemAllocationProp,
    CUmemAllocationType,
    CUmemLocationType,
    CUresult,
)

_OK = CUresult.CUDA_SUCCESS
_NO_CONTEXT = CUresult.CUDA_ERROR_INVALID_CONTEXT
_REFUSED = None  # any error: the manual names no code


def sequence(driver: Any, granularity: int, device_ordinal: int = 0) -> list[tuple[str, str]]:
    """Run it; returns (step, code name) in order. Raises AssertionError at the first other code.

    granularity: bytes, of the device or a multiple. In a thread of its own, which has no context.
    """
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(_Sequence(driver, granularity, device_ordinal).run).result()


class _Sequence:
    def __init__(self, driver: Any, unit: int, ordinal: int) -> None:
        self.driver, self.unit, self.ordinal = driver, unit, ordinal
        self.steps: list[tuple[str, str]] = []

    def step(self, name: str, expected: CUresult | None, result: tuple[Any, ...]) -> Any:
        """Check and record one call; returns its value, if it has one."""
        code, *values = result
        self.steps.append((name, code.name))
        right = code != _OK if expected is None else code == expected
        wanted = "an error" if expected is None else expected.name
        assert right, f"{name}: {code.name}; expected {wanted}"
        return values[0] if values else None

    def run(self) -> list[tuple[str, str]]:
        driver, step = self.driver, self.step
        step("initialise", _OK, driver.cuInit(0))
        assert step("devices", _OK, driver.cuDeviceGetCount()) > self.ordinal
        device = step("device", _OK, driver.cuDeviceGet(self.ordinal))
        vmm = CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        assert step("attribute", _OK, driver.cuDeviceGetAttribute(vmm, device)) == 1
        assert len(step("uuid", _OK, driver.cuDeviceGetUuid(device)).bytes) == 16
        assert int(step("no context", _OK, driver.cuCtxGetCurrent())) == 0
        step("pop no context", _NO_CONTEXT, driver.cuCtxPopCurrent())
        step("memory info without context", _NO_CONTEXT, driver.cuMemGetInfo())
        step("event without context", _NO_CONTEXT, driver.cuEventCreate(0))
        context = step("retain", _OK, driver.cuDevicePrimaryCtxRetain(device))
        step("push", _OK, driver.cuCtxPushCurrent(context))
        assert int(step("context", _OK, driver.cuCtxGetCurrent())) == int(context)
        self._addresses()
        step("wait for all", _OK, driver.cuCtxSynchronize())
        assert int(step("pop", _OK, driver.cuCtxPopCurrent())) == int(context)
        step("set current", _OK, driver.cuCtxSetCurrent(context))
        assert int(step("context that was set", _OK, driver.cuCtxGetCurrent())) == int(context)
        step("set none", _OK, driver.cuCtxSetCurrent(0))
        assert int(step("none that was set", _OK, driver.cuCtxGetCurrent())) == 0
        step("release context", _OK, driver.cuDevicePrimaryCtxRelease(device))
        return self.steps

    def _addresses(self) -> None:
        driver, step, unit = self.driver, self.step, self.unit
        minimum = CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        prop = self._prop()
        found = step("granularity", _OK, driver.cuMemGetAllocationGranularity(prop, minimum))
        assert unit % found == 0, f"granularity {unit}; expected a multiple of {found}"
        step("reserve odd size", _REFUSED, driver.cuMemAddressReserve(unit + 1, 0, 0, 0))
        base = int(step("reserve", _OK, driver.cuMemAddressReserve(8 * unit, unit, 0, 0)))
        assert base % unit == 0
        self._memory(base, prop)
        step("free part", _REFUSED, driver.cuMemAddressFree(base, 4 * unit))
        step("free", _OK, driver.cuMemAddressFree(base, 8 * unit))
        step("free again", _REFUSED, driver.cuMemAddressFree(base, 8 * unit))

    def _memory(self, base: int, prop: Any) -> None:
        """Slots of `unit` bytes: 0 and 4 alias `one`; 1 and 2 are one mapping of `two`; 3 none."""
        driver, step, unit = self.driver, self.step, self.unit
        free_total = driver.cuMemGetInfo()
        step("memory info", _OK, free_total)
        above = (free_total[2] // unit + 1) * unit
        too_much = CUresult.CUDA_ERROR_OUT_OF_MEMORY
        step("create more than there is", too_much, driver.cuMemCreate(above, prop, 0))
        step("create odd size", _REFUSED, driver.cuMemCreate(unit + 1, prop, 0))
        one = step("create one", _OK, driver.cuMemCreate(unit, prop, 0))
        two = step("create two", _OK, driver.cuMemCreate(2 * unit, prop, 0))
        slot = [base + i * unit for i in range(8)]

        step("map", _OK, driver.cuMemMap(slot[0], unit, 0, one, 0))
        step("map over it", _REFUSED, driver.cuMemMap(slot[0], unit, 0, one, 0))
        step("map odd address", _REFUSED, driver.cuMemMap(slot[3] + 1, unit, 0, one, 0))
        step("map more than the handle", _REFUSED, driver.cuMemMap(slot[3], 2 * unit, 0, one, 0))
        step("map two", _OK, driver.cuMemMap(slot[1], 2 * unit, 0, two, 0))
        step("map over their end", _REFUSED, driver.cuMemMap(slot[2], unit, 0, one, 0))
        step("map alias", _OK, driver.cuMemMap(slot[4], unit, 0, one, 0))
        step("access over a hole", _REFUSED, self._access(slot[0], 5 * unit))
        step("access of several", _OK, self._access(slot[0], 3 * unit))
        step("access of alias", _OK, self._access(slot[4], unit))

        self._set("set all", slot[0], 7, 3 * unit)
        assert self._read("read all", slot[0], 3 * unit) == b"\x07" * (3 * unit)
        assert self._read("read alias", slot[4], unit) == b"\x07" * unit
        self._set("set alias", slot[4], 9, unit)
        assert self._read("read what alias set", slot[0], unit) == b"\x09" * unit

        step("unmap part", _REFUSED, driver.cuMemUnmap(slot[1], unit))
        step("release while mapped", _OK, driver.cuMemRelease(one))
        step("release two", _OK, driver.cuMemRelease(two))
        step("unmap", _OK, driver.cuMemUnmap(slot[0], unit))
        step("unmap again", _REFUSED, driver.cuMemUnmap(slot[0], unit))
        assert self._read("read alias that is left", slot[4], unit) == b"\x09" * unit
        three = step("create three", _OK, driver.cuMemCreate(unit, prop, 0))
        step("map where it was", _OK, driver.cuMemMap(slot[0], unit, 0, three, 0))
        step("access anew", _OK, self._access(slot[0], unit))
        self._set("zero", slot[0], 0, unit)
        assert self._read("read zeros", slot[0], unit) == bytes(unit)
        step("unmap three", _OK, driver.cuMemUnmap(slot[0], unit))
        step("unmap two", _OK, driver.cuMemUnmap(slot[1], 2 * unit))
        step("unmap alias", _OK, driver.cuMemUnmap(slot[4], unit))
        step("release three", _OK, driver.cuMemRelease(three))

    def _prop(self) -> Any:
        prop = CUmemAllocationProp()
        prop.type = CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.ordinal
        return prop

    def _access(self, address: int, nbytes: int) -> Any:
        desc = CUmemAccessDesc()
        desc.location.type = CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        desc.location.id = self.ordinal
        desc.flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return self.driver.cuMemSetAccess(address, nbytes, [desc], 1)

    def _set(self, name: str, address: int, value: int, nbytes: int) -> None:
        """Set bytes, and wait for an event after it."""
        driver, step = self.driver, self.step
        event = step(f"{name}: event", _OK, driver.cuEventCreate(0))
        step(f"{name}: query before", _OK, driver.cuEventQuery(event))
        step(f"{name}: set", _OK, driver.cuMemsetD8Async(address, value, nbytes, 0))
        step(f"{name}: record", _OK, driver.cuEventRecord(event, 0))
        step(f"{name}: wait", _OK, driver.cuEventSynchronize(event))
        step(f"{name}: query after", _OK, driver.cuEventQuery(event))
        step(f"{name}: stream", _OK, driver.cuStreamSynchronize(0))
        step(f"{name}: destroy", _OK, driver.cuEventDestroy(event))

    def _read(self, name: str, address: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        self.step(name, _OK, self.driver.cuMemcpyDtoH(data, address, nbytes))
        return bytes(data)
