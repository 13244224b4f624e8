"""What EngineCore agrees on with workers that have a GPU each, emulated in this process."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.executor.abstract import Executor

from kvcached_patch import config, memory
from kvcached_patch.core.pages import Plan
from kvcached_patch.engines import vllm_scheduler, vllm_worker
from kvcached_patch.engines.budgets import Budgets
from kvcached_patch.errors import DriverError, PoolExhausted
from kvcached_patch.ledger import Ledger, devices, ledger_path
from kvcached_patch.memory import cuda
from tests.bare import OneWorker, Stage, worker_of
from tests.lanes import ROOT

sys.path.append(str(ROOT / "tests" / "emulated"))
import cuda_emulated
from cuda_emulated.driver import GRANULARITY, Driver

BLOCKS = 64


class Workers(OneWorker, Executor):
    """Workers in this process, each of which reserves on a GPU of its own."""

    def __init__(self, *workers: Any) -> None:
        super().__init__(workers[0])
        self.workers = workers

    def collective_rpc(self, method: Any, timeout: Any = None, args: Sequence[Any] = ()) -> Any:
        found = []
        for number, worker in enumerate(self.workers):
            self.worker, cuda_emulated.ordinal = worker, number
            each = ([args[0][number]],) if method == "initialize_from_config" else args
            found += super().collective_rpc(method, timeout, each)
        return found

    def _init_executor(self) -> None:
        """They are there already."""

    def check_health(self) -> None:
        """They are well."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """As the emulation's plugin does it, for one test, with devices and ledgers of its own."""
    monkeypatch.setenv("CUDA_EMULATED_USED", str(tmp_path / "used"))
    monkeypatch.setenv("CUDA_EMULATED_CAPACITY", str(1 << 30))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv(config.POOL, "cuda")
    monkeypatch.setitem(memory.DEVICE_TYPES, "cuda", "cpu")
    driver = Driver()
    monkeypatch.setattr(cuda, "load", lambda: driver)
    monkeypatch.setattr(cuda, "CudaMemory", cuda_emulated.EmulatedMemory)
    yield
    vllm_scheduler.agree(None)
    gc.collect()  # engines give back what they have while their device is there


def started(*layers: int) -> tuple[Any, Sequence[Any]]:
    """What was agreed on with workers that have so many layers each, as pipeline stages do.

    And these workers, which keep their executor, as EngineCore does.
    """
    workers, plans = [], []
    for count in layers:
        stage = Stage()
        for number in range(count):
            stage.attention(f"model.layers.{number}.self_attn.attn")
        runner = stage.runner("V1")
        spec = runner.get_kv_cache_spec()
        block_bytes = sum(each.page_size_bytes for each in spec.values())
        workers.append(worker_of(runner))
        plans.append(stage.plan(spec, BLOCKS * block_bytes))
    executor = Workers(*workers)
    executor.initialize_from_config(plans)
    agreed = vllm_scheduler._agreed
    assert agreed is not None
    workers[0].executor = executor
    return agreed, workers


def pages(worker: Any) -> Any:
    """What a worker owns of its GPU."""
    return vllm_worker._bound(worker)._backing


@pytest.mark.usefixtures("gpus")
def test_each_gpu_has_a_ledger_of_its_own() -> None:
    agreed, workers = started(3, 1)
    assert isinstance(agreed.budget, Budgets)
    names = devices(config.ledger_dir())
    assert names == [pages(worker).uuid for worker in workers]
    assert agreed.budget.reserve(2)
    first, second = (Ledger(ledger_path(config.ledger_dir(), name)).engines() for name in names)
    assert first[0].committed == 3 * second[0].committed > 0
    assert first[0].reserved == 3 * second[0].reserved
    agreed.budget.close()


@pytest.mark.usefixtures("gpus")
def test_every_worker_has_the_pages_before_they_are_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed, workers = started(2, 1)
    assert agreed.supply.grow(5, 0.0) == 5
    first, second = (pages(worker).owned for worker in workers)
    assert first == 2 * second
    # The device, which the two share here, has enough more for one of them only.
    used = cuda.load().used()
    monkeypatch.setenv("CUDA_EMULATED_CAPACITY", str(used + (first + 2) * GRANULARITY))
    assert agreed.supply.grow(10, 1.0) < 10
    assert agreed.supply.grow(10, 1.1) == agreed.supply.slabs
    agreed.budget.close()


@pytest.mark.usefixtures("gpus")
def test_a_worker_on_another_machine_is_bounded_by_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # EngineCore asks after the last worker has, so it is where that one is.
    monkeypatch.setattr(socket, "gethostname", lambda: f"machine-{cuda_emulated.ordinal}")
    agreed, workers = started(1, 1)
    assert "without the shared ledger on other machines" in caplog.text
    assert devices(config.ledger_dir()) == [pages(workers[1]).uuid]
    agreed.budget.close()


@pytest.mark.usefixtures("gpus")
def test_a_gpu_without_a_page_ends_the_start_with_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While EngineCore can still shut them down: the scheduler is made only afterwards."""
    ended = []
    monkeypatch.setattr(Workers, "shutdown", lambda self: ended.append(self))
    agreed, _ = started(1)
    agreed.budget.close()
    monkeypatch.setenv("CUDA_EMULATED_CAPACITY", str(cuda.load().used() + 2 * GRANULARITY))
    with pytest.raises(PoolExhausted, match=r"pages for 0 slabs of \d+ bytes; expected at least 1"):
        started(2)
    assert len(ended) == 1
    for name in devices(config.ledger_dir()):
        assert not any(
            each.alive for each in Ledger(ledger_path(config.ledger_dir(), name)).engines()
        )


def price(worker: Any) -> int:
    """Pages of a slab."""
    return int(vllm_worker._bound(worker).pool._pages.price)


@pytest.mark.usefixtures("gpus")
def test_two_engines_in_one_process_count_their_own_pages() -> None:
    """In vLLM's in-process mode; what the first has is no answer to what the second needs."""
    first, (one,) = started(1)
    second, (other,) = started(1)
    assert first.supply.grow(5, 0.0) == 5
    assert second.supply.grow(3, 0.0) == 3
    assert (pages(one).owned, pages(other).owned) == (5 * price(one), 3 * price(other))
    first.budget.close()
    second.budget.close()


@pytest.mark.usefixtures("gpus")
def test_an_engine_that_is_dropped_gives_all_back() -> None:
    """As vLLM's caches do in the in-process mode, where no process ends with the engine."""
    before = cuda.load().used()
    agreed, workers = started(2)
    agreed.supply.grow(5, 0.0)
    view = pages(workers[0]), vllm_worker._bound(workers[0]).memories[0].tensor[:8]
    assert cuda.load().used() > before
    agreed.budget.close()
    vllm_scheduler.agree(None)  # what the scheduler has taken
    del agreed, workers
    gc.collect()
    assert cuda.load().used() > before, "a tensor still views it"
    del view
    gc.collect()
    assert cuda.load().used() == before


@pytest.mark.usefixtures("gpus")
def test_closing_is_refused_as_long_as_a_tensor_views_it() -> None:
    before, cpu = cuda.load().used(), torch.device("cpu")
    first = memory.reserve("cuda", 1 << 20, cpu)
    second = memory.reserve("cuda", 1 << 20, cpu, first)
    assert first.backing is second.backing
    view = first.tensor[:8]
    for _ in range(2):
        with pytest.raises(DriverError, match="tensors still view it"):
            first.close()
        assert not view.any()
        assert first.tensor.numel() == 1 << 20
    del view
    first.close()
    first.close()
    assert cuda.load().used() > before, "the second one's page of zeros"
    second.close()
    assert cuda.load().used() == before


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("idle", [True, False])
def test_activations_are_kept_with_the_first_plan(
    monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """Also where the engine had no request yet."""
    kept = []
    monkeypatch.setattr(vllm_worker, "keep_activations", lambda worker, _: kept.append(worker))
    agreed, (worker,) = started(1)
    agreed.supply.grow(1, 0.0)
    binding = vllm_worker._bound(worker)
    for sequence in range(3):
        plan = Plan(sequence, (0,) if not sequence else (), keep=1)
        vllm_worker._apply(binding, binding.pool, plan, idle=idle)
    assert kept == [worker]
    agreed.budget.close()
