"""What EngineCore agrees on with workers that have a GPU each, emulated in this process."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.executor.abstract import Executor

from kvcached_patch import config, memory
from kvcached_patch.engines import vllm_scheduler
from kvcached_patch.engines.budgets import Budgets
from kvcached_patch.ledger import Ledger, devices, ledger_path
from kvcached_patch.memory import cuda
from tests.bare import OneWorker, Stage, worker_of
from tests.lanes import ROOT

sys.path.append(str(ROOT / "tests" / "emulated"))
import cuda_emulated
from cuda_emulated.driver import GRANULARITY, Driver

BLOCKS = 64


class TwoWorkers(OneWorker, Executor):
    """Two workers in this process, each of which reserves on a GPU of its own."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__(first)
        self.workers = [first, second]

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
    cuda._devices.clear()
    vllm_scheduler.agree(None)


def started(*layers: int) -> Any:
    """What was agreed on with workers that have so many layers each, as pipeline stages do."""
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
    executor = TwoWorkers(*workers)
    executor.initialize_from_config(plans)
    agreed = vllm_scheduler._agreed
    assert agreed is not None
    return agreed


def owned() -> list[int]:
    return [cuda.pages_of(ordinal).owned for ordinal in (0, 1)]


@pytest.mark.usefixtures("gpus")
def test_each_gpu_has_a_ledger_of_its_own() -> None:
    agreed = started(3, 1)
    assert isinstance(agreed.budget, Budgets)
    names = devices(config.ledger_dir())
    assert names == [cuda.pages_of(ordinal).uuid for ordinal in (0, 1)]
    assert agreed.budget.reserve(2)
    first, second = (Ledger(ledger_path(config.ledger_dir(), name)).engines() for name in names)
    assert first[0].committed == 3 * second[0].committed > 0
    assert first[0].reserved == 3 * second[0].reserved
    agreed.budget.close()


@pytest.mark.usefixtures("gpus")
def test_every_worker_has_the_pages_before_they_are_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agreed = started(2, 1)
    assert agreed.supply.grow(5, 0.0) == 5
    first, second = owned()
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
    agreed = started(1, 1)
    assert "without the shared ledger on other machines" in caplog.text
    assert devices(config.ledger_dir()) == [cuda.pages_of(1).uuid]
    agreed.budget.close()
