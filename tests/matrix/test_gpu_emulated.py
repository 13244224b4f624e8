"""Whole engines whose workers use our GPU memory, on a driver made of mmap(2).

Where a GPU would fault, at addresses that are not mapped, these engines' processes die; and new
pages hold what shows as NaN.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm

from tests.matrix.gpu_scene import LEAST_BYTES, environment
from tests.parity import OUT, REPORT, Run, run
from tools.tiny_model import write_model

FOLDER = f"emulated-{vllm.__version__}"
PAGE = 4 << 10
HALF = 116  # pages


def engine(name: str, tmp_path: Path, capacity: int) -> Run:
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
            **environment(tmp_path, capacity * PAGE),
            **({"KVCACHED_PATCH_POOL": "cuda"} if capacity else {}),
        },
    )


class Runs(NamedTuple):
    """On stock vLLM, on a device with enough pages, and on one with half of what it takes."""

    stock: Run
    patched: Run
    crowded: Run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    capacity = {"stock": 0, "patched": 10_000, "crowded": HALF}
    with ThreadPoolExecutor(len(capacity)) as threads:
        folders = map(tmp_path_factory.mktemp, capacity)
        return Runs(*threads.map(engine, capacity, folders, capacity.values()))


def tokens(found: Run) -> list[Any]:
    return [batch["tokens"] for batch in found.result["batches"]]


def logprobs(found: Run) -> list[float]:
    each = (sequence for batch in found.result["batches"] for sequence in batch["logprobs"])
    return [value for sequence in each for value in sequence]


@pytest.mark.parametrize("which", ["patched", "crowded"])
def test_tokens_and_log_probabilities_are_stock_s(runs: Runs, which: str) -> None:
    """Rounded: what is scheduled together depends on the clock."""
    found = getattr(runs, which)
    assert tokens(found) == tokens(runs.stock)
    assert logprobs(found) == pytest.approx(logprobs(runs.stock), abs=1e-4)


def test_its_memory_is_of_the_kind_that_gpus_have(runs: Runs) -> None:
    (report,) = runs.patched.result["probes"][REPORT]
    assert report["pool"] == "cuda"
    assert report["device"].startswith("GPU-")


def test_pages_come_with_the_load_and_go(runs: Runs) -> None:
    one, crowd, two = (m["peak"] for m in runs.patched.result["memory"])
    assert crowd > 1.5 * max(one, two)
    assert {m["quiet"] for m in runs.patched.result["memory"]} == {LEAST_BYTES}
    assert min(one, two) > 2 * LEAST_BYTES


def test_a_device_that_has_less_makes_requests_wait(runs: Runs) -> None:
    needed, had = (max(m["peak"] for m in each.result["memory"]) // PAGE for each in runs[1:])
    assert had <= HALF < needed / 1.5
