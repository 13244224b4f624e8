# SPDX-License-Identifier: Apache-2.0
"""How well live blocks are packed into pages: our order of free blocks against vLLM's.

    python -m bench.fragmentation [STEPS]

Drives vLLM's real scheduler without a model: decodes of mixed length start and end all the time,
while the load swings between a few requests and a nearly full pool. Counted, for each size of
slab (so many blocks, committed and released as one): committed slabs ÷ the fewest that could hold
the live blocks. With vLLM's order a slab counts as committed while it holds a live block; with
ours as the plans say, once with and once without the empty slabs that linger. Prints a table and
writes bench/results/fragmentation.json.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
SLABS = (1, 4, 16, 64)
STEPS, WARM_UP_STEPS = 8000, 200
STEP_SECONDS = 0.02  # of the clock that our order sees
PERIOD_STEPS = 2000
MOST_ARRIVALS_PER_STEP = 1.1
BLOCKS, BLOCK_TOKENS = 4096, 16
SEED = 11
COLUMNS = ("average", "p99", "max", "overall")
ENVIRONMENT = {"KVCACHED_PATCH": "1", "KVCACHED_PATCH_RETAIN": "none"}


@dataclass(frozen=True)
class Arrival:
    """A request: the step at which it comes, its lengths in tokens."""

    step: int
    prompt: int
    output: int


@dataclass
class Ratios:
    """Committed slabs and the fewest possible, step by step."""

    committed: list[int] = field(default_factory=list)
    fewest: list[int] = field(default_factory=list)

    def add(self, committed: int, live_blocks: int, slab: int) -> None:
        """Note one step."""
        self.committed.append(committed)
        self.fewest.append(math.ceil(live_blocks / slab))

    def summary(self) -> dict[str, float]:
        """Of the ratios; `overall` is that of the sums, where steps with much live count more."""
        pairs = list(zip(self.committed, self.fewest, strict=True))[WARM_UP_STEPS:]
        ratios = [committed / fewest for committed, fewest in pairs]
        sums = [sum(column) for column in zip(*pairs, strict=True)]
        values = statistics.fmean(ratios), statistics.quantiles(ratios, n=100)[98], max(ratios)
        return dict(zip(COLUMNS, (*values, sums[0] / sums[1]), strict=True))


def arrivals(steps: int) -> list[Arrival]:
    """Lognormal lengths; the rate swings between a twentieth and the most."""
    rng = random.Random(SEED)
    found = []
    for step in range(steps):
        swing = (1 - math.cos(2 * math.pi * step / PERIOD_STEPS)) / 2
        rate = MOST_ARRIVALS_PER_STEP * (0.05 + 0.95 * swing)
        for _ in range(int(rate + rng.random())):
            prompt, output = (
                min(max(int(rng.lognormvariate(mu, 0.8)), 8), 500) for mu in (4.4, 5.0)
            )
            found.append(Arrival(step, prompt, output))
    return found


def drive(slab: int, steps: int, *, caching: bool, elastic: bool) -> Iterator[Any]:
    """Run the scheduler on the arrivals; yields it after each `schedule()`."""
    from kvcached_patch.engines import elastic as side
    from kvcached_patch.engines import vllm_scheduler
    from tests import steps as real
    from tests.slots import Setup

    setup = Setup(
        blocks=BLOCKS,
        block_tokens=BLOCK_TOKENS,
        slab_blocks=slab,
        caching=caching,
        requests=256,
        step_tokens=2048,
        model_tokens=1024,
    )
    clock, rng = real.Clock(), random.Random(SEED)
    with patch.object(side, "time", clock):
        vllm_scheduler.agree(real.agreement(setup) if elastic else None)
        scheduler = real.make_scheduler(setup)
        coming = arrivals(steps)[::-1]
        for step in range(steps):
            while coming and coming[-1].step <= step:
                new = coming.pop()
                prompt = [rng.randrange(3, 500) for _ in range(new.prompt)]
                scheduler.add_request(
                    real.make_request(setup, f"r{len(coming)}", prompt, new.output)
                )
            clock.now += STEP_SECONDS
            if scheduler.has_requests():
                output = scheduler.schedule()
                yield scheduler
                scheduler.update_from_output(output, answer(scheduler, output))


def answer(scheduler: Any, output: Any) -> Any:
    """A token for each request whose known tokens are all computed."""
    from vllm.v1.outputs import ModelRunnerOutput

    names = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[name] for name in names]
    tokens = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    index = {name: i for i, name in enumerate(names)}
    return ModelRunnerOutput(names, index, sampled_token_ids=tokens)


def measure_ours(slab: int, steps: int, *, caching: bool) -> dict[str, Any]:
    """Our order: committed slabs, and those of them that hold a live block."""
    from kvcached_patch.engines.vllm_scheduler import elastic_of

    committed, occupied = Ratios(), Ratios()
    for scheduler in drive(slab, steps, caching=caching, elastic=True):
        elastic = elastic_of(scheduler)
        assert elastic is not None
        queue = elastic.queue
        assert not queue.kept_count, "retention is none"
        live = BLOCKS - queue.num_free_blocks
        committed.add(queue.committed, live, slab)
        occupied.add(queue.committed - queue.empty, live, slab)
    return {"committed": committed.summary(), "occupied": occupied.summary()}


def measure_stock(steps: int, *, caching: bool) -> tuple[dict[int, Any], list[float]]:
    """The order of vLLM, one run for all sizes since it knows none; also how full the pool was."""
    ratios = {slab: Ratios() for slab in SLABS}
    fill = []
    for scheduler in drive(1, steps, caching=caching, elastic=False):
        blocks = scheduler.kv_cache_manager.block_pool.blocks
        live = [block.block_id for block in blocks if block.ref_cnt or block.is_null]
        fill.append(len(live) / BLOCKS)
        for slab, each in ratios.items():
            each.add(len({block_id // slab for block_id in live}), len(live), slab)
    return {slab: {"occupied": each.summary()} for slab, each in ratios.items()}, fill


def run(steps: int) -> dict[str, Any]:
    """All measurements, and what they were made with."""
    import vllm

    result: dict[str, Any] = {
        "vllm": str(vllm.__version__),
        "python": platform.python_version(),
        "steps": steps,
        "blocks": BLOCKS,
        "block_tokens": BLOCK_TOKENS,
        "step_seconds": STEP_SECONDS,
        "requests": len(arrivals(steps)),
        "rows": [],
    }
    for caching in (False, True):
        start = time.perf_counter()
        stock, fill = measure_stock(steps, caching=caching)
        result["fill"] = {"mean": statistics.fmean(fill), "least": min(fill), "most": max(fill)}
        for slab in SLABS:
            row = {"prefix_caching": caching, "slab_blocks": slab, "vllm": stock[slab]}
            row["ours"] = measure_ours(slab, steps, caching=caching)
            result["rows"].append(row)
        name = "on" if caching else "off"
        print(f"prefix caching {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return result


def show(result: dict[str, Any]) -> None:
    """Print the figures as a table."""
    fill = result["fill"]
    table = Table(
        title=f"committed slabs ÷ fewest possible, vLLM {result['vllm']}, {result['steps']} steps,"
        f" {result['requests']} requests,\npool {fill['least']:.0%} to {fill['most']:.0%} full,"
        f" {fill['mean']:.0%} on average"
    )
    for column in ("prefix caching", "slab", "order", *COLUMNS):
        table.add_column(column, justify="right" if column in (*COLUMNS, "slab") else "left")
    for row in result["rows"]:
        for order, found in (
            ("vLLM's", row["vllm"]["occupied"]),
            ("ours", row["ours"]["committed"]),
            ("ours, without lingering", row["ours"]["occupied"]),
        ):
            caching = "on" if row["prefix_caching"] else "off"
            values = [f"{found[column]:.3f}" for column in COLUMNS]
            table.add_row(caching, str(row["slab_blocks"]), order, *values)
        table.add_section()
    Console(width=110).print(table)


def main() -> int:
    """Command line: how many steps."""
    from kvcached_patch import _startup

    steps = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as runtime:
        os.environ.update(ENVIRONMENT, XDG_RUNTIME_DIR=runtime)
        _startup.install()
        result = run(steps)
    show(result)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fragmentation.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
