"""What the engines of a front end hold and have done, on vLLM's own ``/metrics``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path

import vllm
from prometheus_client import REGISTRY
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvcached_patch import __version__, config
from kvcached_patch.core.totals import RELEASE_BOUNDS
from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger import EngineRecord, Ledger, devices, ledger_path
from kvcached_patch.seams.apply import tally
from kvcached_patch.system import descends

logger = logging.getLogger("vllm.kvcached_patch")

Number = Callable[[EngineRecord], "int | None"]
_LABELS = ("device", "engine")
_GAUGES: dict[str, tuple[str, Number]] = {
    "reserved_bytes": (
        "Address range of the KV cache, in bytes.",
        lambda engine: engine.reserved,
    ),
    "committed_bytes": (
        "KV-cache memory that the engine holds, in bytes.",
        lambda engine: engine.committed,
    ),
    "cached_bytes": (
        "KV-cache memory that only the prefix cache keeps, in bytes.",
        lambda engine: engine.cached,
    ),
    "limit_bytes": (
        "The most KV-cache memory that the engine may hold, in bytes; absent without a limit.",
        lambda engine: engine.limit,
    ),
}
_COUNTERS: dict[str, tuple[str, Number]] = {
    "pages_committed": (
        "Pages committed.",
        lambda engine: engine.totals.committed,
    ),
    "pages_released": (
        "Pages given back.",
        lambda engine: engine.totals.released,
    ),
    "scheduling_misses": (
        "Steps in which a request got no memory because of a limit or the budget.",
        lambda engine: engine.totals.misses,
    ),
}


class LedgerCollector(Collector):
    """Reads the ledgers at each scrape; of their engines, those that this process started."""

    def __init__(self, directory: Path) -> None:
        """`directory`: where the ledgers of this user are."""
        self._directory = directory
        self._faulty = False

    def describe(self) -> list[Metric]:
        """Name the metrics, which takes no look at a ledger."""
        return list(_metrics({}, {}))

    def collect(self) -> list[Metric]:
        """All metrics; without samples of a ledger that cannot be read, which is said once."""
        engines: dict[str, list[EngineRecord]] = {}
        budgets: dict[str, int] = {}
        problem: LedgerError | None = None
        try:
            names = devices(self._directory)
        except LedgerError as error:
            names, problem = [], error
        for device in names:
            ledger = Ledger(ledger_path(self._directory, device))
            try:
                mine, total = _engines_of_this_process(ledger), ledger.total
            except LedgerError as error:
                problem = error
                continue
            engines[device] = mine
            if mine and total is not None:
                budgets[device] = total
        if problem and not self._faulty:
            logger.warning("kvcached-patch: /metrics lacks what the ledger says: %s", problem)
        self._faulty = problem is not None
        return list(_metrics(engines, budgets))


def _engines_of_this_process(ledger: Ledger) -> list[EngineRecord]:
    live = [engine for engine in ledger.engines() if engine.alive]
    return [engine for engine in live if descends(engine.pid, os.getpid())]


def _metrics(engines: dict[str, list[EngineRecord]], budgets: dict[str, int]) -> Iterator[Metric]:
    info = {"version": __version__, "vllm": vllm.__version__, "seams": tally()}
    yield InfoMetricFamily(
        "kvcached_patch", "Versions, and seams applied of those loaded in this process.", value=info
    )
    found = [(engine, (device, engine.name)) for device in engines for engine in engines[device]]
    for name, (text, number) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"kvcached_patch_{name}", text, labels=_LABELS)
        for engine, labels in found:
            if (value := number(engine)) is not None:
                gauge.add_metric(labels, value)
        yield gauge
    budget = GaugeMetricFamily(
        "kvcached_patch_budget_bytes",
        "The most KV-cache memory that all engines of this user may hold, in bytes; absent "
        "without a budget.",
        labels=("device",),
    )
    for device, total in budgets.items():
        budget.add_metric((device,), total)
    yield budget
    for name, (text, number) in _COUNTERS.items():
        counter = CounterMetricFamily(f"kvcached_patch_{name}", text, labels=_LABELS)
        for engine, labels in found:
            counter.add_metric(labels, number(engine) or 0)
        yield counter
    latency = HistogramMetricFamily(
        "kvcached_patch_release_seconds",
        "From the plan that lets memory go until all workers have carried it out, in seconds.",
        labels=_LABELS,
    )
    bounds = [*map(str, RELEASE_BOUNDS), "+Inf"]
    for engine, labels in found:
        below = accumulate(engine.totals.releases)
        buckets = list(zip(bounds, map(float, below), strict=True))
        latency.add_metric(labels, buckets, engine.totals.release_ns / 1e9)
    yield latency


@cache
def register() -> None:
    """Have this process's metrics show the ledger; once, however many clients it makes."""
    REGISTRY.register(LedgerCollector(config.ledger_dir()))
