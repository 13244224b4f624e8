"""The driver model keeps the rules of addresses, memory and access that its docstring lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.driver_memory import GARBAGE, READ, Device, Fault
from tests.driver_model import Driver
from tests.driver_use import (
    INVALID,
    NO_MEMORY,
    Code,
    G,
    code,
    create,
    desc,
    mapped,
    ok,
    prop,
    reserve,
    started,
    usable,
)


@pytest.fixture
def device() -> Device:
    return Device(capacity=8 * G, granularity=G)


@pytest.fixture
def driver(device: Device) -> Driver:
    return started(device)


# Addresses.


@pytest.mark.parametrize(
    "call",
    [
        lambda driver, base, handle: driver.cuMemAddressReserve(G + 1, 0, 0, 0),
        lambda driver, base, handle: driver.cuMemAddressReserve(0, 0, 0, 0),
        lambda driver, base, handle: driver.cuMemAddressReserve(G, 0, 1, 0),
        lambda driver, base, handle: driver.cuMemCreate(G + 1, prop(), 0),
        lambda driver, base, handle: driver.cuMemCreate(0, prop(), 0),
        lambda driver, base, handle: driver.cuMemMap(base + 1, G, 0, handle, 0),
        lambda driver, base, handle: driver.cuMemMap(base, G - 1, 0, handle, 0),
        lambda driver, base, handle: driver.cuMemMap(base, G, 1, handle, 0),
        lambda driver, base, handle: driver.cuMemMap(base, 0, 0, handle, 0),
        lambda driver, base, handle: driver.cuMemUnmap(base + G + 1, G),
        lambda driver, base, handle: driver.cuMemUnmap(base + G, G + 1),
        lambda driver, base, handle: driver.cuMemUnmap(base + G, 0),
        lambda driver, base, handle: driver.cuMemSetAccess(base + G + 1, G, [desc()], 1),
        lambda driver, base, handle: driver.cuMemSetAccess(base + G, G + 1, [desc()], 1),
    ],
)
def test_granularity(driver: Driver, call: Callable[..., tuple[Any, ...]]) -> None:
    assert ok(driver.cuMemGetAllocationGranularity(prop(), 0)) == G
    base, handle = reserve(driver), create(driver)
    mapped(driver, base + G)
    before = driver.leaks()
    assert code(call(driver, base, handle)) == INVALID
    assert driver.leaks() == before


def test_reserve_alignment(driver: Driver) -> None:
    reserve(driver, G)
    assert int(ok(driver.cuMemAddressReserve(G, 64 * G, 0, 0))) % (64 * G) == 0
    assert code(driver.cuMemAddressReserve(G, 3 * G, 0, 0)) == INVALID
    first = reserve(driver, G)
    ok(driver.cuMemAddressFree(first, G))
    assert int(ok(driver.cuMemAddressReserve(G, 0, first, 0))) > first


def test_free_whole_reservation(driver: Driver) -> None:
    base = reserve(driver)
    assert code(driver.cuMemAddressFree(base, 4 * G)) == INVALID
    assert code(driver.cuMemAddressFree(base + 4 * G, 4 * G)) == INVALID
    ok(driver.cuMemAddressFree(base, 8 * G))
    assert code(driver.cuMemAddressFree(base, 8 * G)) == INVALID


def test_free_unmapped_reservation(driver: Driver) -> None:
    base = reserve(driver)
    mapped(driver, base + 7 * G)
    assert code(driver.cuMemAddressFree(base, 8 * G)) == INVALID
    ok(driver.cuMemUnmap(base + 7 * G, G))
    ok(driver.cuMemAddressFree(base, 8 * G))


# Memory.


def test_map_offset(driver: Driver) -> None:
    assert code(driver.cuMemMap(reserve(driver), G, G, create(driver, 2 * G), 0)) == INVALID


def test_map_inside_reservation(driver: Driver) -> None:
    base, handle = reserve(driver, 2 * G), create(driver, 2 * G)
    assert code(driver.cuMemMap(base + G, 2 * G, 0, handle, 0)) == INVALID
    assert code(driver.cuMemMap(base - G, 2 * G, 0, handle, 0)) == INVALID
    assert code(driver.cuMemMap(base, 2 * G, 0, create(driver), 0)) == INVALID
    ok(driver.cuMemMap(base, 2 * G, 0, handle, 0))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_map_once(driver: Driver, first: int) -> None:
    base = reserve(driver)
    mapped(driver, base + G, 2 * G)
    handle = create(driver, 2 * G)
    assert code(driver.cuMemMap(base + first * G, 2 * G, 0, handle, 0)) == INVALID
    ok(driver.cuMemMap(base + 3 * G, 2 * G, 0, handle, 0))


def test_alias(driver: Driver) -> None:
    base = reserve(driver)
    handle = usable(driver, base)
    ok(driver.cuMemMap(base + G, G, 0, handle, 0))
    ok(driver.cuMemSetAccess(base + G, G, [desc()], 1))
    driver.launch(writes=[(base + G, 5, G)])
    assert driver.read(base, G) != b"\x05" * G
    driver.run_some()
    assert driver.read(base, G) == b"\x05" * G
    ok(driver.cuMemUnmap(base + G, G))
    assert driver.read(base, G) == b"\x05" * G


@pytest.mark.parametrize(("start", "pages"), [(0, 1), (1, 1), (0, 3), (0, 4), (2, 1), (4, 1)])
def test_unmap_one_mapping(driver: Driver, start: int, pages: int) -> None:
    base = reserve(driver)
    mapped(driver, base, 2 * G)
    mapped(driver, base + 2 * G, 2 * G)
    assert code(driver.cuMemUnmap(base + start * G, pages * G)) == INVALID
    assert driver.leaks()["mappings"] == [base, base + 2 * G]
    ok(driver.cuMemUnmap(base, 2 * G))
    assert driver.leaks()["mappings"] == [base + 2 * G]


def test_remap(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    driver.launch(writes=[(base, 1, G)])
    ok(driver.cuStreamSynchronize(0))
    ok(driver.cuMemUnmap(base, G))
    assert code(driver.cuMemUnmap(base, G)) == INVALID
    usable(driver, base)
    assert driver.read(base, G) == bytes([GARBAGE]) * G


@pytest.mark.parametrize("released_first", [False, True])
def test_memory_returns(driver: Driver, device: Device, released_first: bool) -> None:
    base = reserve(driver)
    handle = mapped(driver, base)
    ok(driver.cuMemMap(base + G, G, 0, handle, 0))
    last = [lambda: driver.cuMemUnmap(base + G, G), lambda: driver.cuMemRelease(handle)]
    ok(driver.cuMemUnmap(base, G))
    if released_first:
        last.reverse()
    ok(last[0]())
    assert device.used == G
    ok(last[1]())
    assert device.used == 0


def test_release_once(driver: Driver) -> None:
    base = reserve(driver)
    handle = usable(driver, base)
    ok(driver.cuMemRelease(handle))
    assert len(driver.read(base, G)) == G
    assert code(driver.cuMemRelease(handle)) == INVALID
    assert code(driver.cuMemMap(base + G, G, 0, handle, 0)) == INVALID


def test_garbage(driver: Driver) -> None:
    base = reserve(driver)
    usable(driver, base)
    assert 0 not in driver.read(base, G)


def test_out_of_memory(driver: Driver, device: Device) -> None:
    other = started(device)  # another process
    handle = create(other, 4 * G)
    assert ok(driver.cuMemGetInfo()) == (4 * G, 8 * G)
    device.take(3 * G)
    assert code(driver.cuMemCreate(2 * G, prop(), 0)) == NO_MEMORY
    create(driver)
    assert code(driver.cuMemCreate(G, prop(), 0)) == NO_MEMORY
    ok(other.cuMemRelease(handle))
    create(driver, 4 * G)
    device.give(3 * G)
    create(driver, 3 * G)
    assert device.free == 0


# Access.


def test_no_access_at_first(driver: Driver) -> None:
    base = reserve(driver)
    for _ in range(2):
        mapped(driver, base)
        with pytest.raises(Fault, match="no access"):
            driver.read(base, G)
        ok(driver.cuMemSetAccess(base, G, [desc()], 1))
        driver.read(base, G)
        ok(driver.cuMemUnmap(base, G))
        with pytest.raises(Fault, match="not mapped"):
            driver.read(base, G)


@pytest.mark.parametrize(
    ("start", "pages", "accepted"),
    [(0, 2, True), (0, 3, True), (2, 1, True), (0, 1, False), (1, 2, False), (0, 4, False)],
)
def test_access_whole_mappings(driver: Driver, start: int, pages: int, accepted: bool) -> None:
    base = reserve(driver)
    mapped(driver, base, 2 * G)
    mapped(driver, base + 2 * G)  # the fourth page is a hole
    mapped(driver, base + 4 * G)
    found = code(driver.cuMemSetAccess(base + start * G, pages * G, [desc()], 1))
    assert found == (Code.CUDA_SUCCESS if accepted else INVALID)
    if accepted:
        assert len(driver.read(base + start * G, pages * G)) == pages * G
    else:
        with pytest.raises(Fault, match="no access"):
            driver.read(base + start * G, 1)


def test_access_spans_no_hole(driver: Driver) -> None:
    base = reserve(driver)
    mapped(driver, base)
    mapped(driver, base + 2 * G)
    assert code(driver.cuMemSetAccess(base, 3 * G, [desc()], 1)) == INVALID


def test_access_per_device() -> None:
    driver = started(Device(8 * G), Device(8 * G))
    base = reserve(driver)
    mapped(driver, base)
    ok(driver.cuMemSetAccess(base, G, [desc(1), desc(0, READ)], 2))
    assert driver.read(base, G, device=1) == driver.read(base, G, device=0)
    driver.launch(writes=[(base, 1, G)], device=1)
    driver.launch(writes=[(base, 2, G)], device=0)
    assert driver.run_some() == 1
    with pytest.raises(Fault, match="device 0 touches"):
        driver.run_some()
    assert driver.read(base, G) == b"\x01" * G
    assert code(driver.cuMemSetAccess(base, G, [desc(2)], 1)) == Code.CUDA_ERROR_INVALID_DEVICE
