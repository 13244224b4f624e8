# SPDX-License-Identifier: Apache-2.0
"""How well live blocks are packed into pages: our order of free blocks against vLLM's.

    python -m bench.fragmentation [STEPS]

Drives vLLM's real scheduler without a model: decodes of mixed length start and end all the time,
the load swings between a few requests and a nearly full pool. For each slab size (in blocks; a slab
is what is committed and released as one), committed slabs ÷ the fewest that could hold the live
blocks. With vLLM's order a slab counts as committed while it holds a live block; with ours as the
plans say, empty slabs that linger included. Prints a table, writes bench/results/fragmentation.json.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {
    "KVCACHED_PATCH": "1",
    "KVCACHED_PATCH_RETAIN": "none",
    "XDG_RUNTIME_DIR": tempfile.mkdtemp(),
}

from kvcached_patch import _startup

_startup.install()

import numpy as np
import vllm
from rich.console import Console
from rich.table import Table
from vllm.v1.outputs import ModelRunnerOutput

from kvcached_patch.engines import vllm_scheduler
from tests.slots import Setup
from tests.steps import Clock, geometry, make_request, make_scheduler

RESULTS = Path(__file__).parent / "results"
SLABS = (1, 4, 16, 64)
STEPS = 8000
STEP_SECONDS = 0.02
PERIOD_STEPS = 2000
SEED = 11
SIZE = Setup(
    blocks=4096, block_tokens=16, requests=256, step_tokens=2048, model_tokens=1024, depth=1
)


@dataclass(frozen=True)
class Arrival:
    """A request: step at which it comes, lengths in tokens."""

    step: int
    prompt: int
    output: int


@dataclass
class Ratios:
    """Committed slabs over the fewest possible, step by step."""

    committed: list[int] = field(default_factory=list)
    fewest: list[int] = field(default_factory=list)

    def add(self, committed: int, live_blocks: int, slab: int) -> None:
        """Note one step."""
        self.committed.append(committed)
        self.fewest.append(math.ceil(live_blocks / slab))

    def summary(self) -> dict[str, float]:
        """average: of the ratios; overall: of the sums, so that full steps count for more."""
        ratios = [c / f for c, f in zip(self.committed, self.fewest, strict=True)]
        return {
            "average": statistics.fmean(ratios),
            "p99": statistics.quantiles(ratios, n=100)[98],
            "max": max(ratios),
            "overall": sum(self.committed) / sum(self.fewest),
        }


def arrivals(steps: int) -> list[Arrival]:
    """Lognormal lengths; the rate swings once per period, between a twentieth and the most."""
    rng = random.Random(SEED)
    found = []
    for step in range(steps):
        swing = (1 - math.cos(2 * math.pi * step / PERIOD_STEPS)) / 2
        rate = 0.75 * (0.05 + 0.95 * swing)
        while rng.random() < rate:
            rate -= 1
            lengths = [min(max(int(rng.lognormvariate(m, 0.8)), 8), 500) for m in (4.4, 5.0)]
            found.append(Arrival(step, *lengths))
    return found


def drive(setup: Setup, steps: int, *, elastic: bool) -> Iterator[Any]:
    """Run the scheduler on the arrivals; yields it after each step with requests."""
    clock, rng = Clock(), random.Random(SEED)
    with patch.object(vllm_scheduler, "time", clock):
        vllm_scheduler.agree(geometry(setup) if elastic else None)
        scheduler = make_scheduler(setup)
        coming = arrivals(steps)[::-1]
        for step in range(steps):
            while coming and coming[-1].step <= step:
                new = coming.pop()
                prompt = [rng.randrange(3, 500) for _ in range(new.prompt)]
                scheduler.add_request(make_request(setup, f"r{len(coming)}", prompt, new.output))
            clock.now += STEP_SECONDS
            if not scheduler.has_requests():
                continue
            output = scheduler.schedule()
            yield scheduler
            names = list(output.num_scheduled_tokens)
            whole = [scheduler.requests[name] for name in names]
            sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in whole]
            index = {name: i for i, name in enumerate(names)}
            scheduler.update_from_output(
                output, ModelRunnerOutput(names, index, sampled_token_ids=sampled)
            )


def live(pool: Any) -> np.ndarray:
    """Whether each block is in use; the null block always is."""
    used = np.fromiter((block.ref_cnt > 0 for block in pool.blocks), bool, len(pool.blocks))
    used[0] = True
    return used


def measure_ours(setup: Setup, steps: int) -> dict[str, Any]:
    """Our order, with and without the empty slabs that linger."""
    ratios, packed = Ratios(), Ratios()
    preemptions = 0
    for scheduler in drive(setup, steps, elastic=True):
        elastic = vllm_scheduler.elastic_of(scheduler)
        assert elastic is not None
        queue, blocks = elastic.queue, setup.blocks - elastic.queue.num_free_blocks
        blocks += len(queue.kept_since)
        ratios.add(queue.committed, blocks, setup.slab_blocks)
        packed.add(queue.committed - queue.empty, blocks, setup.slab_blocks)
        preemptions = max(preemptions, sum(r.num_preemptions for r in scheduler.running))
    return {"committed": ratios.summary(), "occupied": packed.summary(), "preemptions": preemptions}


def measure_stock(setup: Setup, steps: int) -> dict[int, dict[str, Any]]:
    """vLLM's order, which does not depend on slabs: one run for all sizes."""
    ratios = {slab: Ratios() for slab in SLABS}
    fill = []
    for scheduler in drive(setup, steps, elastic=False):
        used = live(scheduler.kv_cache_manager.block_pool)
        blocks = int(used.sum())
        fill.append(blocks / setup.blocks)
        for slab, each in ratios.items():
            each.add(int(used.reshape(-1, slab).any(axis=1).sum()), blocks, slab)
    print(f"  fill of the pool: mean {statistics.fmean(fill):.0%}, {min(fill):.0%}-{max(fill):.0%}")
    return {slab: {"occupied": each.summary()} for slab, each in ratios.items()}
