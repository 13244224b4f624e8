"""Capacity on a GPU, by vLLM's own functions, whatever neighbours do while an engine starts."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils.mem_utils import MemoryProfilingResult, MemorySnapshot, memory_profiling
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.utils import request_memory

from kvcached_patch import config
from kvcached_patch.engines import vllm_sizing
from tests.bare import stock
from tests.slots import Setup
from tests.steps import vllm_config

GIB = 2**30
WEIGHTS, ACTIVATIONS = 5 * GIB, 3 * GIB


class Gpu:
    """What PyTorch would say of a GPU; other processes hold `others` bytes of it."""

    def __init__(self) -> None:
        self.total, self.others, self.torch, self.peak = 80 * GIB, 0, 0, 0

    def info(self, device: Any = None) -> tuple[int, int]:
        return self.total - self.others - self.torch, self.total

    def reset_peak(self, device: Any = None) -> None:
        self.peak = self.torch

    def stats(self, device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.peak": self.peak, "allocated_bytes.all.current": self.torch}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """In the place of the functions by which vLLM asks for a device's memory."""
    device = Gpu()
    for name, answer in {
        "get_memory_info": device.info,
        "memory_stats": device.stats,
        "memory_reserved": lambda device_=None: device.torch,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": device.reset_peak,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, answer, raising=False)
    # Up to 0.27.
    monkeypatch.setattr(type(current_platform), "mem_get_info", device.info, raising=False)
    integrated = {"name": "is_integrated_gpu", "value": lambda *_: False}
    monkeypatch.setattr(type(current_platform), raising=False, **integrated)
    return device


@pytest.fixture(params=["cuda", "static"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kind of memory of the worker whose device is being initialized."""
    monkeypatch.setenv(config.POOL, request.param)
    worker = object.__new__(Worker)
    worker.vllm_config = vllm_config(Setup())
    with pytest.raises(AttributeError, match="device_config"):  # vLLM's own part: there is no GPU
        worker.init_device()
    yield request.param
    vllm_sizing._supplied = False


def start(gpu: Gpu, others: tuple[int, int]) -> int:
    """Bytes for the KV cache of an engine that starts while others hold so much, then so much."""
    gpu.others, gpu.torch = others[0], 0
    device = torch.device("cuda", 0)
    before = MemorySnapshot(device=device)
    cache_config = SimpleNamespace(gpu_memory_utilization=0.9)
    requested = int(request_memory(before, cache_config))
    gpu.torch = WEIGHTS
    with memory_profiling(before, weights_memory=WEIGHTS) as result:
        gpu.peak = WEIGHTS + ACTIVATIONS
        gpu.others = others[1]
    # Worker.determine_available_memory asserts that of a device's free memory.
    assert before.free_memory >= result.after_profile.free_memory, "memory was released meanwhile"
    return requested - int(result.non_kv_cache_memory)


def one_graph(gpu: Gpu) -> int:
    """As vLLM's `profile_cudagraph_memory` tells what one takes, while a neighbour goes to work."""
    before = torch.accelerator.get_memory_info()[0]
    gpu.torch += GIB
    gpu.others += 9 * GIB
    return int(before - torch.accelerator.get_memory_info()[0])


ALONE = int(80 * GIB * 0.9) - WEIGHTS - ACTIVATIONS


@pytest.mark.parametrize(
    "others",
    [(0, 0), (60 * GIB, 60 * GIB), (60 * GIB, 5 * GIB), (5 * GIB, 60 * GIB)],
    ids=["alone", "held", "released", "taken"],
)
def test_kvcached_193_448_capacity_is_the_device_s(
    gpu: Gpu, pool: str, others: tuple[int, int]
) -> None:
    if pool == "cuda":
        assert start(gpu, others) == pytest.approx(ALONE, abs=1)
    elif others[0] > 8 * GIB:
        with pytest.raises(ValueError, match="Free memory on device"):
            start(gpu, others)
    elif others == (0, 0):
        assert start(gpu, others) == pytest.approx(ALONE, abs=1)
    else:
        assert start(gpu, others) < ALONE / 2


def test_vllm_110_memory_that_is_released_meanwhile_ends_a_stock_engine(gpu: Gpu) -> None:
    """What the assertion above stands for."""
    with stock(), pytest.raises(AssertionError, match="released meanwhile"):
        start(gpu, (7 * GIB, 0))


def test_vllm_448_a_graph_takes_what_pytorch_holds_for_it(gpu: Gpu, pool: str) -> None:
    found = vllm_sizing.profile_graphs(lambda: one_graph(gpu), None, (), {})
    assert found == (GIB if pool == "cuda" else 10 * GIB)
    assert torch.accelerator.get_memory_info() == gpu.info(), "restored"


@pytest.mark.parametrize("counted", [True, False])
def test_graphs_are_not_kept_once_more_as_activations(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """As `Worker.determine_available_memory` leaves it, by whose profile they are counted in."""
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", str(int(counted)))
    in_it = counted and "transient_peak_headroom" in MemoryProfilingResult.__dataclass_fields__
    worker = SimpleNamespace(
        peak_activation_memory=ACTIVATIONS + GIB * in_it, cudagraph_memory_estimate=GIB
    )
    kept = []
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: kept.append(nbytes))
    vllm_sizing.keep_activations(worker, torch.device("cpu"))
    assert kept == [ACTIVATIONS]


def test_activations_that_others_left_no_room_for_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = SimpleNamespace(peak_activation_memory=ACTIVATIONS)

    def full(nbytes: int, **_: Any) -> None:
        raise torch.OutOfMemoryError(str(nbytes))

    monkeypatch.setattr(torch, "empty", full)
    vllm_sizing.keep_activations(worker, torch.device("cpu"))
    assert f"has no {ACTIVATIONS} bytes left for activations" in caplog.text
