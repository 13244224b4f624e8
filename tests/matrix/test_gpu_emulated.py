"""Whole engines whose workers use our GPU memory, on a driver made of mmap(2).

Where a GPU would fault, at addresses that are not mapped, these engines' processes die; and new
pages hold what shows as NaN.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.lanes import ROOT
from tests.parity import OUT, REPORT, Run, run
from tools.tiny_model import write_model

FOLDER = f"emulated-{vllm.__version__}"
PAGE = 4 << 10


def engine(name: str, tmp_path: Path, capacity: int, **env: str) -> Run:
    """A run of the scene on a device of so many pages; 0: stock."""
    model = write_model("gemma3n", OUT / "models")
    return run(
        f"{FOLDER}/{name}",
        "gemma3n",
        patched=capacity > 0,
        call="tests.matrix.gpu_scene:emulated",
        models={"gemma3n": str(model)},
        elastic=capacity > 0,
        env={
            "PYTHONPATH": os.pathsep.join([str(ROOT / "tests" / "emulated")]),
            "CUDA_EMULATED_USED": str(tmp_path / "used"),
            "CUDA_EMULATED_CAPACITY": str(capacity * PAGE),
            **({"KVCACHED_PATCH_POOL": "cuda"} if capacity else {}),
            **env,
        },
    )


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return engine("stock", tmp_path_factory.mktemp("stock"), 0)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return engine("patched", tmp_path_factory.mktemp("patched"), 10_000)


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, patched: Run) -> Run:
    """On a device that has half of what the engine would take."""
    pages = max(m["after"] for m in patched.result["memory"]) // PAGE // 2
    return engine("crowded", tmp_path_factory.mktemp("crowded"), pages)


def tokens(found: Run) -> list[Any]:
    return [batch["tokens"] for batch in found.result["batches"]]


def test_tokens_and_log_probabilities_are_stock_s(stock: Run, patched: Run) -> None:
    assert patched.result["batches"] == stock.result["batches"]
    report = patched.result["probes"][REPORT][0]
    assert report["pool"] == "cuda"
    assert report["device"].startswith("GPU-")
    assert report["supplied"]


def test_pages_come_with_the_load_and_go(patched: Run) -> None:
    one, crowd, two = (m["after"] for m in patched.result["memory"])
    assert crowd > two > one
    first, second, third = (m["quiet"] for m in patched.result["memory"])
    assert first == second == third < one / 2


def test_a_device_that_has_less_makes_requests_wait(stock: Run, patched: Run, crowded: Run) -> None:
    assert tokens(crowded) == tokens(stock)
    steps = [each.result["batches"][1]["steps"] for each in (patched, crowded)]
    assert steps[1] > steps[0]
    most = max(m["after"] for m in crowded.result["memory"])
    assert most <= max(m["after"] for m in patched.result["memory"]) / 2
