# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's side costs: the free queue's verbs, and `schedule()` as a whole.

    python -m bench.scheduling [--scale 1] [--results DIR]

Verbs: nanoseconds per block of vLLM's queue and of ours over blocks of their own, in turn, for
pools of three sizes; requests of 64 blocks come and go in random order, and single blocks.
`take`: popleft_n, `free`: prepend_n of blocks with nothing to keep, `cache`: append_n of hashed
ones, `hit`: remove of a hashed one. Filing freed blocks is put off until the next `take`, whose
time holds it, so that `take` and `free` count together.

`schedule()`: microseconds of vLLM's real scheduler with so many running requests, one without and
one with the plugin in one process, step by step in turn. The first is vLLM's own functions, without
a wrapper. Prints tables and writes RESULTS/scheduling.json.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import statistics
import sys
import tempfile
import time
from types import MethodType
from typing import Any

from rich.table import Table

from bench.fragmentation import answer
from bench.runs import arguments, console, machine, spread, write

POOLS = (1_000, 100_000, 1_000_000)
BATCHES = (1, 64)
SLAB_BLOCKS = 4
REPEATS = 15
BLOCKS_PER_REPEAT = 640
REQUESTS = (1, 16, 64, 256)
STEPS = 600
BLOCK_STEPS = 50  # steps whose median is one sample


class Queue:
    """One queue over blocks of its own, in use as a pool uses it."""

    def __init__(self, blocks: int, *, ours: bool) -> None:
        """Free but for the null block."""
        from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

        from kvcached_patch.core.free_list import page_aware

        self.hashed = False
        own = [KVCacheBlock(i) for i in range(blocks)]
        queue: Any = FreeKVCacheBlockQueue(own)
        queue.popleft()
        if ours:
            queue = page_aware(
                queue, own, SLAB_BLOCKS, lambda freed: freed if self.hashed else [], time.monotonic
            )
        self.queue = queue

    def run(self, batch: int, seed: int) -> dict[str, float]:
        """Nanoseconds per block of each verb."""
        queue, rng = self.queue, random.Random(seed)
        turns = BLOCKS_PER_REPEAT // batch
        blocks = turns * batch
        times = {"take": -time.perf_counter_ns()}
        taken = [queue.popleft_n(batch) for _ in range(turns)]
        times["take"] += time.perf_counter_ns()
        rng.shuffle(taken)
        taken = [each[::-1] for each in taken]  # as a request's blocks are freed
        times["free"] = -time.perf_counter_ns()
        for each in taken:
            queue.prepend_n(each)
        times["free"] += time.perf_counter_ns()

        taken = [queue.popleft_n(batch) for _ in range(turns)]
        self.hashed = True
        times["cache"] = -time.perf_counter_ns()
        for each in taken:
            queue.append_n(each)
        times["cache"] += time.perf_counter_ns()
        rng.shuffle(taken)
        times["hit"] = -time.perf_counter_ns()
        for each in taken:
            for block in each:
                queue.remove(block)
        times["hit"] += time.perf_counter_ns()
        self.hashed = False
        for each in taken:
            queue.prepend_n(each)
        return {verb: nanoseconds / blocks for verb, nanoseconds in times.items()}


def measure_verbs(repeats: int) -> list[dict[str, Any]]:
    """Nanoseconds per block, both queues in turn."""
    rows = []
    for blocks in POOLS:
        queues = {"vllm": Queue(blocks, ours=False), "ours": Queue(blocks, ours=True)}
        for batch in BATCHES:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in queues}
            for repeat in range(repeats + 1):
                for name in list(queues)[:: 1 if repeat % 2 else -1]:
                    times = queues[name].run(batch, repeat)
                    times["take and free"] = times["take"] + times["free"]
                    if repeat:  # the first one touches everything for the first time
                        found[name].append(times)
            for verb in found["vllm"][0]:
                both = {name: [times[verb] for times in found[name]] for name in queues}
                ratios = [ours / stock for stock, ours in zip(*both.values(), strict=True)]
                row = {name: spread(values) for name, values in both.items()}
                rows.append({"blocks": blocks, "batch": batch, "verb": verb, **row})
                rows[-1]["ratio"] = spread(ratios)
        del queues
        gc.collect()
    return rows


class Running:
    """A scheduler whose requests decode, some tokens of a block apart."""

    def __init__(self, requests: int, *, elastic: bool) -> None:
        """Admit the requests; without `elastic` it is vLLM's own functions that run."""
        from kvcached_patch.engines import vllm_scheduler
        from tests import steps as real
        from tests.slots import Setup

        setup = Setup(
            blocks=32768,
            block_tokens=16,
            slab_blocks=SLAB_BLOCKS,
            caching=True,
            requests=max(REQUESTS),
            step_tokens=8192,
            model_tokens=1024,
        )
        vllm_scheduler.agree(real.agreement(setup) if elastic else None)
        self.scheduler: Any = real.make_scheduler(setup)
        if not elastic:
            manager = self.scheduler.kv_cache_manager
            for owner, name in ((self.scheduler, "schedule"), (manager, "allocate_slots")):
                own = vars(type(owner)).get(name) or vars(type(owner).__mro__[1])[name]
                setattr(owner, name, MethodType(own.__wrapped__, owner))
        rng = random.Random(1)
        for i in range(requests):
            prompt = [rng.randrange(3, 500) for _ in range(30 + i % 16)]
            self.scheduler.add_request(real.make_request(setup, f"r{i}", prompt, 900))

    def step(self) -> float:
        """Microseconds of one `schedule()`."""
        start = time.perf_counter_ns()
        output = self.scheduler.schedule()
        taken = time.perf_counter_ns() - start
        self.scheduler.update_from_output(output, answer(self.scheduler, output))
        return taken / 1000


def measure_schedule(requests: int, steps: int, *, bounded: bool) -> dict[str, Any]:
    """Both schedulers in turn; a sample is the median of some steps."""
    os.environ["KVCACHED_PATCH_LIMIT"] = "1GiB" if bounded else ""
    both = {"vllm": Running(requests, elastic=False), "ours": Running(requests, elastic=True)}
    times: dict[str, list[float]] = {name: [] for name in both}
    for step in range(steps + BLOCK_STEPS):
        for name in list(both)[:: 1 if step % 2 else -1]:
            times[name].append(both[name].step())
    samples = {
        name: [
            statistics.median(values[start : start + BLOCK_STEPS])
            for start in range(BLOCK_STEPS, len(values), BLOCK_STEPS)
        ]
        for name, values in times.items()
    }
    ratios = [ours / stock for stock, ours in zip(*samples.values(), strict=True)]
    row: dict[str, Any] = {name: spread(values) for name, values in samples.items()}
    return {"requests": requests, "bounded": bounded, **row, "ratio": spread(ratios)}


def show(result: dict[str, Any]) -> None:
    """Print both tables."""

    def cells(row: dict[str, Any]) -> list[str]:
        ratio = row["ratio"]
        times = [f"{row[name]['median']:.0f}" for name in ("vllm", "ours")]
        return [*times, f"{ratio['median']:.2f}", f"{ratio['low']:.2f} to {ratio['high']:.2f}"]

    verbs = Table(title="free queue, ns per block (median; ratio and its quartiles)")
    for name in ("blocks in the pool", "at once", "verb", "vLLM's", "ours", "ratio", "quartiles"):
        verbs.add_column(name, justify="left" if name == "verb" else "right")
    for row in result["verbs"]:
        verbs.add_row(f"{row['blocks']:,}", str(row["batch"]), row["verb"], *cells(row))
    schedule = Table(title="schedule(), µs (median; ratio and its quartiles)")
    for name in ("running requests", "limit", "vLLM's", "ours", "ratio", "quartiles"):
        schedule.add_column(name, justify="right")
    for row in result["schedule"]:
        limit = "yes" if row["bounded"] else "no"
        schedule.add_row(str(row["requests"]), limit, *cells(row))
    console.print(verbs, schedule)


def main() -> int:
    """Command line: see the module."""
    from kvcached_patch import _startup

    options = arguments(__doc__)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as runtime:
        os.environ.update(KVCACHED_PATCH="1", XDG_RUNTIME_DIR=runtime)
        _startup.install()
        gc.disable()  # EngineCore freezes what it has; a collection would hit one side by chance
        repeats, steps = (max(3, round(n * options.scale)) for n in (REPEATS, STEPS))
        steps = -(-steps // BLOCK_STEPS) * BLOCK_STEPS
        result = {**machine(), "slab_blocks": SLAB_BLOCKS, "verbs": measure_verbs(repeats)}
        result["schedule"] = [
            measure_schedule(requests, max(steps, 3 * BLOCK_STEPS), bounded=bounded)
            for bounded in (False, True)
            for requests in REQUESTS
        ]
    show(result)
    write(options.results, "scheduling", result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
