"""An engine whose file is lost under it enters itself again with what it holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger import Account, Ledger, ledger_path
from kvcached_patch.ledger_file import SIZE


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(ledger_path(tmp_path / "run", "host"))


def lose(path: Path, how: str) -> None:
    if how == "deleted":
        path.unlink()
    elif how == "directory deleted":
        path.unlink()
        path.parent.rmdir()
    elif how == "replaced":
        path.unlink()
        Ledger(path).set_total(77)
    elif how == "emptied":
        os.truncate(path, 0)
    elif how == "cut short":
        os.truncate(path, 100)
    elif how == "overwritten":
        path.write_bytes(b"garbage" * 5000)
    elif how == "zeroed":
        path.write_bytes(bytes(SIZE))


WAYS = ["deleted", "directory deleted", "replaced", "emptied", "cut short", "overwritten", "zeroed"]


def known(account: Account, ledger: Ledger) -> tuple[str, int, int | None]:
    (record,) = (each for each in ledger.engines() if each.name == account.name)
    return record.model, record.committed, record.limit


@pytest.mark.parametrize("how", WAYS)
def test_an_engine_whose_file_is_lost_enters_itself_again(ledger: Ledger, how: str) -> None:
    ledger.set_total(100)
    a, b = ledger.join("a", model="m", limit=60), ledger.join("b")
    assert a.reserve(50)
    assert b.reserve(20)
    lose(ledger.path, how)
    seen = b.generation  # without a crash
    b.publish()
    a.publish()
    assert (known(a, ledger), known(b, ledger)) == (("m", 50, 60), ("", 20, None))
    assert ledger.total == (77 if how == "replaced" else 100)
    assert b.generation != seen or how not in ("emptied", "overwritten")
    a.release(50)
    b.release(20)
    assert b.reserve(70)
    assert [each.name for each in ledger.engines()] == [b.name, a.name]


@pytest.mark.parametrize("how", ["emptied", "cut short", "overwritten", "zeroed"])
@pytest.mark.parametrize("call", ["reserve", "release", "headroom", "share", "want", "close"])
def test_any_call_mends_the_file(ledger: Ledger, how: str, call: str) -> None:
    account = ledger.join("a")
    assert account.reserve(50)
    lose(ledger.path, how)
    getattr(account, call)(*([5] if call in ("reserve", "release", "want") else []))
    held = {"reserve": 55, "release": 45, "close": 0}.get(call, 50)
    assert sum(each.committed for each in ledger.engines()) == held


def test_a_file_that_cannot_be_read_costs_an_engine_nothing_but_the_call(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert account.reserve(50)
    ledger.path.unlink()
    ledger.path.symlink_to("elsewhere")
    for _ in range(2):
        with pytest.raises(LedgerError, match="found a symbolic link"):
            account.publish()
    assert account.generation == -1
    ledger.path.unlink()
    assert account.share() is None
    assert known(account, ledger) == ("", 50, None)
