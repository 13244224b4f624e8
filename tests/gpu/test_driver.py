"""The driver model's rules on a real driver, and what its calls cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvcached_patch.memory.cuda import missing
from kvcached_patch.memory.device_pages import DevicePages
from kvcached_patch.memory.driver import load
from tests.driver_memory import Device
from tests.driver_model import Driver
from tests.driver_sequence import sequence
from tests.gpu import measured

PAGES = 256


def pages() -> DevicePages:
    """Of the first GPU; a test that makes them closes them."""
    torch.cuda.init()
    return DevicePages(load(), 0)


def test_nothing_is_missing() -> None:
    assert missing() is None
    measured.FOUND["gpu"] = torch.cuda.get_device_name(0)
    measured.FOUND["torch"] = torch.__version__
    measured.FOUND["cuda"] = torch.version.cuda


def test_the_model_says_what_the_driver_says() -> None:
    """Step by step the same codes, but where the manual names none."""
    own = pages()
    size = own.page_bytes
    own.close()
    real = sequence(load(), size)
    model = sequence(Driver(Device(64 * size, granularity=size)), size)
    assert [name for name, _ in real] == [name for name, _ in model]
    measured.FOUND["codes that differ"] = [
        (name, code, ours)
        for (name, code), (_, ours) in zip(real, model, strict=True)
        if code != ours
    ]


def test_the_uuid_is_nvidia_s() -> None:
    own = pages()
    uuid = own.uuid
    own.close()
    assert uuid.removeprefix("GPU-") == str(torch.cuda.get_device_properties(0).uuid)


def timed(call: Callable[..., Any], each: list[tuple[Any, ...]]) -> float:
    start = time.perf_counter()
    for arguments in each:
        call(*arguments)
    return time.perf_counter() - start


def test_rates_of_the_driver_s_calls() -> None:
    """Published for an A100: create 193 us, map 1.5, set access 36, unmap 26."""
    own = pages()
    own.enter()
    size = own.page_bytes
    base = own.reserve(PAGES * size)
    at = [(base + i * size,) for i in range(PAGES)]
    spent: dict[str, list[float]] = {}
    for _ in range(5):
        created = [own._create() for _ in range(2)]  # warm
        for handle in created:
            own.call("cuMemRelease", handle)
        start = time.perf_counter()
        handles = [own._create() for _ in range(PAGES)]
        spent.setdefault("create", []).append(time.perf_counter() - start)
        maps = [(address, handle) for (address,), handle in zip(at, handles, strict=True)]
        spent.setdefault("map", []).append(timed(own.map, maps))
        spent.setdefault("set access, page by page", []).append(
            timed(own.allow, [(address, size) for (address,) in at])
        )
        own.clear(base, PAGES * size, 0)
        torch.cuda.synchronize()
        spent.setdefault("unmap", []).append(timed(own.unmap, at))
        timed(own.map, maps)
        spent.setdefault("set access, all at once", []).append(
            timed(own.allow, [(base, PAGES * size)])
        )
        timed(own.unmap, at)
        release = [("cuMemRelease", handle) for handle in handles]
        spent.setdefault("release", []).append(timed(own.call, release))
    own.unreserve(base, PAGES * size)
    own.close()
    for name, seconds in spent.items():
        measured.times(f"{name}, per page", seconds, PAGES)
