# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM against patched vLLM on a model whose layers share KV caches.

    python -m tools.demo        (or: make demo)

Ends with 1 if a token differs or a seam was not applied.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.engine_job import run_job
from tools.tiny_model import write_model

OUT = Path(__file__).resolve().parent.parent / "out" / "demo"
MODEL = "gemma3n"
MAX_TOKENS = 64
LENGTHS = (3, 8, 17, 33, 48, 64, 100, 130)
REPORT = "kvcached_patch.engines.vllm_worker:report"
RESIDENT = "tools.probes:kv_resident"
console = Console(highlight=False)


def prompts() -> list[list[int]]:
    """Twelve prompts of several lengths; the last four repeat the start of an earlier one."""
    texts = [[(7 * i + 13 * k) % 500 + 4 for i in range(n)] for k, n in enumerate(LENGTHS)]
    return texts + [[*texts[k], 9, k + 20] for k in (3, 5, 6, 7)]


@dataclass(frozen=True)
class Run:
    """One engine's result and what its processes said about the plugin."""

    result: dict[str, Any]
    log: str

    def seams(self) -> list[tuple[int, int]]:
        """(applied, loaded) of each process that says it is active."""
        found = re.findall(r"kvcached-patch \S+ active: .*?seams applied: (\d+)/(\d+)", self.log)
        return [(int(applied), int(loaded)) for applied, loaded in found]

    def planned_pools(self) -> str:
        """The pool count that EngineCore's scheduler planned."""
        found = re.search(r"pools planned and bound: ([\d, ]+)", self.log)
        return found[1] if found else "not said"

    def probe(self, name: str) -> Any:
        """The first worker's answer."""
        return self.result["probes"][name][0]


def run(title: str, *, patched: bool) -> Run:
    """Run one engine on the demo's prompts."""
    log = OUT / f"{title}.log"
    job = {
        "model": str(write_model(MODEL, OUT / "models")),
        "prompts": prompts(),
        "sampling": {"max_tokens": MAX_TOKENS},
        "probe": [RESIDENT, *([REPORT] * patched)],
    }
    with progress(f"{title} vLLM, {len(prompts())} prompts x {MAX_TOKENS} tokens", log):
        result = run_job(
            Path(sys.executable), job, env={"KVCACHED_PATCH": "1" if patched else "0"}, log=log
        )
    return Run(result, log.read_text(errors="replace"))


@contextmanager
def progress(title: str, log: Path) -> Iterator[None]:
    """Say what runs, its last log line while it runs, and how long it took."""
    start, done = time.monotonic(), threading.Event()

    def watch() -> None:
        while not done.wait(5):
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            last = lines[-1].split("] ")[-1][:60] if lines else "starting"
            console.print(
                f"  [{time.monotonic() - start:3.0f} s] {last}", style="dim", markup=False
            )

    console.print(f"{title} …")
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    console.print(f"{title}: done in {time.monotonic() - start:.0f} s")


def main() -> int:
    """Run both engines, compare, and print the outcome."""
    OUT.mkdir(parents=True, exist_ok=True)
    stock, patched = run("stock", patched=False), run("patched", patched=True)

    table = Table(title=f"{MODEL}, vLLM {patched.result['versions']['vllm']}")
    for column in ("prompt", "tokens in", "tokens out", "distinct", "identical", "max |Δ logprob|"):
        table.add_column(column, justify="right")
    deltas, identical = [], []
    for n, prompt in enumerate(prompts()):
        old, new = stock.result["tokens"][n], patched.result["tokens"][n]
        pairs = zip(stock.result["logprobs"][n], patched.result["logprobs"][n], strict=True)
        deltas.append(max(abs(a - b) for a, b in pairs))
        identical.append(old == new)
        row = (n, len(prompt), len(new), len(set(new)), "yes" if old == new else "NO", deltas[-1])
        table.add_row(*map(str, row))
    console.print(table)

    report, seams = patched.probe(REPORT), patched.seams()
    applied, loaded = (sum(column) for column in zip(*seams, strict=True)) if seams else (0, 0)
    mib = {
        run: patched_or_stock.probe(RESIDENT)
        for run, patched_or_stock in (("stock", stock), ("patched", patched))
    }
    same = all(identical)
    console.print(
        f"tokens identical: {'yes' if same else 'NO'} ({sum(identical)} of {len(identical)})"
    )
    console.print(f"max |Δ logprob|: {max(deltas):g}")
    console.print(f"seams applied: {applied}/{loaded} in {len(seams)} processes")
    console.print(f"pools: {report['pools']} (scheduler planned {patched.planned_pools()})")
    console.print(f"sharing layers aliased: {report['aliased']}")
    console.print(
        f"resident KV memory: {mib['patched']['resident_bytes'] / 2**20:.1f} MiB "
        f"(stock {mib['stock']['resident_bytes'] / 2**20:.1f} MiB "
        f"of {mib['stock']['reserved_bytes'] / 2**20:.0f} MiB reserved)"
    )
    return 0 if same and seams and applied == loaded else 1


if __name__ == "__main__":
    sys.exit(main())
