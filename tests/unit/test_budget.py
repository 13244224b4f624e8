"""An engine's standing with the shared ledger."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvcached_patch.core.totals import Totals
from kvcached_patch.engines.budget import Budget, Geometry, join
from kvcached_patch.engines.budgets import Budgets
from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger import Ledger, ledger_path

SLAB = 4096
GEOMETRY = Geometry(slab_blocks=4, block_bytes=SLAB // 4, least_slabs=2, model="some/model")


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("KVCACHED_PATCH", "1")
    return Ledger(ledger_path(tmp_path / "kvcached-patch", "host"))


def test_what_is_held_stands_in_the_ledger(ledger: Ledger) -> None:
    budget = join(GEOMETRY)
    assert budget.share() is None
    assert budget.reserve(3)
    budget.release(1)
    (engine,) = ledger.engines()
    assert (engine.name, engine.committed, budget.held) == ("model", 2 * SLAB, 2)


def test_limit_and_budget_bound_what_can_be_reserved(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_PATCH_LIMIT", str(5 * SLAB))
    monkeypatch.setenv("KVCACHED_PATCH_BUDGET", str(8 * SLAB))
    first, second = join(GEOMETRY), join(GEOMETRY)
    assert [first.share(), second.share()] == [5, 5]
    assert first.reserve(5)
    assert not first.reserve(1)
    assert second.reserve(3)
    assert not second.reserve(1)
    ledger.set_limit("model", 4 * SLAB)
    assert first.changed
    assert first.share() == 4
    assert not first.changed


def test_a_wish_lowers_the_share_of_who_holds_more(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_PATCH_BUDGET", str(8 * SLAB))
    rich, poor = join(GEOMETRY), join(GEOMETRY)
    assert rich.reserve(8)
    assert rich.share() == 8
    poor.want(6)
    assert rich.changed
    assert rich.share() == 4
    rich.release(4)
    assert poor.share() == 4
    assert poor.reserve(4)
    poor.want(0)
    assert rich.share() == 8


def test_the_share_never_falls_below_one_request(ledger: Ledger) -> None:
    budget = join(GEOMETRY)
    ledger.set_limit("model", 1)
    assert budget.share() == GEOMETRY.least_slabs


def test_a_later_engine_does_not_undo_a_live_budget(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCACHED_PATCH_BUDGET", str(8 * SLAB))
    first = join(GEOMETRY)
    ledger.set_total(6 * SLAB)
    with caplog.at_level(logging.WARNING):
        second = join(GEOMETRY)
    assert ledger.total == 6 * SLAB
    assert "KVCACHED_PATCH_BUDGET=32KiB is not applied" in caplog.text
    assert first.held == second.held == 0


def test_a_fault_is_said_once_bounds_nothing_and_is_made_good(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVCACHED_PATCH_LIMIT", str(2 * SLAB))
    budget = join(GEOMETRY)
    assert budget.reserve(2)
    ledger.path.unlink()
    ledger.path.symlink_to("/dev/null")
    with caplog.at_level(logging.WARNING):
        nothing = {"cached": 0, "free": 0, "queries": 0, "hits": 0, "totals": Totals()}
        faults = [budget.publish(**nothing) for _ in range(3)]
        held = budget.reserve(5)
    assert faults == [None] * 3
    assert caplog.text.count("the ledger cannot be used") == 1
    assert held
    ledger.path.unlink()
    budget.release(6)
    assert budget.held == 1
    (engine,) = ledger.engines()
    assert engine.committed == SLAB


def test_a_ledger_that_cannot_be_used_is_refused_only_if_asked_for(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.path.parent.symlink_to("/")
    budget = join(GEOMETRY)
    assert budget.share() is None
    assert budget.reserve(1000)
    monkeypatch.setenv("KVCACHED_PATCH_LIMIT", "1GiB")
    with pytest.raises(LedgerError):
        join(GEOMETRY)


def test_without_a_ledger_nothing_is_bounded() -> None:
    budget = Budget(None, GEOMETRY)
    assert budget.share() is None
    assert budget.reserve(10)
    budget.want(3)
    budget.publish(cached=1, free=2, queries=3, hits=1, totals=Totals(committed=2))
    budget.release(10)
    assert budget.held == 0


def test_totals_are_published_in_the_pages_of_each_device(ledger: Ledger) -> None:
    other = Ledger(ledger_path(ledger.path.parent, "other"))
    Budgets(
        [join(replace(GEOMETRY, slab_pages=8)), join(replace(GEOMETRY, device="other"))]
    ).publish(cached=0, free=0, queries=0, hits=0, totals=Totals(committed=3, released=2))
    found = [each.engines()[0].totals for each in (ledger, other)]
    assert found == [Totals(committed=24, released=16), Totals(committed=3, released=2)]


def test_a_request_to_trim_is_answered_unless_a_later_one_has_come(ledger: Ledger) -> None:
    budget = join(GEOMETRY)
    budget.share()
    assert budget.asked == 0
    ledger.trim("model")
    assert budget.changed
    budget.share()
    first = budget.asked
    ledger.trim("model")
    budget.trimmed(first)
    budget.share()
    assert budget.asked > first
    budget.trimmed(budget.asked)
    assert budget.asked == 0
    assert [engine.trimming for engine in ledger.engines()] == [False]


def test_a_request_on_one_of_several_devices_is_the_engines(ledger: Ledger) -> None:
    other = Ledger(ledger_path(ledger.path.parent, "other"))
    budgets = Budgets([join(GEOMETRY), join(replace(GEOMETRY, device="other"))])
    other.trim("model")
    budgets.share()
    assert budgets.asked > 0
    budgets.trimmed(budgets.asked)
    assert budgets.asked == 0
    assert [engine.trimming for engine in other.engines()] == [False]


def test_a_device_that_refused_bounds_all_for_a_while(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that had no bound; whoever wants memory gets a share of what there is."""
    monkeypatch.setattr("kvcached_patch.engines.budget.REFUSED_SECONDS", 0.2)
    rich, poor = join(GEOMETRY), join(GEOMETRY)
    assert rich.reserve(8)
    poor.refused()
    poor.want(8)
    assert rich.changed
    assert (rich.share(), poor.share()) == (4, 4)
    assert not poor.reserve(1)
    rich.release(4)
    assert poor.reserve(4)
    time.sleep(0.25)
    assert rich.changed
    assert rich.share() is None
    assert not rich.changed
    assert ledger.total is None
