"""Trimming a whole engine from outside, by the command and by the API."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_patch import api
from kvcached_patch.config import ledger_dir
from kvcached_patch.core.sizes import format_bytes
from tests.fresh import python
from tests.matrix.probes import kv_caches
from tests.parity import OUT
from tools.engine_serve import Served
from tools.tiny_model import write_model

BLOCK_BYTES = 32 * 2048  # a token of the tiny llama takes 2 KiB
SLAB_BYTES = 4 * BLOCK_BYTES
ENGINE = {"max_num_seqs": 16, "max_model_len": 1024, "enable_prefix_caching": True}
ENDLESS = 900  # tokens: some seconds
PROMPTS = [random.Random(i).choices(range(5, 500), k=100) for i in range(12)]


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runtime")


@pytest.fixture(scope="module")
def engine(runtime: Path) -> Iterator[Served]:
    """An engine that keeps its prefix cache for ever."""
    job = {"model": str(write_model("llama", OUT / "models")), "engine": ENGINE}
    env = {
        "KVCACHED_PATCH": "1",
        "KVCACHED_PATCH_RETAIN": "all",
        "XDG_RUNTIME_DIR": str(runtime),
    }
    with Served(Path(sys.executable), job, env=env, log=OUT / "trim.log") as served:
        served.ready()
        yield served


def resident(engine: Served) -> int:
    return sum(held for _, held in kv_caches(engine.process.pid))


def test_a_quiet_engine(engine: Served, runtime: Path) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(f"quiet{i}", prompt, 20)
    engine.wait()
    before = resident(engine)
    assert before > len(PROMPTS) * 3 * BLOCK_BYTES
    done = python("-m", "kvcached_patch", "trim", "llama", XDG_RUNTIME_DIR=str(runtime))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"llama on host: {format_bytes(SLAB_BYTES)} committed, ")
    assert resident(engine) <= SLAB_BYTES < before


def test_a_busy_engine(engine: Served, runtime: Path) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.submit(f"short{i}", prompt, 20)
    engine.wait()
    before = resident(engine)
    engine.submit("long", PROMPTS[0], ENDLESS)
    steps = len(engine.steps)
    while len(engine.steps) < steps + 5:
        time.sleep(0.01)
    directory = ledger_dir({"XDG_RUNTIME_DIR": str(runtime)})
    (trimmed,) = api.trim("llama", wait_s=60, directory=directory)
    assert not trimmed.trimming
    assert "long" in engine.unanswered
    assert resident(engine) < before
    engine.wait()
    assert len(engine.answers["long"].tokens) == ENDLESS
