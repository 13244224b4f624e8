"""One engine on several GPUs: what it holds it holds on each."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached_patch import config
from kvcached_patch.core.totals import Totals
from kvcached_patch.engines.budget import Budget, Geometry
from kvcached_patch.engines.budgets import Budgets, join_all
from kvcached_patch.errors import ConfigError
from kvcached_patch.ledger import Ledger, ledger_path

GPUS = ("GPU-a", "GPU-b")
SLAB = 1024


def geometry(device: str | None, factor: int = 1) -> Geometry:
    return Geometry(
        slab_blocks=4, block_bytes=200, page_bytes=SLAB * factor, device=device, model="m"
    )


@pytest.fixture
def ledgers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ledger]:
    monkeypatch.setenv(config.TOGGLE, "1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return [Ledger(ledger_path(config.ledger_dir(), gpu)) for gpu in GPUS]


def held(ledgers: list[Ledger]) -> list[int]:
    return [sum(engine.committed for engine in ledger.engines()) for ledger in ledgers]


def test_it_is_entered_in_the_ledger_of_each_gpu(ledgers: list[Ledger]) -> None:
    budgets = join_all([geometry(gpu, i + 1) for i, gpu in enumerate(GPUS)])
    assert budgets.reserve(3)
    assert held(ledgers) == [3 * SLAB, 6 * SLAB]
    budgets.hold(1)
    budgets.release(2)
    assert held(ledgers) == [2 * SLAB, 4 * SLAB]
    assert budgets.held == 2
    budgets.publish(cached=2, free=1, queries=0, hits=0, totals=Totals())
    assert [ledger.engines()[0].cached for ledger in ledgers] == [400, 400]
    budgets.close()
    assert [ledger.engines() for ledger in ledgers] == [[], []]


def test_what_one_gpu_does_not_have_is_held_on_none(ledgers: list[Ledger]) -> None:
    ledgers[1].set_total(5 * SLAB)
    budgets = join_all([geometry(gpu) for gpu in GPUS])
    assert budgets.share() == budgets.bound == 5
    assert not budgets.reserve(6)
    assert held(ledgers) == [0, 0]
    assert budgets.reserve(5)
    assert not budgets.reserve(1)
    assert held(ledgers) == [5 * SLAB, 5 * SLAB]
    budgets.close()


def test_an_engine_elsewhere_on_one_of_them_bounds_it(ledgers: list[Ledger]) -> None:
    for ledger in ledgers:
        ledger.set_total(10 * SLAB)
    neighbour = ledgers[0].join("neighbour")
    assert neighbour.reserve(7 * SLAB)
    budgets = join_all([geometry(gpu) for gpu in GPUS])
    assert budgets.changed
    budgets.want(8)
    assert budgets.share() == 5  # a fair half of the one
    assert not budgets.changed
    assert budgets.reserve(3)
    assert not budgets.reserve(1)
    neighbour.close()
    budgets.close()


def test_one_device_needs_no_more_than_its_own(ledgers: list[Ledger]) -> None:
    budget = join_all([geometry(GPUS[0])])
    assert isinstance(budget, Budget)
    budget.close()


def test_a_bound_that_one_cannot_keep_leaves_none_entered(ledgers: list[Ledger]) -> None:
    ledgers[1].set_total(SLAB // 2)
    with pytest.raises(ConfigError, match="too small for one request"):
        join_all([geometry(gpu) for gpu in GPUS])
    assert [ledger.engines() for ledger in ledgers] == [[], []]


def test_other_machines_devices_are_bounded_by_nothing(
    ledgers: list[Ledger], caplog: pytest.LogCaptureFixture
) -> None:
    budgets = join_all([geometry(GPUS[0]), geometry(None)])
    assert isinstance(budgets, Budgets)
    assert "without the shared ledger on other machines" in caplog.text
    ledgers[0].set_total(2 * SLAB)
    assert budgets.share() == 2
    budgets.close()
