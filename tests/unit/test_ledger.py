"""An engine gets what its limit and the budget leave it, for as long as it lives."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kvcached_patch.core.sizes import MOST_BYTES
from kvcached_patch.core.totals import Totals
from kvcached_patch.errors import EngineNotFound, LedgerError
from kvcached_patch.ledger import Ledger, devices, ledger_path
from kvcached_patch.ledger_file import SLOTS, UNUSED, Field, LedgerFile
from kvcached_patch.system import default_dir
from tests.ledgers import Engine

KIB, MIB, GIB, TIB = (1024**power for power in range(1, 5))


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(ledger_path(tmp_path / "run", "host"))


# Joining


def test_names_are_unique_among_live_engines(ledger: Ledger) -> None:
    accounts = [ledger.join(name) for name in ("a", "a", "b", "a", "a-2", "")]
    assert [account.name for account in accounts] == ["a", "a-2", "b", "a-3", "a-2-2", "engine"]
    accounts[1].close()
    assert ledger.join("a").name == "a-2"


@pytest.mark.parametrize("name", ["é" * 100, "€" * 100, "x" + "😀" * 100])
def test_a_long_name_is_cut_between_characters(ledger: Ledger, name: str) -> None:
    first, second = ledger.join(name, model=name), ledger.join(name)
    records = ledger.engines()
    assert [record.name for record in records] == [first.name, second.name]
    assert name.startswith(first.name)
    assert second.name.endswith("-2")
    assert name.startswith(second.name[:-2])
    assert all(60 < len(each.name.encode()) <= 64 for each in records)
    assert name.startswith(records[0].model)
    assert 92 < len(records[0].model.encode()) <= 96


def test_what_a_terminal_would_obey_is_not_kept(ledger: Ledger) -> None:
    assert ledger.join("a\x1b[2J\0\nb\udc80").name == "a?[2J??b?"


def test_a_full_ledger_says_who_is_in_it(ledger: Ledger) -> None:
    accounts = [ledger.join("a") for _ in range(SLOTS)]
    with pytest.raises(LedgerError, match=rf"found {SLOTS} live engines, expected fewer: a, a-10"):
        ledger.join("b")
    accounts[7].close()
    assert ledger.join("b").name == "b"


def test_the_record_of_the_longest_dead_is_taken_last_of_all_unused(ledger: Ledger) -> None:
    with Engine(ledger.path, "dead", 5) as engine:
        engine.ready().kill()
        assert [(each.name, each.alive) for each in ledger.engines()] == [("dead", False)]
        for _ in range(SLOTS - 1):
            ledger.join("a")
        assert len(ledger.engines()) == SLOTS
        ledger.join("last")
        assert "dead" not in [each.name for each in ledger.engines()]


def test_what_joined_is_what_is_read(ledger: Ledger) -> None:
    account = ledger.join("a", model="org/model", reserved=8 * GIB, limit=GIB)
    assert account.reserve(MIB)
    account.want(KIB)
    account.publish(cached=1, free=2, queries=4, hits=3)
    account.publish(free=5)
    (record,) = ledger.engines()
    assert (record.name, record.pid, record.model) == ("a", os.getpid(), "org/model")
    assert (record.reserved, record.committed, record.limit) == (8 * GIB, MIB, GIB)
    assert (record.cached, record.free, record.wanted) == (1, 5, KIB)
    assert (record.queries, record.hits) == (4, 3)
    assert record.alive
    assert account.committed == MIB


def test_totals_are_read_as_they_were_published(ledger: Ledger) -> None:
    account = ledger.join("a", model="org/model")
    totals = Totals(committed=7, misses=3)
    for seconds in (0.0, 0.001, 0.0011, 99.0):
        totals.count_release(1, seconds)
    account.publish(totals=totals.in_pages(10))
    account.publish(free=5)
    (record,) = ledger.engines()
    assert record.totals == Totals(70, 40, 3, 99_002_100_000, [2, 1, *[0] * 8, 1])
    assert (record.name, record.model, record.free) == ("a", "org/model", 5)
    assert record.age_s < 60


def test_reading_makes_no_file(ledger: Ledger) -> None:
    assert ledger.engines() == []
    assert ledger.total is None
    with pytest.raises(LedgerError, match="no engine is running"):
        ledger.set_limit("a", 1)
    assert not ledger.path.parent.exists()


# Reserving


def test_without_bounds_everything_is_to_be_had(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert account.headroom() == MOST_BYTES
    assert account.share() is None
    assert account.reserve(TIB)


def test_a_limit_bounds_one_engine(ledger: Ledger) -> None:
    a, b = ledger.join("a", limit=100), ledger.join("b")
    assert a.reserve(60)
    assert not a.reserve(41)
    assert a.headroom() == 40
    assert b.reserve(1000)
    assert a.reserve(40)
    assert (a.headroom(), a.share(), a.reserve(1), a.reserve(0)) == (0, 100, False, True)


def test_the_budget_bounds_all_engines(ledger: Ledger) -> None:
    ledger.set_total(100)
    a, b = ledger.join("a"), ledger.join("b", limit=90)
    assert a.reserve(60)
    assert not b.reserve(41)
    assert (a.headroom(), b.headroom()) == (40, 40)
    assert b.reserve(40)
    assert (a.reserve(1), b.reserve(1)) == (False, False)
    a.release(60)
    assert (a.headroom(), b.headroom()) == (60, 50)
    assert b.committed == 40


def test_bounds_below_what_is_held_leave_it_but_give_nothing(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert account.reserve(100)
    ledger.set_limit("a", 30)
    assert (account.headroom(), account.reserve(1), account.share()) == (0, False, 30)
    ledger.set_limit("a", None)
    ledger.set_total(50)
    assert (account.headroom(), account.reserve(1), account.share()) == (0, False, 50)
    account.release(60)
    assert (account.headroom(), account.reserve(10), account.committed) == (10, True, 50)
    ledger.set_total(None)
    assert ledger.total is None
    assert account.reserve(100)


def test_no_more_can_be_released_than_is_held(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert account.reserve(5)
    with pytest.raises(LedgerError, match="a: release of 6 bytes; expected at most the 5"):
        account.release(6)
    assert account.committed == ledger.engines()[0].committed == 5
    account.release(5)
    assert ledger.engines()[0].committed == 0


@pytest.mark.parametrize("nbytes", [-1, MOST_BYTES + 1])
def test_a_number_that_is_no_size_is_refused(ledger: Ledger, nbytes: int) -> None:
    account = ledger.join("a")
    for call in (account.reserve, account.release, account.want, ledger.set_total):
        with pytest.raises(ValueError, match=f"{nbytes}: expected 0 to"):
            call(nbytes)
    for field in ("cached", "free", "queries", "hits"):
        with pytest.raises(ValueError, match=f"{nbytes}: expected 0 to"):
            account.publish(**{field: nbytes})
    with pytest.raises(ValueError, match=f"{nbytes}: expected 0 to"):
        ledger.join("b", reserved=nbytes)
    assert account.reserve(1)


def test_a_limit_of_nothing_is_refused(ledger: Ledger) -> None:
    ledger.join("a")
    for call in (ledger.set_total, lambda nbytes: ledger.set_limit("a", nbytes)):
        with pytest.raises(ValueError, match="0 bytes: expected at least 1, or None"):
            call(0)


def test_an_unknown_name_is_answered_with_the_live_ones(ledger: Ledger) -> None:
    ledger.join("a")
    ledger.join("b").close()
    with Engine(ledger.path, "c", 0) as engine:
        engine.ready().kill()
        for name in ("b", "c", "x"):
            with pytest.raises(LedgerError, match=f"no engine '{name}'; expected one of: a$"):
                ledger.set_limit(name, 1)


def test_a_request_to_trim_stays_until_it_is_met(ledger: Ledger) -> None:
    account, other = ledger.join("a"), ledger.join("b")
    seen = account.generation
    ledger.trim("a")
    assert account.generation != seen, "which the engine looks at"
    assert account.asked == 0
    account.share()
    assert account.asked > 0
    assert [engine.trimming for engine in ledger.engines()] == [True, False]
    first = account.asked
    ledger.trim("a")
    account.trimmed(first)
    assert [engine.trimming for engine in ledger.engines()] == [True, False], "it was another one"
    account.trimmed(account.asked)
    assert not any(engine.trimming for engine in ledger.engines())
    other.share()
    assert (account.asked, other.asked) == (0, 0)


def test_the_record_of_an_engine_that_left_asks_its_successor_nothing(ledger: Ledger) -> None:
    account = ledger.join("a")
    ledger.trim("a")
    account.close()
    with pytest.raises(EngineNotFound, match="found no engine 'a'; no engine is running"):
        ledger.trim("a")
    accounts = [ledger.join("a") for _ in range(SLOTS)]
    for each in accounts:
        each.share()
    assert not any(each.asked for each in accounts)


def test_threads_of_one_engine_take_turns(ledger: Ledger) -> None:
    ledger.set_total(10)
    account = ledger.join("a")
    got: list[int] = []

    def work() -> None:
        held = 0
        for _ in range(300):
            if account.reserve(3):
                held += 3
            elif held:
                account.release(3)
                held -= 3
        got.append(held)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    assert account.committed == ledger.engines()[0].committed == sum(got) <= 10


# Life and death


def test_a_closed_account_is_gone(ledger: Ledger) -> None:
    ledger.set_total(10)
    a, b = ledger.join("a"), ledger.join("b")
    assert a.reserve(10)
    a.close()
    a.close()
    assert [record.name for record in ledger.engines()] == ["b"]
    assert b.reserve(10)
    for call in (a.headroom, a.share, a.publish, lambda: a.reserve(1), lambda: a.want(0)):
        with pytest.raises(LedgerError, match="a: used after close"):
            call()


@pytest.mark.parametrize("look", ["reserve", "headroom", "engines", "join"])
def test_a_dead_engines_bytes_return_when_anyone_looks(ledger: Ledger, look: str) -> None:
    ledger.set_total(100)
    account = ledger.join("a")
    with Engine(ledger.path, "b", 90) as engine:
        engine.ready()
        assert (account.reserve(20), account.headroom()) == (False, 10)
        engine.kill()  # a zombie from here on
        if look == "reserve":
            assert account.reserve(20)
        elif look == "headroom":
            assert account.headroom() == 100
        elif look == "join":
            assert ledger.join("b").name == "b"
        records = {record.name: record for record in ledger.engines() if not record.alive}
        for name in ["b"] if look != "join" else []:
            dead = records[name]
            assert (dead.committed, dead.reserved, dead.free, dead.age_s < 60) == (0, 0, 0, True)
        assert account.headroom() == 100 - account.committed


def test_a_process_with_a_dead_engines_pid_is_not_that_engine(ledger: Ledger) -> None:
    with Engine(ledger.path, "b", 90) as engine:
        engine.ready().kill()
        with LedgerFile(ledger.path) as table:
            table.put(0, Field.PID, os.getpid())
        (record,) = ledger.engines()
        assert (record.name, record.pid, record.alive) == ("b", os.getpid(), False)


def test_who_took_a_dead_engines_record_meanwhile_is_not_taken_for_dead(ledger: Ledger) -> None:
    with Engine(ledger.path, "b", 90) as engine:
        engine.ready().kill()
        file = LedgerFile(ledger.path)
        with file as table:
            pass
        with file as now:
            now.put(0, Field.STATE, UNUSED)
            now.put(0, Field.SEEN, 0)
        account = ledger.join("a")
        assert account.reserve(5)
        assert file.reap(table)
        assert [(each.name, each.alive) for each in ledger.engines()] == [("a", True)]


# Places


def test_the_runtime_directory_is_used_if_it_is_usable(tmp_path: Path) -> None:
    uid, file, temporary = os.getuid(), tmp_path / "file", tmp_path / "tmp"
    file.touch()
    fallback = temporary / f"kvcached-patch-{uid}"
    assert default_dir(str(tmp_path), temporary, uid) == tmp_path / "kvcached-patch"
    for unusable in (None, "", "relative", str(file), str(tmp_path / "absent")):
        assert default_dir(unusable, temporary, uid) == fallback
    other = default_dir(str(tmp_path), temporary, uid + 1)
    assert other == temporary / f"kvcached-patch-{uid + 1}"


def test_each_device_has_its_file(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    assert devices(directory) == []
    for device in ("host", "cuda:0", "../up", "GPU-1.x_y"):
        path = ledger_path(directory, device)
        assert path.parent == directory
        Ledger(path).set_total(1)
    (directory / "host.ledger.bad").touch()
    assert devices(directory) == [".._up", "GPU-1.x_y", "cuda_0", "host"]
