# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs, as medians of alternating pairs.

    python -m tools.overhead [starts] [engines] [throughput]      (or: make overhead)

starts: interpreter start, toggle unset, hook installed against not installed.
engines: start-up of an engine, on against off. throughput: the demo's workload, on against off.
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
from typing import Any

from tools.demo import MAX_TOKENS, MODEL, OUT, prompts
from tools.engine_job import run_job
from tools.tiny_model import write_model

ROOT = Path(__file__).resolve().parent.parent


def pairs(
    name: str, count: int, old: Callable[[], float], new: Callable[[], float]
) -> dict[str, Any]:
    """Time `old` and `new` in turn, each first in every other pair; report differences, ratios."""
    olds, news = [], []
    for n in range(count):
        for measure, into in [(old, olds), (new, news)][:: 1 if n % 2 else -1]:
            into.append(measure())
    differences = [b - a for a, b in zip(olds, news, strict=True)]
    ratios = [b / a for a, b in zip(olds, news, strict=True)]
    result = {
        "name": name,
        "pairs": count,
        "old_median": statistics.median(olds),
        "new_median": statistics.median(news),
        "difference_median": statistics.median(differences),
        "difference_quartiles": statistics.quantiles(differences, n=4)[::2],
        "ratio_median": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    print(json.dumps(result, indent=1), flush=True)
    return result


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

        pairs("interpreter start, ms", count, *(lambda p=p: start(p) for p in pythons))


def engine(key: str, patched: bool, rounds: int) -> float:
    """One engine on the demo's workload: start-up seconds, or output tokens per second."""
    job = {
        "model": str(write_model(MODEL, OUT / "models")),
        "prompts": prompts(),
        "sampling": {"max_tokens": MAX_TOKENS},
        "rounds": rounds,
    }
    result = run_job(Path(sys.executable), job, env={"KVCACHED_PATCH": "1" if patched else "0"})
    if key == "start":
        return float(result["import_s"] + result["init_s"])
    return float(result["output_tokens"] / rounds / statistics.median(result["generate_s"]))


def main(names: list[str]) -> None:
    """Run the measurements named, or all."""
    if not names or "starts" in names:
        starts()
    if not names or "engines" in names:
        pairs("engine start-up, s", 9, *(lambda p=p: engine("start", p, 1) for p in (False, True)))
    if not names or "throughput" in names:
        pairs("tokens per second", 5, *(lambda p=p: engine("rate", p, 6) for p in (False, True)))


if __name__ == "__main__":
    main(sys.argv[1:])
