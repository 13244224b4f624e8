# SPDX-License-Identifier: Apache-2.0
"""Three engines on one machine: a static third of the memory each, against one shared budget.

    python -m bench.colocation [--scale 1] [--results DIR]

Both kinds are vLLM with the same settings, prefix caching on; static is stock vLLM with a third of
the blocks in each engine, shared is patched vLLM (retention as it is by default) with all blocks
in each and the budget that holds the same bytes. All six engines are up all the time and take the
traces in turn, first one kind and then the other; the kind whose turn it is not is quiet.

The load was chosen so that memory is short and nothing else is: what is compared is waiting for
memory. Prompts are long, and answers short, since it is their prompt's blocks that requests wait
for. The unit of time is what five requests take that fill a third of the memory (measured first,
then printed): a static third serves five requests in a unit, the whole memory some ten.

- `intermittent`: each engine has a peak of 6 requests per unit for sixteen units, while the
  others get 0.3: a fifth more than a third of the memory can serve, some 60 % of what the whole
  can. Below five nobody waits; above seven the whole memory is full at times as well. In between
  the gain grows with the length of the peaks: the static engine's queue grows while they last.
- `constant`: each engine gets one request per unit all the time, evenly spaced. Nothing waits for
  memory; what is compared is what sharing costs.

Prints the traces, a row for each run, and the ratios; writes RESULTS/colocation.json, which
`python -m bench.figure` draws. With less than scale 1 traces are shorter, and each is run once.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.runs import ENGINE_SETTINGS, ENVIRONMENT, OUT, arguments, console, machine, write
from bench.traces import SEED, Arrival, constant, intermittent
from tools.engine_serve import Served
from tools.ledger_watch import LedgerWatch
from tools.tiny_model import write_model

ENGINES = 3
MODEL = "llama"
BLOCK_TOKENS, TOKEN_BYTES = 32, 2048
THIRD_BLOCKS = 128
BUDGET_BYTES = ENGINES * THIRD_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES
TRACES = {"intermittent": intermittent, "constant": constant}
PAIRS = {"intermittent": 2, "constant": 7}
UNIT_BATCH = [Arrival(0.0, 0, 600, 150)] * (THIRD_BLOCKS * BLOCK_TOKENS // 750)
MEASURES = ("ttft_mean", "ttft_p50", "ttft_p99", "requests_per_s")
ENGINE = {
    "block_size": BLOCK_TOKENS,
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 4096,
    "enable_prefix_caching": True,
    **ENGINE_SETTINGS,
}
Run = dict[str, Any]


def start(stack: ExitStack, kind: str, runtime: str) -> list[Served]:
    """The engines of a kind, alike but for their memory; they need not be ready yet."""
    env = {**ENVIRONMENT, "XDG_RUNTIME_DIR": runtime, "KVCACHED_PATCH": "0"}
    blocks = THIRD_BLOCKS
    if kind == "shared":
        env |= {"KVCACHED_PATCH": "1", "KVCACHED_PATCH_BUDGET": str(BUDGET_BYTES)}
        blocks *= ENGINES
    model = write_model(MODEL, OUT / "models")
    job = {"model": str(model), "engine": {**ENGINE, "num_gpu_blocks_override": blocks}}
    return [
        stack.enter_context(
            Served(Path(sys.executable), job, env=env, log=OUT / f"colocation-{kind}-{n}.log")
        )
        for n in range(ENGINES)
    ]


def play(
    engines: Sequence[Served], trace: Sequence[Arrival], unit_s: float, name: str, runtime: str
) -> Run:
    """Send the trace's requests when they are due, and wait for the answers."""
    prompts = [arrival.tokens(name) for arrival in trace]
    for engine in engines:
        engine.steps.clear()
        engine.answers.clear()
    with LedgerWatch(Path(runtime), engines) as watch:
        begin = time.monotonic() + 0.2
        for n, (arrival, prompt) in enumerate(zip(trace, prompts, strict=True)):
            due = begin + arrival.time * unit_s
            time.sleep(max(due - time.monotonic(), 0))
            engines[arrival.engine].submit(f"{name} {n}", prompt, arrival.output, due)
        for engine in engines:
            engine.wait()
    answers = [answer for engine in engines for answer in engine.answers.values()]
    seconds = max(answer.done for answer in answers) - begin
    ttft = sorted(round(answer.first - answer.due, 4) for answer in answers)
    return {
        "ttft_mean": statistics.fmean(ttft),
        "ttft_p50": statistics.median(ttft),
        "ttft_p99": ttft[min(int(0.99 * len(ttft)), len(ttft) - 1)],
        "requests_per_s": len(answers) / seconds,
        "waited": statistics.fmean(waited(engine) for engine in engines) / seconds,
        "preempted": sum(step.preempted for engine in engines for step in engine.steps),
        "ttft": ttft,
        "committed": [[round(at - begin, 2), *held] for at, held in watch.samples[::8]],
        "most_committed": max((sum(held) for _, held in watch.samples), default=0),
    }


def waited(engine: Served) -> float:
    """Seconds in which a request waited though fewer ran than the engine runs at once.

    The prompts that come in one step fit that step: what they wait for is memory.
    """
    steps = list(zip(engine.steps, engine.steps[1:], strict=False))
    return sum(
        after.time - step.time
        for step, after in steps
        if step.waiting and step.running < ENGINE["max_num_seqs"]
    )


def unit(engine: Served) -> float:
    """Seconds that requests take which fill a third of the memory: the traces' unit of time."""
    seconds = []
    for n in range(3):
        begin = time.monotonic()
        for k, arrival in enumerate(UNIT_BATCH):
            engine.submit(f"unit {n} {k}", arrival.tokens(f"unit {n} {k}"), arrival.output)
        engine.wait()
        seconds.append(time.monotonic() - begin)
    return statistics.median(seconds)


def ratios(runs: Sequence[Run], trace: str) -> dict[str, list[float]]:
    """Pair by pair, how many times better the shared budget is; more is better."""
    static, shared = (
        [run for run in runs if run["trace"] == trace and run["kind"] == kind]
        for kind in ("static", "shared")
    )
    pairs = list(zip(static, shared, strict=True))
    return {
        name: [
            new[name] / old[name] if name == "requests_per_s" else old[name] / new[name]
            for old, new in pairs
        ]
        for name in MEASURES
    }


def show_trace(name: str, trace: Sequence[Arrival], unit_s: float) -> None:
    """Print a trace, so that it can be repeated."""
    console.print(
        f"\ntrace {name} (seed {SEED}, unit {unit_s:.3f} s): second engine:prompt+output tokens"
    )
    shown = (f"{a.time * unit_s:.3f} {a.engine}:{a.prompt}+{a.output}" for a in trace)
    console.print("  ".join(shown), style="dim")


def show(result: dict[str, Any]) -> None:
    """Print a row for each run, then the ratios of each pair."""
    table = Table(
        title=f"{ENGINES} engines, {BUDGET_BYTES / 2**20:.0f} MiB for their KV caches, "
        f"vLLM {result['vllm']}"
    )
    columns = (
        "trace",
        "memory",
        "TTFT mean, s",
        "p50",
        "p99",
        "requests/s",
        "waiting",
        "preempted",
    )
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n < 2 else "right")
    for run in result["runs"]:
        ttft = (f"{run[name]:.3f}" for name in MEASURES)
        table.add_row(
            run["trace"], run["kind"], *ttft, f"{run['waited']:.1%}", str(run["preempted"])
        )
    console.print(table)
    table = Table(title="shared against static, times better: median (least to most)")
    for column in ("trace", *MEASURES):
        table.add_column(column)
    for trace, found in result["ratios"].items():
        cells = (
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"
            for each in found.values()
        )
        table.add_row(trace, *cells)
    console.print(table)
    most = max(run["most_committed"] for run in result["runs"])
    console.print(f"most that was ever committed: {most / BUDGET_BYTES:.1%} of the budget")


def main() -> int:
    """Command line: see the module's text."""
    given = arguments(__doc__)
    traces = {name: make(ENGINES, given.scale) for name, make in TRACES.items()}
    OUT.mkdir(parents=True, exist_ok=True)
    runs = []
    with tempfile.TemporaryDirectory() as runtime, ExitStack() as stack:
        console.print("starting two times three engines …")
        engines = {kind: start(stack, kind, runtime) for kind in ("static", "shared")}
        for each in [engine for kind in engines.values() for engine in kind]:
            each.ready(timeout=900)
        for each in engines.values():  # a warm-up
            play(each, [Arrival(0.0, n, 600, 20) for n in range(ENGINES)], 0.0, "", runtime)
        unit_s = unit(engines["static"][0])
        for name, trace in traces.items():
            show_trace(name, trace, unit_s)
        for trace, pairs in PAIRS.items():
            for pair in range(pairs if given.scale >= 1 else 1):
                for kind in ("static", "shared")[:: 1 if pair % 2 else -1]:
                    run = play(engines[kind], traces[trace], unit_s, f"{trace} {pair}", runtime)
                    runs.append({"trace": trace, "kind": kind, **run})
                    console.print(f"{trace}, {kind}: TTFT {run['ttft_mean']:.3f} s on average")
    result = {
        **machine(),
        "engines": ENGINES,
        "budget_bytes": BUDGET_BYTES,
        "settings": ENGINE,
        "unit_s": unit_s,
        "traces": {
            name: [[a.time, a.engine, a.prompt, a.output] for a in trace]
            for name, trace in traces.items()
        },
        "ratios": {trace: ratios(runs, trace) for trace in PAIRS},
        "runs": runs,
    }
    show(result)
    write(given.results, "colocation", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
