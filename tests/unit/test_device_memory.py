"""GPU memory on the model of the driver: pages that come and go under addresses that stay."""

from __future__ import annotations

import random
from collections.abc import Callable
from ctypes.util import find_library
from typing import Any
from unittest.mock import Mock

import pytest
from cuda.bindings.driver import CUresult
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import Plan
from kvcached_patch.errors import DriverError, KvcachedPatchError, PoolExhausted
from kvcached_patch.memory.device_pages import DevicePages
from kvcached_patch.memory.driver import load
from kvcached_patch.memory.mapped_range import MappedRange
from kvcached_patch.pool import ElasticPool
from tests.driver_memory import Device
from tests.driver_model import Driver

PAGE = 16
STREAM = 7


class Gpu:
    """One process on a GPU of the model, with a range of `pages` pages."""

    def __init__(self, pages: int = 8, capacity: int = 64, device: Device | None = None) -> None:
        self.device = device or Device(capacity * PAGE, granularity=PAGE)
        self.driver = Driver(self.device)
        self.driver.cuInit(0)
        self.pages = DevicePages(self.driver, 0)
        self.range = MappedRange(self.pages, pages * PAGE, lambda: STREAM)

    def read(self, page: int) -> bytes:
        """What a kernel would find there, after all that was launched."""
        self.driver.run_some(1000)
        return bytes(self.driver.read(self.range.address + page * PAGE, PAGE))

    def write(self, page: int, value: int) -> None:
        """Launch a kernel that fills a page."""
        self.driver.launch(STREAM, writes=[(self.range.address + page * PAGE, value, PAGE)])

    def committed(self) -> int:
        """Bytes of pages of the range's own."""
        return PAGE * sum(page is not None for page in self.range.pages)

    def state(self) -> Any:
        """All that a refused call must leave as it was, but for spare pages."""
        contents = [self.read(page) for page in range(8)]
        open_now = self.driver.leaks()
        kinds = ("mappings", "reservations", "events", "retained")
        return contents, list(self.range.pages), [sorted(open_now[kind]) for kind in kinds]

    def close(self) -> None:
        """Give all back; nothing may be left."""
        self.range.fence()
        self.range.close()
        self.pages.close()
        assert self.driver.leaks() == {}
        assert self.device.used == 0


def test_r1_every_address_reads_as_zeros_from_the_start() -> None:
    gpu = Gpu()
    assert all(gpu.read(page) == bytes(PAGE) for page in range(8))
    assert gpu.device.used == PAGE  # the page of zeros
    gpu.close()


def test_r3_a_page_reads_as_zeros_whoever_had_it() -> None:
    gpu = Gpu()
    gpu.range.commit(2 * PAGE, 4 * PAGE)
    assert gpu.read(2) + gpu.read(3) == bytes(2 * PAGE)
    gpu.write(2, 9)
    assert gpu.read(2) == b"\x09" * PAGE
    assert gpu.read(1) == bytes(PAGE)
    gpu.range.fence()
    gpu.range.release(2 * PAGE, 4 * PAGE)
    assert gpu.read(2) == bytes(PAGE)
    gpu.range.commit(2 * PAGE, 4 * PAGE)
    assert gpu.read(2) + gpu.read(3) == bytes(2 * PAGE)
    assert gpu.committed() == 2 * PAGE
    gpu.close()


def test_d2_what_warm_up_wrote_to_invented_blocks_is_cleared() -> None:
    gpu = Gpu()
    gpu.write(5, 9)
    assert gpu.read(6) == b"\x09" * PAGE  # one page lies under all
    gpu.range.release(0, 8 * PAGE)
    assert gpu.read(6) == bytes(PAGE)
    gpu.close()


def test_calls_for_each_page() -> None:
    gpu = Gpu()
    gpu.pages.supply(6)
    counted = gpu.driver.calls.copy()
    gpu.range.commit(0, 6 * PAGE)
    spent = gpu.driver.calls - counted
    assert spent == {
        "cuCtxSetCurrent": 1,
        "cuMemUnmap": 6,
        "cuMemMap": 6,
        "cuMemSetAccess": 1,
        "cuMemsetD8Async": 1,
    }
    gpu.range.fence()
    counted = gpu.driver.calls.copy()
    gpu.range.release(0, 6 * PAGE)
    assert gpu.driver.calls - counted == spent
    gpu.close()


def test_spare_pages_are_used_first_and_kept_within_their_bound() -> None:
    gpu = Gpu()
    assert gpu.pages.supply(5) == 5
    created = gpu.driver.calls["cuMemCreate"]
    gpu.range.commit(0, 3 * PAGE)
    assert gpu.driver.calls["cuMemCreate"] == created
    gpu.range.fence()
    gpu.range.release(0, 3 * PAGE)
    assert gpu.device.used == 6 * PAGE
    gpu.pages.keep(2)
    assert gpu.pages.owned == 2
    assert gpu.device.used == 3 * PAGE
    gpu.range.commit(0, 3 * PAGE)  # one more than is spare
    gpu.pages.keep(0)
    assert gpu.pages.owned == 3
    gpu.close()


def test_a_page_is_committed_once() -> None:
    gpu = Gpu()
    gpu.range.commit(0, PAGE)
    with pytest.raises(DriverError, match="bytes 0 to 32: a page is committed already"):
        gpu.range.commit(0, 2 * PAGE)
    gpu.close()


def test_out_of_memory_is_told_apart_and_leaves_what_was_there() -> None:
    gpu = Gpu(capacity=4)
    gpu.range.commit(0, 2 * PAGE)
    before = gpu.state()
    with pytest.raises(PoolExhausted, match=r"GPU-.*: 3 pages of 16 bytes wanted; the GPU has 1"):
        gpu.range.commit(2 * PAGE, 5 * PAGE)
    assert gpu.state() == before
    assert gpu.pages.supply(9) == 3
    gpu.range.commit(2 * PAGE, 3 * PAGE)
    gpu.close()


def test_two_processes_on_one_gpu_have_what_the_other_left() -> None:
    device = Device(6 * PAGE, granularity=PAGE)
    one, two = Gpu(device=device), Gpu(device=device)
    assert one.pages.uuid == two.pages.uuid
    assert one.pages.supply(3) == 3
    assert two.pages.supply(3) == 1
    one.pages.keep(1)
    assert two.pages.supply(3) == 3
    two.range.close()
    two.pages.close()
    one.range.close()
    one.pages.close()
    assert device.used == 0


def test_the_driver_s_name_of_the_code_and_the_call_are_told() -> None:
    gpu = Gpu()
    gpu.driver.fail_at(3, CUresult.CUDA_ERROR_ECC_UNCORRECTABLE)
    with pytest.raises(DriverError, match=r"cuMemCreate\(16, 0\): CUDA_ERROR_ECC_UNCORRECTABLE"):
        gpu.pages.supply(1)
    gpu.close()


def test_a_gpu_without_virtual_memory_management_is_refused() -> None:
    driver = Driver(Device(PAGE, granularity=PAGE, vmm=False))
    driver.cuInit(0)
    with pytest.raises(DriverError, match="GPU 0: found no virtual memory management"):
        DevicePages(driver, 0)
    assert driver.leaks() == {}


def test_closing_with_pages_in_use_is_an_error() -> None:
    gpu = Gpu()
    gpu.range.commit(0, PAGE)
    with pytest.raises(DriverError, match="1 pages are in use"):
        gpu.pages.close()
    gpu.close()


def survives(gpu: Gpu, call: Callable[[], object]) -> None:
    """Whichever of its driver calls fails, nothing has changed, and the next try succeeds."""
    before = gpu.state()
    for k in range(1, 100):
        gpu.driver.fail_at(k, CUresult.CUDA_ERROR_UNKNOWN)
        try:
            call()
        except DriverError:
            gpu.range.fence()
            assert gpu.state() == before
        else:
            gpu.driver.forgive()
            return
    raise AssertionError("never succeeds")


def test_r2_a_commit_survives_failure_at_every_call() -> None:
    gpu = Gpu()
    gpu.range.commit(6 * PAGE, 7 * PAGE)
    gpu.write(6, 5)
    survives(gpu, lambda: gpu.range.commit(0, 4 * PAGE))
    assert gpu.committed() == 5 * PAGE
    gpu.close()


def test_r2_a_release_survives_failure_at_every_call() -> None:
    gpu = Gpu()
    gpu.range.commit(0, 4 * PAGE)
    gpu.write(1, 5)
    gpu.range.fence()
    survives(gpu, lambda: gpu.range.release(0, 4 * PAGE))
    assert gpu.committed() == 0
    gpu.close()


def test_reserving_survives_failure_at_every_call() -> None:
    gpu = Gpu()
    ranges: list[MappedRange] = []
    before = gpu.state()
    for k in range(1, 20):
        gpu.driver.fail_at(k, CUresult.CUDA_ERROR_UNKNOWN)
        try:
            ranges.append(MappedRange(gpu.pages, 4 * PAGE, lambda: STREAM))
        except DriverError:
            assert gpu.state() == before
        else:
            break
    gpu.driver.forgive()
    ranges[0].close()
    assert gpu.state() == before
    gpu.close()


def test_closing_goes_on_after_failure_at_every_call() -> None:
    gpu = Gpu()
    gpu.range.commit(0, 4 * PAGE)
    gpu.range.fence()
    for close in (gpu.range.close, gpu.pages.close):
        gpu.driver.fail_at(2, CUresult.CUDA_ERROR_UNKNOWN)
        failures = 0
        while True:
            try:
                close()
            except DriverError:
                failures += 1
                # One call further than before, more or less: each fails once.
                gpu.driver.fail_at(2 + failures % 3, CUresult.CUDA_ERROR_UNKNOWN)
            else:
                break
        assert failures > 4
        gpu.driver.forgive()
    assert gpu.driver.leaks() == {}
    assert gpu.device.used == 0


@pytest.mark.parametrize("k", range(1, 20))
def test_starting_survives_failure_at_every_call(k: int) -> None:
    driver = Driver(Device(4 * PAGE, granularity=PAGE))
    driver.cuInit(0)
    driver.fail_at(k, CUresult.CUDA_ERROR_UNKNOWN)
    try:
        pages = DevicePages(driver, 0)
    except DriverError:
        assert driver.leaks() == {}
    else:
        driver.forgive()
        pages.close()
    assert driver.leaks() == {}


def test_without_a_driver_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    if find_library("cuda"):  # then as cuda-bindings would raise it
        name = "cuda.bindings.driver.cuInit"
        monkeypatch.setattr(name, Mock(side_effect=RuntimeError("no libcuda.so.1")))
    with pytest.raises(DriverError, match=r"NVIDIA's driver library: not found \("):
        load()


def test_d3_a_thread_s_own_context_is_kept_aside() -> None:
    """A range may go in the midst of another one's calls, with all that was owned."""
    gpu = Gpu()
    _, other = gpu.driver.cuDevicePrimaryCtxRetain(0)
    for before in (0, other):
        gpu.driver.cuCtxSetCurrent(before)
        gpu.write(2, 9)
        with gpu.pages.aside():
            assert gpu.driver.run_some() == 0, "all that was launched is done"
            gpu.pages.call("cuCtxSetCurrent", 0)
        assert int(gpu.driver.cuCtxGetCurrent()[1]) == int(before)
    gpu.driver.cuDevicePrimaryCtxRelease(0)
    gpu.close()


def test_closing_a_range_once_more_does_nothing() -> None:
    gpu = Gpu()
    second = MappedRange(gpu.pages, PAGE, lambda: STREAM)
    second.close()
    second.close()
    assert gpu.pages.ranges == 1
    gpu.close()


class Engine:
    """A pool of two ranges on the model, steps in flight that read, also astray, and write."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.random = random.Random(seed)
        self.gpu = Gpu(10, capacity)
        second = MappedRange(self.gpu.pages, 7 * PAGE, lambda: STREAM)
        self.ranges = [self.gpu.range, second]
        self.sizes = [10 * PAGE, 7 * PAGE]
        # Slabs of two blocks: of 20 bytes in one range, of 13 at an odd place in the other.
        self.cells = [Cells(0, 0, 20), Cells(1, 5, 13)]
        self.pool = ElasticPool(self.ranges, self.sizes, self.cells, 8, 2, self.gpu.pages)
        self.committed: set[int] = set()
        self.content: dict[tuple[int, int], int] = {}
        self.sequence = 0

    def extent(self, block: int) -> list[tuple[int, int]]:
        return [
            (self.ranges[c.range_index].address + c.base + block * c.stride, c.stride)
            for c in self.cells
        ]

    def step(self) -> None:
        """A plan, then a kernel that writes committed blocks and reads any others."""
        draw = self.random
        commit = {s for s in range(4) if s not in self.committed and draw.random() < 0.4}
        release = {s for s in self.committed if draw.random() < 0.3}
        idle = draw.random() < 0.2
        supplied = self.pool.supply(len(self.committed | commit))
        if supplied < len(self.committed | commit):
            commit = set()
        plan = Plan(self.sequence, tuple(commit), tuple(release), keep=draw.choice([None, 0, 2, 9]))
        self.pool.apply(plan, idle=idle)
        self.sequence += 1
        self.committed = (self.committed | commit) - release
        if idle:
            return
        used = self.committed | release  # what a plan releases its own step may still use
        blocks = [b for s in used for b in (2 * s, 2 * s + 1)]
        writes = [(a, draw.randrange(1, 99), n) for b in blocks for a, n in self.extent(b)]
        strays = [e for b in range(8) for e in self.extent(b)]
        self.gpu.driver.launch(STREAM, writes=writes, reads=strays)
        self.gpu.driver.run_some(draw.randrange(3))

    def check(self) -> None:
        """Once all work is done: pages of their own exactly under what is needed, elsewhere zeros.

        The last plan's releases are still pending.
        """
        self.ranges[0].fence()
        owned = [p for r in self.ranges for p in r.pages if p is not None]
        assert len({int(page) for page in owned}) == len(owned)  # D1
        driver = self.gpu.driver
        for each, size in zip(self.ranges, self.sizes, strict=True):
            for number, page in enumerate(each.pages):
                if page is None:
                    assert driver.read(each.address + number * PAGE, PAGE) == bytes(PAGE)
            assert len(each.pages) == size // PAGE

    def close(self) -> None:
        self.ranges[0].fence()
        self.ranges[1].close()
        self.gpu.close()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), capacity=st.sampled_from([6, 12, 64]))
def test_random_plans_with_steps_in_flight(seed: int, capacity: int) -> None:
    engine = Engine(seed, capacity)
    for _ in range(25):
        engine.step()  # the model raises Fault for a page exchanged under a step in flight
    engine.check()
    engine.close()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9), k=st.integers(1, 120))
def test_p3_a_plan_that_fails_leaves_none_of_its_slabs(seed: int, k: int) -> None:
    engine = Engine(seed, 64)
    engine.gpu.driver.fail_at(k, CUresult.CUDA_ERROR_UNKNOWN)
    try:
        for _ in range(8):
            engine.step()
    except KvcachedPatchError:
        engine.check()
    engine.gpu.driver.forgive()
    engine.close()


def test_p4_an_empty_plan_calls_nothing() -> None:
    engine = Engine(0, 64)
    engine.pool.apply(Plan(0, (0,)), idle=False)
    calls = engine.gpu.driver.calls.copy()
    for sequence in range(1, 5):
        engine.pool.apply(Plan(sequence, keep=9), idle=False)
    assert engine.gpu.driver.calls == calls
    engine.close()
