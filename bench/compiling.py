# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs when MaxText's step is traced and compiled, where stock is right.

    python -m bench.compiling [--scale 1] [--results DIR]

Runs in the environment of MaxText and tpu-inference. One process, stock and patched in turn, the
order within a pair changing from pair to pair; JAX forgets everything before each. Prints a table
and writes RESULTS/compiling.json.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

from rich.table import Table

from tools.maxtext import environment

environment.prepare("1")

import jax  # noqa: E402

from bench.runs import arguments, console, spread, write  # noqa: E402
from tests.jax.stock import stock  # noqa: E402
from tools.maxtext import kernels  # noqa: E402
from tools.maxtext.models import MODELS  # noqa: E402
from tools.maxtext.served import Served  # noqa: E402

NAMES = ("qwen3", "qwen3-scanned", "gemma3-scanned")
PAIRS = 11
BATCH = [(0, range(9)), (1, range(12))]
PACKAGES = ("jax", "maxtext", "tpu-inference", "vllm")
PARTS = ("trace", "compile", "both")


def once(served: Served) -> dict[str, float]:
    """Seconds."""
    jax.clear_caches()
    caches, leaves = served.caches(), served.interface.state_leaves

    def step(caches: Any, leaves: Any) -> Any:
        return served.step(caches, BATCH, state_leaves=leaves)

    begin = time.perf_counter()
    lowered = jax.jit(step, donate_argnums=0).lower(caches, leaves)
    traced = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    return {"trace": traced - begin, "compile": end - traced, "both": end - begin}


def measure(name: str, pairs: int) -> dict[str, Any]:
    """Stock and patched in turn."""
    served = Served(MODELS[name])
    found: dict[str, list[dict[str, float]]] = {"stock": [], "patched": []}
    once(served)
    for pair in range(pairs):
        for kind in list(found)[:: 1 if pair % 2 else -1]:
            with stock() if kind == "stock" else contextlib.nullcontext():
                found[kind].append(once(served))
    row: dict[str, Any] = {"model": name, "pairs": pairs}
    for part in PARTS:
        both = {kind: [each[part] for each in times] for kind, times in found.items()}
        ratios = [b / a for a, b in zip(both["stock"], both["patched"], strict=True)]
        row[part] = {kind: statistics.median(times) for kind, times in both.items()}
        row[part]["ratio"] = spread(ratios)
    return row


def main() -> int:
    """Command line: see the module."""
    given = arguments(__doc__)
    kernels.install()
    rows = [measure(name, max(round(PAIRS * given.scale), 2)) for name in NAMES]
    table = Table(title="a step of MaxText, seconds (medians; ratio patched/stock: quartiles)")
    for column in ("model", "pairs", "part", "stock", "patched", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column in ("model", "part") else "right")
    for row in rows:
        for part in PARTS:
            times, ratio = row[part], row[part]["ratio"]
            cells = (f"{times[kind]:.3f}" for kind in ("stock", "patched"))
            quartiles = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            table.add_row(
                row["model"], str(row["pairs"]), part, *cells, f"{ratio['median']:.3f}", quartiles
            )
    console.print(table)
    versions = {name: version(name) for name in PACKAGES}
    write(given.results, "compiling", {**versions, "models": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
