# SPDX-License-Identifier: Apache-2.0
"""Memory that follows the load: a burst, quiet, a burst, on stock and on patched vLLM.

    python -m bench.reclaim [--scale 1] [--results DIR]

Two whole engines, alike but for the plugin, take their turns; while one works the other is quiet.
In a turn 64 requests of 800 tokens come at once, and again after a pause. Meanwhile the resident
bytes of the KV cache's own mapping in the worker are read from outside (/proc/PID/smaps), every
50 ms or, where a look takes long, as often as takes a tenth of a processor. Retention is `none`, so
that what is shown is the load alone. Prints a table and writes RESULTS/reclaim.json, which
`python -m bench.figure` draws.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.runs import ENGINE_SETTINGS, ENVIRONMENT, OUT, arguments, console, machine, write
from tools.engine_serve import Served, session_of
from tools.tiny_model import write_model

MODEL = "llama"
SPACE_GIB = 4
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 720, 80
QUIET_SECONDS = 5.0
SAMPLE_SECONDS, SAMPLE_LOAD = 0.05, 0.1
TURNS = ("stock", "patched", "patched", "stock")
# A KV cache of 16 KiB per token, as models of half a billion parameters have, behind a tiny model.
SHAPE = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
ENGINE = {
    "hf_overrides": SHAPE,
    "load_format": "dummy",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    **ENGINE_SETTINGS,
}


class Mapping:
    """The mapping that holds a worker's KV cache: the largest of all the engine's processes."""

    def __init__(self, session: int) -> None:
        """`session`: of the engine's processes."""
        found = [(*each, pid) for pid in _processes(session) for each in _mappings(pid)]
        self.size, self._start, self._pid = max(found)

    def resident(self) -> int:
        """Bytes in memory."""
        smaps = Path(f"/proc/{self._pid}/smaps").read_bytes()
        at = smaps.index(b"\nRss:", smaps.index(b"\n%x-" % self._start))
        return int(smaps[at:].split(maxsplit=2)[1]) * 1024


class Sampler:
    """Reads a mapping's residency again and again, in a thread of its own."""

    def __init__(self, mapping: Mapping) -> None:
        self._mapping = mapping
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[tuple[float, int]] = []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            start = time.thread_time()
            resident = self._mapping.resident()
            self.samples.append((time.monotonic(), resident))
            pause = max(SAMPLE_SECONDS, (time.thread_time() - start) / SAMPLE_LOAD)


def _processes(session: int) -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit() and session_of(int(name)) == session:
            yield int(name)


def _mappings(pid: int) -> Iterator[tuple[int, int]]:
    """(size, start) of each mapping."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(word, 16) for word in line.split(maxsplit=1)[0].split("-"))
        yield end - start, start


def start(stack: ExitStack, kind: str, runtime: str) -> Served:
    """One of the two engines, which need not be ready yet."""
    model = write_model(MODEL, OUT / "models")
    env = {
        **ENVIRONMENT,
        "KVCACHED_PATCH": str(int(kind == "patched")),
        "KVCACHED_PATCH_RETAIN": "none",
        "VLLM_CPU_KVCACHE_SPACE": str(SPACE_GIB),
        "XDG_RUNTIME_DIR": runtime,
    }
    job = {"model": str(model), "engine": ENGINE}
    log = OUT / f"reclaim-{kind}.log"
    return stack.enter_context(Served(Path(sys.executable), job, env=env, log=log))


def burst(engine: Served, name: str, requests: int) -> tuple[float, float]:
    """When the requests were sent, and when the last was answered."""
    rng = random.Random(name)
    prompts = [[rng.randrange(4, 500) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    begin = time.monotonic()
    for n, prompt in enumerate(prompts):
        engine.submit(f"{name} {n}", prompt, OUTPUT_TOKENS)
    engine.wait()
    return begin, time.monotonic()


def turn(engine: Served, kind: str, number: int, requests: int) -> dict[str, Any]:
    """Two bursts, each followed by quiet; times count from the first."""
    mapping = Mapping(engine.process.pid)
    bursts = []
    with Sampler(mapping) as sampler:
        time.sleep(1)
        for k in range(2):
            begin, end = burst(engine, f"{number} {k}", requests)
            time.sleep(1)
            left = mapping.resident()
            time.sleep(QUIET_SECONDS - 1)
            bursts.append({"begin": begin, "end": end, "left_bytes": left})
    zero = bursts[0]["begin"]
    for each in bursts:
        within = [n for at, n in sampler.samples if each["begin"] <= at <= each["end"] + 0.2]
        each["peak_bytes"] = max(within)
        each["tokens_per_s"] = requests * OUTPUT_TOKENS / (each["end"] - each["begin"])
        each["begin"], each["end"] = each["begin"] - zero, each["end"] - zero
    samples = [[round(at - zero, 3), resident] for at, resident in sampler.samples]
    return {"kind": kind, "mapped_bytes": mapping.size, "bursts": bursts, "samples": samples}


def show(result: dict[str, Any]) -> None:
    """Print a row for each burst, and the ratios."""
    table = Table(
        title=f"KV memory of the worker: {result['requests']} requests x {result['tokens']} tokens,"
        f" {SPACE_GIB} GiB of space, retention none, vLLM {result['vllm']}"
    )
    for column in ("engine", "peak MiB", "1 s after the last answer, MiB", "ratio", "tokens/s out"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for each in result["turns"]:
        for found in each["bursts"]:
            peak, left = found["peak_bytes"], found["left_bytes"]
            sizes = f"{peak / 2**20:.1f}", f"{left / 2**20:.2f}", f"{left / peak:.2%}"
            table.add_row(each["kind"], *sizes, f"{found['tokens_per_s']:.0f}")
    console.print(table)
    rates = result["throughput_ratios"]
    console.print(
        f"left of the peak, patched: at most {result['left_ratio']:.2%}; throughput patched / "
        f"stock: median {statistics.median(rates):.3f} of {len(rates)}, {min(rates):.3f} to "
        f"{max(rates):.3f}"
    )


def main() -> int:
    """Command line: see the module's text."""
    given = arguments(__doc__)
    requests = max(round(REQUESTS * given.scale), 2)
    order = TURNS if given.scale >= 1 else TURNS[:2]
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as runtime, ExitStack() as stack:
        engines = {kind: start(stack, kind, runtime) for kind in sorted(set(order))}
        for kind, engine in engines.items():
            console.print(f"{kind}: starting …")
            engine.ready()
            burst(engine, "warm-up", 2)
        turns = []
        for number, kind in enumerate(order):
            turns.append(turn(engines[kind], kind, number // 2, requests))
            rates = (f"{found['tokens_per_s']:.0f}" for found in turns[-1]["bursts"])
            console.print(f"{kind}: two bursts, {' and '.join(rates)} tokens/s")
    rates = {
        kind: [b["tokens_per_s"] for t in turns if t["kind"] == kind for b in t["bursts"]]
        for kind in engines
    }
    patched = [b for t in turns if t["kind"] == "patched" for b in t["bursts"]]
    result = {
        **machine(),
        "requests": requests,
        "tokens": PROMPT_TOKENS + OUTPUT_TOKENS,
        "space_gib": SPACE_GIB,
        "retention": "none",
        "left_ratio": max(b["left_bytes"] / b["peak_bytes"] for b in patched),
        "throughput_ratios": [b / a for a, b in zip(rates["stock"], rates["patched"], strict=True)],
        "turns": turns,
    }
    show(result)
    write(given.results, "reclaim", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
