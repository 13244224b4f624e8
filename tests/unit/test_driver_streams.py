"""The driver model keeps the rules of streams and events that its docstring lists."""

from __future__ import annotations

import pytest
from cuda.bindings import driver as cuda

from tests.driver_memory import GARBAGE, Device, Fault
from tests.driver_model import Driver
from tests.driver_use import Code, G, code, mapped, ok, reserve, started, usable


@pytest.fixture
def driver() -> Driver:
    return started(Device(8 * G, granularity=G))


def test_asynchronous(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    first = driver.launch(1, reads=[(base, 1)], writes=[(base, 1, G)])
    second = driver.launch(1, reads=[(base, 1)], writes=[(base, 2, G)])
    other = driver.launch(2, reads=[(base, 1)], writes=[(base, 3, G)])
    assert driver.run_some(stream=2) == 1
    ok(driver.cuStreamSynchronize(0))
    assert (first.done, second.done, other.done) == (False, False, True)
    ok(driver.cuStreamSynchronize(1))
    assert (other.seen, first.seen, second.seen) == ([bytes([GARBAGE])], [b"\x03"], [b"\x01"])
    assert driver.read(base, G) == b"\x02" * G
    assert driver.run_some(9) == 0


def test_fault(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    driver.launch(writes=[(base, 1, G)], reads=[(base + G, 1)])
    with pytest.raises(Fault, match="not mapped"):
        driver.cuStreamSynchronize(0)
    assert driver.read(base, G) == bytes([GARBAGE]) * G
    mapped(driver, base + G)
    with pytest.raises(Fault, match="no access"):
        driver.cuStreamSynchronize(0)


@pytest.mark.parametrize("use", ["reads", "writes", "memset"])
def test_unmap_in_flight(driver: Driver, use: str) -> None:
    base = reserve(driver)
    usable(driver, base)
    usable(driver, base + G)
    if use == "memset":
        ok(driver.cuMemsetD8Async(base + G - 1, 0, 2, 7))
    else:
        span = {"reads": (base + G - 1, 2), "writes": (base + G - 1, 0, 2)}[use]
        driver.launch(7, **{use: [span]})
    with pytest.raises(Fault, match="in flight"):
        driver.cuMemUnmap(base, G)
    assert base in driver.leaks()["mappings"]
    ok(driver.cuStreamSynchronize(7))
    ok(driver.cuMemUnmap(base, G))


def test_unmapping_beside_work_in_flight_is_no_fault(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    usable(driver, base + G)
    driver.launch(writes=[(base + G, 0, G)])
    ok(driver.cuMemUnmap(base, G))


def test_memset_is_work(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    usable(driver, base + G)
    ok(driver.cuMemsetD8Async(cuda.CUdeviceptr(base), 0, 2 * G, cuda.CUstream(3)))
    assert 0 not in driver.read(base, 2 * G)
    ok(driver.cuStreamSynchronize(cuda.CUstream(3)))
    assert driver.read(base, 2 * G) == bytes(2 * G)
    ok(driver.cuMemsetD8Async(base + 2 * G, 0, G, 0))
    with pytest.raises(Fault, match="not mapped"):
        driver.cuStreamSynchronize(0)


def test_copy_waits(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    usable(driver, base + G)
    ok(driver.cuMemsetD8Async(base, 1, G, 0))
    ok(driver.cuMemsetD8Async(base + G, 1, G, 3))
    data = bytearray(2 * G)
    ok(driver.cuMemcpyDtoH(data, base, 2 * G))
    assert data == b"\x01" * G + bytes([GARBAGE]) * G


def test_event_captures(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    event = ok(driver.cuEventCreate(0))
    ok(driver.cuEventQuery(event))
    first = driver.launch(1, writes=[(base, 1, G)])
    ok(driver.cuEventRecord(event, 1))
    second = driver.launch(1, writes=[(base, 2, G)])
    assert code(driver.cuEventQuery(event)) == Code.CUDA_ERROR_NOT_READY
    ok(driver.cuEventSynchronize(event))
    assert (first.done, second.done) == (True, False)
    ok(driver.cuEventQuery(event))
    ok(driver.cuEventRecord(event, 1))
    assert code(driver.cuEventQuery(event)) == Code.CUDA_ERROR_NOT_READY
    ok(driver.cuEventRecord(event, 2))
    ok(driver.cuEventQuery(event))
    ok(driver.cuEventDestroy(event))
    assert code(driver.cuEventDestroy(event)) == Code.CUDA_ERROR_INVALID_HANDLE
    assert code(driver.cuEventQuery(event)) == Code.CUDA_ERROR_INVALID_HANDLE


def test_event_context() -> None:
    driver = started(Device(8 * G), Device(8 * G))
    event = ok(driver.cuEventCreate(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    ok(driver.cuEventRecord(event, 0))
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    assert code(driver.cuEventRecord(event, 0)) == Code.CUDA_ERROR_INVALID_HANDLE


@pytest.mark.parametrize(("flags", "accepted"), [(0, True), (6, True), (4, False), (8, False)])
def test_event_flags(driver: Driver, flags: int, accepted: bool) -> None:
    assert (code(driver.cuEventCreate(flags)) == Code.CUDA_SUCCESS) is accepted
