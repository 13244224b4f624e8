"""What /metrics shows of the ledgers, of which engines, and under which names."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvcached_patch.core.totals import Totals
from kvcached_patch.engines.vllm_metrics import LedgerCollector
from kvcached_patch.ledger import Ledger, ledger_path
from tests.fresh import output
from tests.ledgers import Engine

SHOW = """
import sys
from pathlib import Path
from kvcached_patch.engines.vllm_metrics import LedgerCollector
for metric in LedgerCollector(Path(sys.argv[1])).collect():
    for sample in metric.samples:
        print(sample.name, *sample.labels.values())
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(ledger_path(tmp_path / "run", "GPU-1"))


def scrape(collector: LedgerCollector) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples by name and by the labels' values, as a strict reader of OpenMetrics has them."""
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("kvcached_patch_")
            found.setdefault(name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_every_number_of_an_engine(ledger: Ledger) -> None:
    ledger.set_total(1000)
    account = ledger.join("a", reserved=900, limit=500)
    account.reserve(300)
    totals = Totals(committed=7, misses=3)
    totals.count_release(5, 0.004)
    totals.count_release(1, 7.0)
    account.publish(cached=100, totals=totals)
    found = scrape(LedgerCollector(ledger.path.parent))
    (info,) = found.pop("info")
    buckets = found.pop("release_seconds_bucket")
    assert found.pop("budget_bytes") == {("GPU-1",): 1000}
    assert {name: samples[("GPU-1", "a")] for name, samples in found.items()} == {
        "reserved_bytes": 900, "committed_bytes": 300, "cached_bytes": 100, "limit_bytes": 500,
        "pages_committed_total": 7, "pages_released_total": 6, "scheduling_misses_total": 3,
        "release_seconds_count": 2, "release_seconds_sum": 7.004,
    }  # fmt: skip
    counts = {labels[-1]: count for labels, count in buckets.items()}
    assert (counts["0.0025"], counts["0.005"], counts["5.0"], counts["+Inf"]) == (0, 1, 1, 2)
    assert len(info) == 3


def test_without_limit_and_budget_there_are_no_such_samples(ledger: Ledger) -> None:
    ledger.join("a")
    found = scrape(LedgerCollector(ledger.path.parent))
    assert found["committed_bytes"] == {("GPU-1", "a"): 0}
    assert not {"limit_bytes", "budget_bytes"} & found.keys()


def test_engines_of_this_process_are_shown_on_every_device(ledger: Ledger) -> None:
    other = Ledger(ledger_path(ledger.path.parent, "host"))
    with Engine(ledger.path, "a", 5) as a, Engine(other.path, "a", 6) as b:
        a.ready()
        b.ready()
        found = scrape(LedgerCollector(ledger.path.parent))
        assert found["committed_bytes"] == {("GPU-1", "a"): 5, ("host", "a"): 6}
        b.kill()
        found = scrape(LedgerCollector(ledger.path.parent))
        assert found["committed_bytes"] == {("GPU-1", "a"): 5}


def test_engines_of_other_servers_are_not_shown(ledger: Ledger) -> None:
    ledger.set_total(1000)
    ledger.join("a")
    shown = output("-c", SHOW, ledger.path.parent).splitlines()
    assert [line.partition(" ")[0] for line in shown] == ["kvcached_patch_info"]


def test_a_ledger_that_cannot_be_read_is_said_once_and_hides_no_other(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    other = Ledger(ledger_path(ledger.path.parent, "host"))
    ledger.join("a")
    other.join("a")
    ledger.path.chmod(0o644)
    collector = LedgerCollector(ledger.path.parent)
    shown = [scrape(collector)["committed_bytes"] for _ in range(3)]
    assert shown == [{("host", "a"): 0}] * 3
    assert len(caplog.messages) == 1
    assert f"/metrics lacks what the ledger says: ledger {ledger.path}" in caplog.text
    ledger.path.chmod(0o600)
    assert len(scrape(collector)["committed_bytes"]) == 2


def test_a_directory_that_is_not_ours_leaves_the_versions(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    ledger.path.parent.mkdir()
    ledger.path.parent.chmod(0o755)
    assert scrape(LedgerCollector(ledger.path.parent)).keys() == {"info"}
    assert f"ledger {ledger.path.parent}: found a directory" in caplog.text
