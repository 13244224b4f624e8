# SPDX-License-Identifier: Apache-2.0
"""What depth costs when MaxText's scanned layers have a cache each, and when they have pools.

    python -m bench.scanning [--scale 1] [--results DIR]

Runs in the environment of MaxText and tpu-inference, with the MaxText that is on the path. Prints
a table and writes RESULTS/scanning-MAXTEXT.json. Copied: bytes of caches that the optimized program
copies. Temporaries: those of that program. The caches are as large at every depth.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from importlib.metadata import version
from typing import Any

from rich.table import Table

from tools.maxtext import environment

environment.prepare("1", scan="pool")

import jax  # noqa: E402

from bench.runs import arguments, console, write  # noqa: E402
from kvcached_patch import config  # noqa: E402
from tools.maxtext import kernels  # noqa: E402
from tools.maxtext.models import MODELS, deep  # noqa: E402
from tools.maxtext.served import Served, copied_bytes, lowered  # noqa: E402

NAMES = ("qwen3-scanned", "olmo3-scanned", "qwen3-next-scanned")
DEPTHS = (8, 32, 64)
TIMES = 5
PACKAGES = ("jax", "maxtext", "tpu-inference", "vllm")
COLUMNS = ("model", "scan", "layers", "seconds", "StableHLO", "temporaries", "copied", "donated")


def measure(name: str, scan: str, layers: int, times: int) -> dict[str, Any]:
    """Medians of seconds; the rest in bytes."""
    os.environ[config.SCAN] = scan
    served = Served(deep(MODELS[name], layers))
    seconds = []
    for _ in range(times):
        jax.clear_caches()
        begin = time.perf_counter()
        program = lowered(served)
        compiled = program.compile()
        seconds.append(time.perf_counter() - begin)
    caches = jax.tree.leaves(served.caches())
    memory = compiled.memory_analysis()
    return {
        "model": name,
        "scan": scan,
        "layers": layers,
        "seconds": statistics.median(seconds),
        "StableHLO": len(program.as_text()),
        "temporaries": memory.temp_size_in_bytes,
        "copied": copied_bytes(compiled, caches),
        "donated": memory.alias_size_in_bytes / sum(cache.nbytes for cache in caches),
    }


def main() -> int:
    """Command line: see the module."""
    given = arguments(__doc__)
    kernels.install()
    maxtext = version("maxtext")
    names = [name for name in NAMES if maxtext not in MODELS[name].refused]
    measure(names[0], "layers", 1, 1)  # imports, and what JAX compiles once
    rows = [
        measure(name, scan, layers, max(round(TIMES * given.scale), 1))
        for name in names
        for scan in config.SCAN_KINDS
        for layers in DEPTHS
    ]
    table = Table(title=f"a step of MaxText {maxtext}, traced and compiled")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("model", "scan") else "right")
    for row in rows:
        kib = (f"{row[key] / 1024:.0f} KiB" for key in ("StableHLO", "temporaries", "copied"))
        table.add_row(
            row["model"], row["scan"], str(row["layers"]), f"{row['seconds']:.2f}", *kib,
            f"{row['donated']:.0%}",
        )  # fmt: skip
    console.print(table)
    versions = {name: version(name) for name in PACKAGES}
    write(given.results, f"scanning-{maxtext}", {**versions, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
