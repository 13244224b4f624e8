"""Engines of several workers, of tensor, pipeline and data parallelism: the same as stock's."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from tests.fresh import python
from tests.matrix.pairs import ENVIRONMENT, Pair, pair
from tests.matrix.probes import kv_caches
from tests.matrix.scenes import CROWD, LONGER, SHARED
from tests.parity import OUT
from tests.server import Server

FOLDER = f"parallel-{vllm.__version__}"
PATIENCE_SECONDS = 60.0
LEAST_BYTES = 2 * (256 << 10)  # of the slab that each rank's null block is in


@pytest.fixture(scope="module")
def engines() -> Pair:
    return pair(FOLDER, "tests.matrix.scenes:parallel", KVCACHED_PATCH_RETAIN="all")


@pytest.mark.parametrize(("kind", "pools"), [("tensor", 4), ("pipeline", 2)])
def test_two_workers(engines: Pair, kind: str, pools: int) -> None:
    """Each with a part of every layer, or with half of the layers."""
    timed = kind == "pipeline"  # in processes of its own, with two batches on their way
    crowd, shared, longer = engines.same(kind, "crowd, prefix", timed=timed)
    assert timed or crowd["preemptions"] > 0
    assert shared["cached"] == [0, 0]
    assert longer["cached"] == [96, 64, 96, 64]

    first, second = engines.reports(kind)
    assert first["pid"] != second["pid"]
    assert first["pools"] == second["pools"] == pools
    whole_block = 4 * 2 * 32 * 2 * 32 * 4  # layers, K and V, tokens, heads, head size, bytes
    assert first["block_bytes"] == second["block_bytes"] == whole_block / 2


@pytest.mark.skipif(
    Version(vllm.__version__).release >= (0, 33),
    reason="stock vLLM 0.33 does not start two ranks where memory is one node: cpu_worker.py takes "
    "a node for each (IndexError: allowed_memory_nodes)",
)
def test_two_data_parallel_ranks(engines: Pair, tmp_path: Path) -> None:
    """Behind one server; each answers as an engine alone, and quiet, gives back all by itself."""
    first, *others = engines.same("alone", "crowd, prefix")
    batches = [(CROWD, first["tokens"])]
    batches += [(b, f["tokens"]) for b, f in zip((SHARED, LONGER), others, strict=True)]
    environment = {"KVCACHED_PATCH": "1", "KVCACHED_PATCH_RETAIN": "none"}
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path), **ENVIRONMENT}
    log = OUT / FOLDER / "server.log"
    with Server("llama", log, "--data-parallel-size=2", **environment) as server:
        for prompts, tokens in batches:
            assert server.complete(prompts, max_tokens=len(tokens[0])) == tokens
        answered = server.answered()
        metrics = server.ask("/metrics")
        left = until(lambda: sum(resident for _, resident in kv_caches(server.process.pid)))
        caches = len(kv_caches(server.process.pid))
        done = python("-m", "kvcached_patch", "top", "--json", XDG_RUNTIME_DIR=str(tmp_path))

    assert answered.keys() == {"0", "1"}
    engines_shown = re.findall(r'^kvcached_patch_committed_bytes{.*"(.*)"}', metrics, re.MULTILINE)
    assert sorted(engines_shown) == ["llama", "llama-2"]
    assert min(answered.values()) >= 3, "one rank did nearly everything"
    assert caches == 2
    assert left <= LEAST_BYTES
    (device,) = json.loads(done.stdout)["devices"]
    assert [engine["alive"] for engine in device["engines"]] == [True, True]

    said = [line.split("active: ")[1] for line in server.log().splitlines() if "active: " in line]
    assert sum(line.startswith("EngineCore") for line in said) == 2
    assert sum(line.startswith("worker") and "host memory reserved" in line for line in said) == 2


def until(bytes_left: Callable[[], int]) -> int:
    """Bytes that are left when hardly any are, or when patience ends."""
    end, never = time.monotonic() + PATIENCE_SECONDS, threading.Event()
    while (left := bytes_left()) > LEAST_BYTES and time.monotonic() < end:
        never.wait(0.1)
    return left
