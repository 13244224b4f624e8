"""The shared budget: who holds how much of which device.

Engines of one user on one machine (in one PID namespace) share one file per device. What keeps
them from committing too much is `Account.reserve`: check-and-add under the file's lock. An engine
is live while its process is, told by pid plus start time; a dead engine's bytes return when anyone
looks. A file that was deleted, cut short or overwritten is made anew, and every engine enters
itself again, with what it holds, at its next call.

Every call can raise LedgerError, for a file that cannot be used. It must not end an engine: callers
catch it, say so once, and take it for "nothing to be had now".
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvcached_patch.core.totals import Totals
from kvcached_patch.errors import EngineNotFound, LedgerError
from kvcached_patch.ledger_account import Account, limit_word
from kvcached_patch.ledger_file import (
    DEAD,
    LIVE,
    MODEL,
    NAME,
    SLOTS,
    TOTALS,
    Field,
    LedgerFile,
    Table,
)
from kvcached_patch.system import private_directory

__all__ = [
    "Account",
    "EngineNotFound",
    "EngineRecord",
    "Ledger",
    "LedgerError",
    "devices",
    "ledger_path",
]
_SUFFIX = ".ledger"


@dataclass(frozen=True)
class EngineRecord:
    """One engine as the ledger knows it; sizes in bytes, 0 once it is dead.

    limit: None for none. queries, hits: the prefix cache's counters. age_s: seconds since the last
    heartbeat, or since it was found dead. trimming: it was asked to trim, and has not yet.
    """

    name: str
    pid: int
    model: str
    reserved: int
    committed: int
    cached: int
    wanted: int
    limit: int | None
    free: int
    queries: int
    hits: int
    age_s: float
    alive: bool
    totals: Totals = field(default_factory=Totals)
    trimming: bool = False


class Ledger:
    """The budget of one device; keeps nothing open, so any process may use it."""

    def __init__(self, path: Path) -> None:
        """`path`: see `ledger_path`; file and directory are made by the first write."""
        self.path = path

    def join(
        self,
        name: str,
        *,
        model: str = "",
        reserved: int = 0,
        limit: int | None = None,
        least: int = 0,
    ) -> Account:
        """Enter an engine of this process; a second ``a`` is called ``a-2``, and so on.

        `reserved`: bytes of its address range; `limit`: the most bytes it may commit, None for no
        limit; `least`: what it may hold whatever the limit. Long names are cut. Raises LedgerError
        if live engines have all records, ValueError for a bad size.
        """
        file = LedgerFile(self.path)
        try:
            return Account(file, name, model=model, reserved=reserved, limit=limit, least=least)
        except BaseException:
            file.close()
            raise

    def engines(self) -> list[EngineRecord]:
        """The live engines, as well as those found dead whose record nobody has taken yet."""
        return self.read()[1]

    def read(self) -> tuple[int | None, list[EngineRecord]]:
        """`total` and `engines`, as they were at one moment."""
        if not os.path.lexists(self.path):
            return None, []
        with _opened(self.path) as file:
            table = _read(file)
            if file.reap(table):
                table = _read(file)
        states = table.column(Field.STATE)
        found = [_engine(table, slot) for slot in range(SLOTS) if states[slot] in (LIVE, DEAD)]
        return table.total or None, found

    def set_limit(self, name: str, nbytes: int | None) -> None:
        """Change the most bytes that a live engine may commit; None: no limit.

        Raises EngineNotFound if none has this name, ValueError for a bad size.
        """
        self._put(name, Field.LIMIT, limit_word(nbytes))

    def trim(self, name: str) -> None:
        """Ask a live engine to give back what only its prefix cache keeps, once.

        It is `trimming` until it has. Raises EngineNotFound if none has this name.
        """
        self._put(name, Field.TRIM, time.monotonic_ns())

    def set_total(self, nbytes: int | None) -> None:
        """Change the bytes that all engines together may commit; None: no budget.

        Raises ValueError for a bad size.
        """
        total = limit_word(nbytes)
        with _opened(self.path) as file, file as table:
            table.set_total(total)

    def _put(self, name: str, field: int, value: int) -> None:
        """Write into a live engine's record, which the engine sees by the generation."""
        live = [engine.name for engine in self.engines() if engine.alive]
        if live:
            with _opened(self.path) as file, file as table:
                for slot in table.live():
                    if table.text(slot, NAME) == name:
                        table.changed()
                        table.put(slot, field, value)
                        return
        raise EngineNotFound(name, live)

    @property
    def device(self) -> str:
        """The device's name, as `devices` lists it."""
        return self.path.name.removesuffix(_SUFFIX)

    @property
    def total(self) -> int | None:
        """The bytes that all engines together may commit; None: no budget."""
        if not os.path.lexists(self.path):
            return None
        with _opened(self.path) as file:
            return _read(file).total or None


def ledger_path(directory: Path, device: str) -> Path:
    """The file of a device; characters that are special in file names become ``_``."""
    return directory / (re.sub(r"[^A-Za-z0-9._-]", "_", device) + _SUFFIX)


def devices(directory: Path) -> list[str]:
    """The devices that have a ledger in the directory.

    Raises LedgerError if the directory is not this user's alone.
    """
    try:
        opened = private_directory(directory)
    except FileNotFoundError:
        return []
    try:
        names = os.listdir(opened)
    finally:
        os.close(opened)
    return sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX))


@contextmanager
def _opened(path: Path) -> Iterator[LedgerFile]:
    file = LedgerFile(path)
    try:
        yield file
    finally:
        file.close()


def _read(file: LedgerFile) -> Table:
    with file as table:
        return table


def _engine(table: Table, slot: int) -> EngineRecord:
    live = table.get(slot, Field.STATE) == LIVE

    def held(field: int) -> int:
        return table.get(slot, field) if live else 0

    return EngineRecord(
        name=table.text(slot, NAME),
        pid=table.get(slot, Field.PID),
        model=table.text(slot, MODEL),
        reserved=held(Field.RESERVED),
        committed=held(Field.COMMITTED),
        cached=held(Field.CACHED),
        wanted=held(Field.WANTED),
        limit=table.get(slot, Field.LIMIT) or None,
        free=held(Field.FREE),
        queries=table.get(slot, Field.QUERIES),
        hits=table.get(slot, Field.HITS),
        age_s=max(time.monotonic_ns() - table.get(slot, Field.SEEN), 0) / 1e9,
        alive=live,
        totals=Totals.of(table.row(slot)[TOTALS]),
        trimming=live and table.get(slot, Field.TRIM) > 0,
    )
