# SPDX-License-Identifier: Apache-2.0
"""What the plugin costs a busy engine: throughput and time per token, stock against patched.

    python -m bench.overhead [--scale 1] [--results DIR]

For each of two tiny models two whole engines are up, alike but for the plugin, and take their
turns: the same burst of requests, the order within a pair changing from pair to pair. Time per
token is that between two steps of the scheduler, each of which gives every running request a token.
A tiny model's steps are short, so that what a step costs the plugin weighs more than on a real one.
Prints a table and writes RESULTS/overhead.json.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.runs import (
    ENGINE_SETTINGS,
    ENVIRONMENT,
    OUT,
    arguments,
    console,
    machine,
    spread,
    write,
)
from tools.engine_serve import Served
from tools.tiny_model import write_model

MODELS = ("gemma3n", "llama")
PAIRS = 11
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 60, 96
ENGINE = {
    "max_model_len": 256,
    "max_num_seqs": REQUESTS,
    "enable_prefix_caching": True,
    **ENGINE_SETTINGS,
}
FIGURES = {"tokens_per_s": "tokens per second", "p50_ms": "ms per token, p50", "p99_ms": "p99"}


def start(stack: ExitStack, model: str, kind: str, runtime: str) -> Served:
    """An engine, which need not be ready yet."""
    env = {
        **ENVIRONMENT,
        "KVCACHED_PATCH": str(int(kind == "patched")),
        "KVCACHED_PATCH_RETAIN": "none",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "XDG_RUNTIME_DIR": runtime,
    }
    job = {"model": str(write_model(model, OUT / "models")), "engine": ENGINE}
    log = OUT / f"overhead-{model}-{kind}.log"
    return stack.enter_context(Served(Path(sys.executable), job, env=env, log=log))


def burst(engine: Served, name: str) -> dict[str, float]:
    """One burst's figures."""
    rng = random.Random(name)
    engine.steps.clear()
    begin = time.monotonic()
    for n in range(REQUESTS):
        prompt = [rng.randrange(4, 500) for _ in range(PROMPT_TOKENS)]
        engine.submit(f"{name} {n}", prompt, OUTPUT_TOKENS)
    engine.wait()
    seconds = time.monotonic() - begin
    times = [step.time for step in engine.steps if step.running == REQUESTS]
    gaps = [(later - earlier) * 1000 for earlier, later in pairwise(times)]
    return {
        "tokens_per_s": REQUESTS * OUTPUT_TOKENS / seconds,
        "p50_ms": statistics.median(gaps),
        "p99_ms": statistics.quantiles(gaps, n=100)[98],
    }


def measure(model: str, pairs: int, runtime: str) -> dict[str, Any]:
    """Both engines in turn."""
    with ExitStack() as stack:
        kinds = ("stock", "patched")
        engines = {kind: start(stack, model, kind, runtime) for kind in kinds}
        for kind, engine in engines.items():
            engine.ready()
            burst(engine, f"{kind} warm-up")
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for pair in range(pairs):
            for kind in kinds[:: 1 if pair % 2 else -1]:
                found[kind].append(burst(engines[kind], f"burst {pair}"))
    row: dict[str, Any] = {"model": model, "pairs": pairs}
    for figure in FIGURES:
        both = {kind: [each[figure] for each in found[kind]] for kind in kinds}
        ratios = [b / a for a, b in zip(both["stock"], both["patched"], strict=True)]
        row[figure] = {kind: spread(values) for kind, values in both.items()}
        row[figure]["ratio"] = spread(ratios)
    return row


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    table = Table(title=f"patched against stock, vLLM {result['vllm']} (medians; ratio: quartiles)")
    for column in ("model", "pairs", "figure", "stock", "patched", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column in ("model", "figure") else "right")
    for row in result["models"]:
        for figure, title in FIGURES.items():
            values, ratio = row[figure], row[figure]["ratio"]
            table.add_row(
                row["model"],
                str(row["pairs"]),
                title,
                *(f"{values[kind]['median']:.2f}" for kind in ("stock", "patched")),
                f"{ratio['median']:.3f}",
                f"{ratio['low']:.3f} to {ratio['high']:.3f}",
            )
    console.print(table)


def main() -> int:
    """Command line: see the module."""
    given = arguments(__doc__)
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runtime:
        pairs = max(round(PAIRS * given.scale), 2)
        rows = [measure(model, pairs, runtime) for model in MODELS]
    result = {**machine(), "requests": REQUESTS, "tokens": OUTPUT_TOKENS, "models": rows}
    show(result)
    write(given.results, "overhead", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
