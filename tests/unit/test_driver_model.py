"""The driver model is called like the real module, and its rules of contexts hold."""

from __future__ import annotations

import inspect
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from tests import driver_model
from tests.driver_memory import Device
from tests.driver_model import Driver
from tests.driver_sequence import sequence
from tests.driver_use import (
    INVALID,
    NO_CONTEXT,
    NO_MEMORY,
    Code,
    G,
    code,
    create,
    desc,
    ok,
    prop,
    reserve,
    started,
    usable,
)

CALLS = sorted(name for name in vars(Driver) if re.match("cu[A-Z]", name))
ENTERED = [name for name in CALLS if not name.startswith("cuGetError")]


@pytest.fixture
def device() -> Device:
    return Device(capacity=8 * G, granularity=G)


@pytest.fixture
def driver(device: Device) -> Driver:
    return started(device)


def test_every_rule_has_a_test() -> None:
    rules = re.findall(r"^  (\w+): ", driver_model.__doc__ or "", re.MULTILINE)
    files = Path(__file__).parent.glob("test_driver_*.py")
    tests = re.findall(r"^def test_(\w+)", "".join(map(Path.read_text, files)), re.MULTILINE)
    assert (rules[0], rules[-1]) == ("initialised", "event_context")
    assert set(rules) - set(tests) == set()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_parameters_of_the_real_function(name: str) -> None:
    real = list(inspect.signature(getattr(cuda, name)).parameters)
    assert list(inspect.signature(getattr(Driver, name)).parameters) == ["self", *real]


@pytest.mark.parametrize("name", ENTERED)
def test_a_refused_call_returns_a_none_for_each_value_of_the_real_function(name: str) -> None:
    parameters = inspect.signature(getattr(cuda, name)).parameters
    driver = Driver(Device(8 * G))
    driver.fail_at(1, Code.CUDA_ERROR_UNKNOWN)
    returns = getattr(cuda, name).__doc__.partition("Returns\n")[2].partition("See Also")[0]
    values = re.findall(r"^ *\w+ : ", returns, re.MULTILINE)
    found = getattr(driver, name)(*[0] * len(parameters))
    assert found == (Code.CUDA_ERROR_UNKNOWN, *[None] * len(values))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cuInit", (1,)),
        ("cuMemAddressReserve", (G, 0, 0, 1)),
        ("cuMemCreate", (G, prop(), 1)),
        ("cuMemMap", (1 << 40, G, 0, 1, 1)),
    ],
)
def test_unused_flags_are_zero(driver: Driver, name: str, arguments: tuple[Any, ...]) -> None:
    assert reserve(driver) == 1 << 40
    assert int(create(driver)) == 1
    assert code(getattr(driver, name)(*arguments)) == INVALID
    ok(getattr(driver, name)(*arguments[:-1], 0))


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("cuMemCreate", (G, desc(), 0), TypeError),
        ("cuMemSetAccess", (1 << 40, G, [prop()], 1), TypeError),
        ("cuMemSetAccess", (1 << 40, G, [desc()], 2), RuntimeError),
        ("cuMemsetD8Async", (1 << 40, 256, G, 0), OverflowError),
    ],
)
def test_arguments_the_bindings_refuse(
    driver: Driver, name: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(driver, name)(*arguments)


@pytest.mark.parametrize("part", ["type", "location.type"])
def test_only_device_memory_is_modelled(driver: Driver, part: str) -> None:
    other = prop()
    if part == "type":
        other.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    else:
        other.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    assert code(driver.cuMemCreate(G, other, 0)) == INVALID


def test_types_and_constants_are_those_of_the_real_module(driver: Driver) -> None:
    assert driver.CUresult is cuda.CUresult
    assert driver.CUmemAllocationProp is cuda.CUmemAllocationProp
    assert driver.CUDA_VERSION == cuda.CUDA_VERSION
    with pytest.raises(NotImplementedError, match="not modelled"):
        driver.cuDeviceGetAttribute(cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0)
    with pytest.raises(AttributeError, match="cuMemAlloc: not modelled"):
        driver.cuMemAlloc(G)


# Contexts.


@pytest.mark.parametrize("name", [name for name in ENTERED if name != "cuInit"])
def test_initialised(name: str) -> None:
    parameters = inspect.signature(getattr(cuda, name)).parameters
    found = getattr(Driver(Device(8 * G)), name)(*[0] * len(parameters))
    assert code(found) == Code.CUDA_ERROR_NOT_INITIALIZED


def test_context_per_thread(driver: Driver) -> None:
    current = ok(driver.cuCtxGetCurrent())
    seen: list[Any] = []

    def other() -> None:
        seen.append(int(ok(driver.cuCtxGetCurrent())))
        seen.append(code(driver.cuMemAddressReserve(G, 0, 0, 0)))
        seen.append(code(driver.cuCtxPopCurrent()))
        ok(driver.cuCtxPushCurrent(current))
        seen.append(code(driver.cuMemGetInfo()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0, NO_CONTEXT, NO_CONTEXT, Code.CUDA_SUCCESS]
    assert driver.leaks() == {"retained": [0], "pushed": [0]}
    assert ok(driver.cuCtxPopCurrent()) == current
    assert int(ok(driver.cuCtxGetCurrent())) == 0


@pytest.mark.parametrize(
    "name",
    [
        *("cuMemGetInfo", "cuMemAddressReserve", "cuMemAddressFree", "cuMemCreate"),
        *("cuMemRelease", "cuMemMap", "cuMemUnmap", "cuMemSetAccess", "cuMemsetD8Async"),
        *("cuMemcpyDtoH", "cuEventCreate", "cuEventRecord", "cuEventSynchronize"),
        *("cuEventDestroy", "cuStreamSynchronize"),
    ],
)
def test_a_call_that_needs_a_context_says_so(driver: Driver, name: str) -> None:
    ok(driver.cuCtxPopCurrent())
    parameters = inspect.signature(getattr(cuda, name)).parameters
    assert code(getattr(driver, name)(*[0] * len(parameters))) == NO_CONTEXT


def test_primary_context(driver: Driver) -> None:
    context = ok(driver.cuDevicePrimaryCtxRetain(0))
    assert context == ok(driver.cuCtxGetCurrent())
    ok(driver.cuDevicePrimaryCtxRelease(0))
    ok(driver.cuMemGetInfo())
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert code(driver.cuDevicePrimaryCtxRelease(0)) == NO_CONTEXT
    assert ok(driver.cuCtxGetCurrent()) == context
    assert code(driver.cuMemGetInfo()) == Code.CUDA_ERROR_CONTEXT_IS_DESTROYED
    assert code(driver.cuCtxPushCurrent(context)) == NO_CONTEXT


def test_set_current(driver: Driver) -> None:
    first = ok(driver.cuCtxGetCurrent())
    ok(driver.cuCtxSetCurrent(0))
    assert code(driver.cuCtxPopCurrent()) == NO_CONTEXT
    ok(driver.cuCtxSetCurrent(first))
    ok(driver.cuCtxPushCurrent(first))
    ok(driver.cuCtxSetCurrent(cuda.CUcontext(0)))
    assert driver.leaks()["pushed"] == [0]
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert code(driver.cuCtxSetCurrent(first)) == NO_CONTEXT


def test_each_device_has_its_own_context_memory_and_uuid() -> None:
    driver = started(Device(8 * G), Device(4 * G))
    assert ok(driver.cuMemGetInfo()) == (8 * G, 8 * G)
    ok(driver.cuCtxPushCurrent(ok(driver.cuDevicePrimaryCtxRetain(1))))
    ok(driver.cuMemCreate(G, prop(1), 0))
    assert ok(driver.cuMemGetInfo()) == (3 * G, 4 * G)
    assert len({ok(driver.cuDeviceGetUuid(i)).bytes for i in (0, 1)}) == 2
    assert code(driver.cuDeviceGet(2)) == Code.CUDA_ERROR_INVALID_DEVICE
    assert code(driver.cuMemCreate(G, prop(2), 0)) == Code.CUDA_ERROR_INVALID_DEVICE


def test_a_device_without_virtual_memory_says_so() -> None:
    driver = started(Device(8 * G, vmm=False))
    attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    assert ok(driver.cuDeviceGetAttribute(attribute, 0)) == 0
    assert code(driver.cuMemCreate(G, prop(), 0)) == Code.CUDA_ERROR_NOT_SUPPORTED


# What tests do with the model.


def test_a_call_that_is_to_fail_does_nothing(driver: Driver, device: Device) -> None:
    driver.fail_at(2, NO_MEMORY)
    create(driver)
    before = driver.leaks(), device.used
    assert driver.cuMemCreate(G, prop(), 0) == (NO_MEMORY, None)
    assert (driver.leaks(), device.used) == before
    create(driver)
    assert driver.calls["cuMemCreate"] == 3
    driver.fail_at(1, NO_MEMORY)
    driver.forgive()
    create(driver)


def test_leaks_names_what_is_open(driver: Driver) -> None:
    base = reserve(driver)
    handle = usable(driver, base)
    event = ok(driver.cuEventCreate(0))
    assert driver.leaks() == {
        "handles": [int(handle)],
        "mappings": [base],
        "reservations": [base],
        "events": [int(event)],
        "retained": [0],
        "pushed": [0],
    }
    ok(driver.cuMemRelease(handle))
    ok(driver.cuMemUnmap(base, G))
    ok(driver.cuMemAddressFree(base, 8 * G))
    ok(driver.cuEventDestroy(event))
    ok(driver.cuCtxPopCurrent())
    ok(driver.cuDevicePrimaryCtxRelease(0))
    assert driver.leaks() == {}


def test_errors_have_a_name_and_a_text(driver: Driver) -> None:
    assert ok(driver.cuGetErrorName(NO_MEMORY)) == b"CUDA_ERROR_OUT_OF_MEMORY"
    assert ok(driver.cuGetErrorString(NO_MEMORY)) == b"out of memory"


@pytest.mark.parametrize("ordinal", [0, 1])
def test_the_sequence_for_a_real_device_passes_and_leaves_nothing(ordinal: int) -> None:
    devices = [Device(1024 * G, granularity=G), Device(1024 * G, granularity=G)]
    driver = Driver(*devices)
    sequence(driver, 2 * G, ordinal)
    assert driver.leaks() == {}
    assert [device.used for device in devices] == [0, 0]
    # It uses all that is modelled.
    assert {name for name in ENTERED if not driver.calls[name]} == set()


@pytest.mark.parametrize("k", [8, 15, 59])
def test_the_sequence_names_the_step_that_went_otherwise(k: int) -> None:
    driver = Driver(Device(1024 * G))
    expected = sequence(Driver(Device(1024 * G)), G)[k - 1]
    driver.fail_at(k, Code.CUDA_ERROR_UNKNOWN)
    with pytest.raises(AssertionError, match=f"{expected[0]}: CUDA_ERROR_UNKNOWN; expected"):
        sequence(driver, G)
