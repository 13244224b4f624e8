# SPDX-License-Identifier: Apache-2.0
"""What benchmarks of whole engines have in common."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "out" / "bench"
RESULTS = ROOT / "bench" / "results"
# Engines that share a few cores must not spin: the worker is in EngineCore's process, as vLLM has
# it on one GPU; between two processes it waits busily for up to a second. On CPUs vLLM puts them in
# two unless this variable reads otherwise than "1" (platforms/cpu.py).
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "01"}
ENGINE_SETTINGS = {"distributed_executor_backend": "uni"}
console = Console(width=110, highlight=False)


def arguments(description: str | None) -> argparse.Namespace:
    """The command line: `scale` (1: as published, less: a trial), `results` (a folder)."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0, help="part of the load (default: 1)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """What a result was measured with."""
    import vllm

    return {
        "vllm": str(vllm.__version__),
        "python": platform.python_version(),
        "processors": len(os.sched_getaffinity(0)),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, and the quartiles around it."""
    low, _, high = statistics.quantiles(values, n=4)
    return {"median": statistics.median(values), "low": low, "high": high}


def write(results: Path, name: str, result: dict[str, Any]) -> None:
    """Write a benchmark's JSON."""
    results.mkdir(parents=True, exist_ok=True)
    (results / f"{name}.json").write_text(json.dumps(result) + "\n")
