"""Run the same job on stock and on patched vLLM, record both, compare."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.engine_job import run_job
from tools.tiny_model import write_model

OUT = Path(__file__).resolve().parent.parent / "out" / "parity"
# vLLM puts its OpenMP here when a process makes an engine's settings, as a test may have done; an
# engine without workers of its own is three times as slow with it.
PRELOADED = os.environ.get("LD_PRELOAD", "")
REPORT = "kvcached_patch.engines.vllm_worker:report"


@dataclass(frozen=True)
class Run:
    """An engine's result and its log."""

    result: dict[str, Any]
    log: str

    def report(self) -> dict[str, Any]:
        """What the first worker says it bound."""
        return self.result["probes"][REPORT][0]

    def active_lines(self) -> list[str]:
        """What each process of the engine said, in the order they said it."""
        return re.findall(r"kvcached-patch \S+ active: (.*)", self.log)


def prompts(lengths: tuple[int, ...] = (3, 9, 20, 40, 70, 100)) -> list[list[int]]:
    """Prompts of several lengths, then two that repeat the start of the two longest."""
    texts = [[(11 * i + 17 * k) % 490 + 5 for i in range(n)] for k, n in enumerate(lengths)]
    return texts + [[*text, 7, 8] for text in texts[-2:]]


def run(
    case: str,
    model: str,
    *,
    patched: bool,
    engine: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    **job: Any,
) -> Run:
    """Run one engine; versions, settings and token ids go to ``out/parity/CASE.json``."""
    kind = "patched" if patched else "stock"
    folder = OUT / case
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{kind}.log"
    probe = [*job.pop("probe", []), *([REPORT] * patched)]
    result = run_job(
        Path(sys.executable),
        {
            "model": str(write_model(model, OUT / "models")),
            "engine": engine or {},
            **({} if "batches" in job else {"prompts": prompts()}),
            "sampling": {"max_tokens": 24},
            "probe": probe,
            **job,
        },
        env={
            "KVCACHED_PATCH": "1" if patched else "0",
            "XDG_RUNTIME_DIR": str(_runtime_dir()),
            # Else each engine compiles, for seconds, one sum that log-probabilities take.
            "TORCHDYNAMO_DISABLE": "1",
            "LD_PRELOAD": PRELOADED,
            # vLLM sets it to 0 when a process makes settings for external_launcher.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **(env or {}),
        },
        log=log,
    )
    (folder / f"{kind}.json").write_text(json.dumps(result, indent=1))
    return Run(result, log.read_text(errors="replace"))


def _runtime_dir() -> Path:
    """A ledger of the tests' own: no budget of this machine's user bounds them."""
    folder = OUT / "runtime"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def assert_same(stock: Run, patched: Run) -> None:
    """Exactly the same tokens and log-probabilities, and enough of them to mean something."""
    assert patched.result["tokens"] == stock.result["tokens"]
    assert patched.result["logprobs"] == stock.result["logprobs"]
    assert min(len(set(tokens)) for tokens in stock.result["tokens"]) > 8, "outputs hardly vary"
