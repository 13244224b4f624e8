# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs, as medians of alternating pairs.

    python -m tools.overhead [starts] [engines]      (or: make overhead)

starts: interpreter start, toggle unset, hook installed against not installed.
engines: an engine's start-up and its throughput on the demo's workload, on against off.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tools.demo import MAX_TOKENS, MODEL, OUT, prompts
from tools.engine_job import run_job
from tools.tiny_model import write_model

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent


def report(name: str, olds: list[float], news: list[float]) -> None:
    """Print differences and ratios, pair by pair."""
    differences = [b - a for a, b in zip(olds, news, strict=True)]
    ratios = [b / a for a, b in zip(olds, news, strict=True)]
    result = {
        "name": name,
        "pairs": len(olds),
        "old_median": statistics.median(olds),
        "new_median": statistics.median(news),
        "difference_median": statistics.median(differences),
        "difference_quartiles": statistics.quantiles(differences, n=4)[::2],
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    print(json.dumps(result, indent=1), flush=True)


def alternate(count: int, old: Callable[[], T], new: Callable[[], T]) -> tuple[list[T], list[T]]:
    """Measure `old` and `new` in turn, each first in every other pair."""
    olds: list[T] = []
    news: list[T] = []
    for n in range(count):
        for measure, into in [(old, olds), (new, news)][:: 1 if n % 2 else -1]:
            into.append(measure())
    return olds, news


def starts(count: int = 300) -> None:
    """Interpreter start in two equal environments, one with the hook and the toggle unset."""
    with tempfile.TemporaryDirectory() as folder:
        pythons = []
        for name in ("without", "with"):
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", f"{folder}/{name}"])
            pythons.append(f"{folder}/{name}/bin/python")
        (purelib,) = Path(folder, "with").glob("lib/python*/site-packages")
        (purelib / "kvcached_patch.pth").write_text((ROOT / "autopatch.pth").read_text())
        (purelib / "checkout.pth").write_text("")
        (
            Path(folder, "without") / purelib.relative_to(Path(folder, "with")) / "checkout.pth"
        ).touch()

        def start(python: str) -> float:
            begin = time.perf_counter()
            subprocess.run([python, "-c", "pass"], env={}, check=True)
            return (time.perf_counter() - begin) * 1e3

        without, with_hook = pythons
        times = alternate(count, lambda: start(without), lambda: start(with_hook))
        report("interpreter start, ms", *times)


def engines(count: int = 7, rounds: int = 6) -> None:
    """Engines on the demo's workload: start-up seconds and output tokens per second."""
    job = {
        "model": str(write_model(MODEL, OUT / "models")),
        "prompts": prompts(),
        "sampling": {"max_tokens": MAX_TOKENS},
        "rounds": rounds,
    }

    def engine(toggle: str) -> tuple[float, float]:
        result = run_job(Path(sys.executable), job, env={"KVCACHED_PATCH": toggle})
        rate = result["output_tokens"] / rounds / statistics.median(result["generate_s"])
        return result["import_s"] + result["init_s"], rate

    olds, news = alternate(count, lambda: engine("0"), lambda: engine("1"))
    for k, name in enumerate(("engine start-up, s", "output tokens per second")):
        report(name, [old[k] for old in olds], [new[k] for new in news])


def main(names: list[str]) -> None:
    """Run the measurements named, or all."""
    for measure in (starts, engines):
        if not names or measure.__name__ in names:
            measure()


if __name__ == "__main__":
    main(sys.argv[1:])
