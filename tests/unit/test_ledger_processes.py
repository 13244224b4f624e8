"""Processes that share a ledger never exceed its budget, however they end."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcached_patch import ledger_file
from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger import Ledger, ledger_path
from kvcached_patch.ledger_file import SLOTS, UNUSED, Field, LedgerFile
from tests.ledgers import Engine

BUDGET = 1000
OPERATIONS = 20_000  # of each of the 8 processes: some ten seconds on two cores
KILL_ROUNDS = 3
HAMMER = """
import random
from kvcached_patch.ledger_file import LedgerFile
file = LedgerFile(ledger.path)
account = ledger.join("hammer")
chance = random.Random(int(arguments[0]))
refused = most = 0
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(arguments[1])):
    nbytes = chance.randrange(1, 300)
    if account.committed > nbytes and chance.random() < 0.4:
        account.release(nbytes)
    elif account.reserve(nbytes):
        with file as table:
            most = max(most, table.committed)
    else:
        refused += 1
        account.want(nbytes)
        account.release(account.committed)
account.release(account.committed)
print(refused, most, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    found = Ledger(ledger_path(tmp_path / "run", "host"))
    found.set_total(BUDGET)
    return found


def committed(ledger: Ledger) -> int:
    return sum(engine.committed for engine in ledger.engines())


def hammers(stack: ExitStack, ledger: Ledger, count: int, operations: int) -> list[Engine]:
    """Processes that all begin once each of them has joined."""
    found = [
        stack.enter_context(Engine(ledger.path, seed, operations, code=HAMMER))
        for seed in range(count)
    ]
    for engine in found:
        engine.ready()
    for engine in found:
        assert engine.process.stdin is not None
        engine.process.stdin.write("go\n")
        engine.process.stdin.flush()
    return found


def forked(act: Callable[[], None]) -> int:
    """Run `act` in a forked child; returns its wait status, 0 if `act` returned."""
    pid = os.fork()
    if not pid:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def test_eight_processes_never_exceed_the_budget_and_end_at_zero(ledger: Ledger) -> None:
    with ExitStack() as stack:
        engines = hammers(stack, ledger, 8, OPERATIONS)
        sums = [committed(ledger)]
        waiting = {engine.process.stdout for engine in engines}
        for stream in waiting:
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
        refused: list[int] = []
        most: list[int] = []
        while waiting:
            sums.append(committed(ledger))
            for stream in list(waiting):
                if line := stream.readline():
                    refused.append(int(line.split()[0]))
                    most.append(int(line.split()[1]))
                    waiting.remove(stream)
        assert max(sums + most) <= BUDGET
        assert min(most) > BUDGET * 0.9
        assert min(refused) > 0
        assert [engine.committed for engine in ledger.engines() if engine.alive] == [0] * 8


def test_the_bytes_of_engines_killed_at_random_points_come_back(ledger: Ledger) -> None:
    chance = random.Random(7)
    account = ledger.join("survivor")
    for _ in range(KILL_ROUNDS):
        with ExitStack() as stack:
            for engine in hammers(stack, ledger, 4, 10**9):
                for _ in range(chance.randrange(60)):
                    assert committed(ledger) <= BUDGET
                engine.kill()
                live = [each.name for each in ledger.engines() if each.alive]
                assert len(live) == len(set(live))
            assert [each.name for each in ledger.engines() if each.alive] == ["survivor"]
            assert account.headroom() == BUDGET
            assert account.reserve(BUDGET)
            account.release(BUDGET)


def everything(ledger: Ledger) -> None:
    """Every kind of write."""
    account = ledger.join("victim", model="m", reserved=9)
    assert account.reserve(300)
    ledger.set_limit("victim", 400)
    ledger.set_total(BUDGET)
    account.want(100)
    account.publish(cached=1, free=2, queries=3, hits=4)
    ledger.trim("victim")
    account.share()
    account.trimmed(account.asked)
    account.release(100)
    account.close()


def leave_behind(ledger: Ledger) -> None:
    """A free record that the next engine takes, with the numbers of a process that still runs."""
    with LedgerFile(ledger.path) as table:
        for slot in range(1, SLOTS):
            table.put(slot, Field.STATE, UNUSED)
            table.put(slot, Field.SEEN, slot)
    account = ledger.join("left")
    assert account.reserve(400)
    account.close()
    with LedgerFile(ledger.path) as table:
        table.put(1, Field.SEEN, 1)


def killed_before(write: int, act: Callable[[], None]) -> Callable[[], None]:
    """`act`, in a process that is killed instead of making its `write`-th pwrite(2)."""

    def run() -> None:
        left = [write]
        pwrite = os.pwrite

        def count(fd: int, data: bytes, offset: int) -> int:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return pwrite(fd, data, offset)

        os.pwrite = count
        act()

    return run


def test_a_process_killed_before_any_write_leaves_a_usable_ledger(ledger: Ledger) -> None:
    account = ledger.join("survivor")
    assert account.reserve(200)
    writes = 0
    leave_behind(ledger)
    while (status := forked(killed_before(writes, lambda: everything(ledger)))) != 0:
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert account.headroom() == BUDGET - 200
        assert ledger.total == BUDGET
        assert [each.name for each in ledger.engines() if each.alive] == ["survivor"]
        assert account.reserve(BUDGET - 200)
        account.release(BUDGET - 200)
        leave_behind(ledger)
        writes += 1
    assert writes > 12


def test_a_process_killed_while_it_makes_the_file_leaves_a_usable_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for writes in range(4):
        ledger = Ledger(ledger_path(tmp_path / str(writes), "host"))
        status = forked(killed_before(writes, lambda ledger=ledger: everything(ledger)))
        assert os.WTERMSIG(status) == signal.SIGKILL
        ledger.set_total(BUDGET)
        account = ledger.join("victim")
        assert (account.name, account.headroom(), ledger.total) == ("victim", BUDGET, BUDGET)
    assert caplog.messages == []


def test_a_forked_child_is_not_its_parents_engine(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert account.reserve(10)

    def child() -> None:
        for call in (account.headroom, account.share, lambda: account.reserve(1)):
            with pytest.raises(LedgerError, match=f"joined by process {os.getppid()}, used in its"):
                call()
        account.close()
        own = ledger.join("a")
        assert (own.name, own.reserve(20)) == ("a-2", True)
        assert committed(ledger) == 30
        os._exit(0)  # without close()

    assert forked(child) == 0
    (record,) = (each for each in ledger.engines() if each.alive)
    assert (record.name, record.pid, record.committed) == ("a", os.getpid(), 10)
    assert account.reserve(BUDGET - 10)


def test_a_forked_child_does_not_pass_its_parents_lock(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_WAIT_S", 0.05)
    file = LedgerFile(ledger.path)

    def child() -> None:
        with pytest.raises(LedgerError, match="another process kept it locked"), file:
            pass

    with file:
        assert forked(child) == 0
    assert forked(lambda: file.__enter__() and None) == 0


def test_a_thread_does_not_pass_another_ones_lock(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_file, "_WAIT_S", 0.05)
    file = LedgerFile(ledger.path)
    with file:
        with pytest.raises(LedgerError, match="another thread kept it"):
            file.__enter__()
        with pytest.raises(LedgerError, match="another process kept it locked"):
            ledger.set_total(1)
    ledger.set_total(2)
    assert ledger.total == 2


def test_a_child_that_outlives_a_killed_holder_does_not_hold_its_lock(ledger: Ledger) -> None:
    code = """
import os
from kvcached_patch.ledger_file import LedgerFile
with LedgerFile(ledger.path):
    if os.fork():
        os.wait()
    print("ready", flush=True)
    sys.stdin.read()
"""
    with Engine(ledger.path, code=code) as engine:
        engine.ready().kill()
        ledger.set_total(5)
        assert ledger.total == 5
