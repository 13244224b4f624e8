"""What one engine holds of the shared budget."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable

from kvcached_patch.core.shares import fair_shares, shares_with_caches
from kvcached_patch.core.sizes import MOST_BYTES
from kvcached_patch.core.totals import Totals
from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger_file import (
    LIVE,
    MODEL,
    NAME,
    SLOTS,
    TOTALS,
    UNUSED,
    WORDS,
    Field,
    LedgerFile,
    Table,
    text_of,
)
from kvcached_patch.system import alive, started

# How long the same engine comes first where the budget is too small for all.
TURN_S = 30


class Account:
    """An engine's entry; belongs to the process that made it, whose threads may share it.

    All sizes are bytes. Every method but `close` raises LedgerError: for a file that cannot be
    used, after `close`, and in a forked child, which has to join by itself.
    """

    def __init__(
        self,
        file: LedgerFile,
        name: str,
        *,
        model: str,
        reserved: int,
        limit: int | None,
        least: int = 0,
    ) -> None:
        """Enter the engine under `name`, or `name` with a number if that is taken.

        least: what it may always hold, whatever the limit, if the budget has it.

        Raises LedgerError if live engines have all records, ValueError for a bad size.
        """
        self._file = file
        self._closed = False
        self.until = 0  # see `Table.until`, as `share` last found it
        self._least = least
        self._pid = os.getpid()
        self._slot = 0
        start = started(self._pid)
        if start is None:
            raise LedgerError(f"/proc/{self._pid}/stat: not found; expected a mounted /proc")
        self._row = array("Q", bytes(WORDS * 8))
        owner = LIVE, self._pid, start
        self._row[Field.STATE : Field.START + 1] = array("Q", owner)
        self._row[Field.RESERVED] = checked(reserved)
        self._row[Field.LIMIT] = limit_word(limit)
        self._set_text(NAME, name or "engine")
        self._set_text(MODEL, model)
        with self._open() as table:
            self._enter(table)

    @property
    def name(self) -> str:
        """The name by which limits are set."""
        return text_of(self._row, NAME)

    @property
    def committed(self) -> int:
        """Bytes held now."""
        return self._row[Field.COMMITTED]

    @property
    def generation(self) -> int:
        """Another number after each change of a limit, the budget, a demand or the engines.

        Then `share` is worth a call. Takes no lock.
        """
        return self._open().generation()

    def reserve(self, nbytes: int) -> bool:
        """Hold `nbytes` more, unless that exceeds this engine's limit or the budget."""
        if not checked(nbytes):
            return True
        with self._open() as table:
            self._find(table)
            if self._room(table) >= nbytes:
                self._put(table, Field.COMMITTED, self.committed + nbytes)
                return True
        return self._own_room() >= nbytes and self._reaped(table) and self.reserve(nbytes)

    def release(self, nbytes: int) -> None:
        """Give `nbytes` back; LedgerError, and nothing is given back, if fewer are held."""
        with self._open() as table:
            self._find(table)
            if checked(nbytes) > self.committed:
                raise LedgerError(
                    f"{self.name}: release of {nbytes} bytes; expected at most the"
                    f" {self.committed} that it holds"
                )
            if any(table.get(slot, Field.WANTED) for slot in table.live()):
                table.changed()  # shares are larger now
            self._put(table, Field.COMMITTED, self.committed - nbytes)

    def refused(self, seconds: float) -> None:
        """The device has no more than engines hold now: for so long that bounds them as well.

        Then an engine that lacks memory gets it from others as it does under a budget.
        """
        with self._open() as table:
            self._find(table)
            table.found(table.committed, time.monotonic_ns() + int(seconds * 1e9))

    def hold(self, nbytes: int) -> None:
        """Hold `nbytes` more, whatever limit and budget say: they are committed already."""
        with self._open() as table:
            self._find(table)
            self._put(table, Field.COMMITTED, self.committed + checked(nbytes))

    def first_in_line(self) -> bool:
        """Whether no other engine that wants memory comes before this one.

        The line begins with another engine every `TURN_S` seconds.
        """
        with self._open() as table:
            self._find(table)
        start = int(time.monotonic() // TURN_S) % SLOTS
        line = [i for i in table.live() if table.get(i, Field.WANTED) or i == self._slot]
        return min(line, key=lambda slot: (slot - start) % SLOTS) == self._slot

    def headroom(self) -> int:
        """Bytes that `reserve` could get now; 2**63 - 1 with neither a limit nor a budget."""
        with self._open() as table:
            self._find(table)
            room = self._room(table)
        return self.headroom() if room < self._own_room() and self._reaped(table) else room

    def want(self, nbytes: int) -> None:
        """Tell the others how much this engine lacks beyond what it holds; 0: nothing.

        Cheap while the number stays the same.
        """
        if self._open() and self._row[Field.WANTED] != checked(nbytes):
            with self._open() as table:
                self._find(table)
                table.changed()
                self._put(table, Field.WANTED, nbytes)

    def share(self) -> int | None:
        """Bytes that this engine may hold now; it should give back what it holds beyond.

        None if nothing bounds it; the smaller of limit and budget while the budget covers what all
        engines hold plus want; a max-min fair share when it does not. That is never more than this
        engine holds plus wants: one that is to grow then has to say so with `want` first.
        """
        return self._bound(lambda total, demands, limits, _: fair_shares(total, demands, limits))

    def keep(self) -> int | None:
        """Bytes that this engine may hold now, its prefix cache counted in.

        What `share` is while the budget covers what all engines hold plus want. When it does not,
        all that is in use or wanted goes before what only a prefix cache keeps, whoever holds it.
        """
        return self._bound(shares_with_caches)

    def _bound(self, divide: Callable[..., list[int]]) -> int | None:
        with self._open() as table:
            self._find(table)
        limit = self._row[Field.LIMIT]
        total = table.bound
        self.until = table.until
        if not total:
            return limit or None
        live = table.live()
        demands = [table.get(i, Field.COMMITTED) + table.get(i, Field.WANTED) for i in live]
        limits = [table.get(i, Field.LIMIT) or total for i in live]
        if sum(map(min, demands, limits)) <= total:
            return min(limit or total, total)
        if self._reaped(table):
            return self._bound(divide)
        caches = [min(table.get(i, Field.CACHED), table.get(i, Field.COMMITTED)) for i in live]
        return divide(total, demands, limits, caches)[live.index(self._slot)]

    @property
    def asked(self) -> int:
        """When a trim was asked for, as the last call saw it; 0: none. Takes no lock."""
        return self._row[Field.TRIM]

    def trimmed(self, request: int) -> None:
        """Say that `request`, which was `asked`, is met; a later one stays."""
        with self._open() as table:
            self._find(table)
            if self.asked <= request:
                self._put(table, Field.TRIM, 0)

    def publish(
        self,
        *,
        cached: int | None = None,
        free: int | None = None,
        queries: int | None = None,
        hits: int | None = None,
        totals: Totals | None = None,
    ) -> None:
        """Publish statistics, those not given staying as they were, with a heartbeat.

        `cached`: committed bytes of blocks that only the prefix cache keeps; `free`: bytes of
        blocks in no use; `queries`, `hits`: the prefix cache's counters. Notices a deleted file.
        """
        self._open().close(only_if_deleted=True)
        given = cached, free, queries, hits
        with self._open() as table:
            self._find(table)
            before = self._row[Field.CACHED : TOTALS.start]
            both = zip(before, given, strict=True)
            now = [was if new is None else checked(new) for was, new in both]
            done = self._row[TOTALS] if totals is None else totals.words()
            self._put(table, Field.CACHED, *now, *done, time.monotonic_ns())

    def close(self) -> None:
        """Leave: the bytes return, the record is free. In a forked child it does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            with self._file as table:
                if self._is_mine(table):
                    table.changed()
                    table.put(self._slot, Field.STATE, UNUSED)
        finally:
            self._file.close()

    def _open(self) -> LedgerFile:
        if os.getpid() != self._pid:
            raise LedgerError(
                f"{self.name}: joined by process {self._pid}, used in its child {os.getpid()};"
                f" expected the child to join by itself"
            )
        if self._closed:
            raise LedgerError(f"{self.name}: used after close()")
        return self._file

    def _find(self, table: Table) -> None:
        """Read this engine's record, entered again if the file was lost."""
        if self._is_mine(table):
            self._row = table.row(self._slot)
        else:
            self._enter(table)

    def _is_mine(self, table: Table) -> bool:
        row, owner = table.row(self._slot), slice(Field.START + 1)
        return row[owner] == self._row[owner] and row[NAME] == self._row[NAME]

    def _enter(self, table: Table) -> None:
        names = set()
        unused = []
        for slot in range(SLOTS):
            row = table.row(slot)
            if row[Field.STATE] == LIVE and alive(row[Field.PID], row[Field.START]):
                names.add(text_of(row, NAME))
            else:  # never used ones first, then the longest dead
                unused.append((row[Field.STATE] != UNUSED, row[Field.SEEN], slot))
        if not unused:
            raise LedgerError(
                f"ledger {self._file.path}: found {SLOTS} live engines, expected fewer:"
                f" {', '.join(sorted(names))}"
            )
        base, number = self.name, 1
        while self.name in names:
            number += 1
            self._set_text(NAME, base, f"-{number}")
        self._slot = min(unused)[-1]
        self._row[Field.SEEN] = time.monotonic_ns()
        table.changed()
        table.put(self._slot, Field.STATE, UNUSED)  # LIVE only once all the rest is there
        table.put(self._slot, Field.PID, *self._row[Field.PID :])
        table.put(self._slot, Field.STATE, LIVE)

    def _set_text(self, place: slice, text: str, suffix: str = "") -> None:
        room = (place.stop - place.start) * 8
        printable = "".join(char if char.isprintable() else "?" for char in text)
        whole = printable.encode()[: room - len(suffix)].decode(errors="ignore") + suffix
        self._row[place] = array("Q", whole.encode().ljust(room, b"\0"))

    def _put(self, table: Table, field: int, *values: int) -> None:
        table.put(self._slot, field, *values)
        self._row[field : field + len(values)] = array("Q", values)

    def _own_room(self) -> int:
        limit = self._row[Field.LIMIT]
        return max(max(limit, self._least) - self.committed, 0) if limit else MOST_BYTES

    def _room(self, table: Table) -> int:
        room = self._own_room()
        bound = table.bound
        return max(min(room, bound - table.committed), 0) if bound else room

    def _reaped(self, table: Table) -> bool:
        return self._file.reap(table, but=self._slot)


def checked(number: int) -> int:
    """The number; raises ValueError if it does not fit a field."""
    if not 0 <= number <= MOST_BYTES:
        raise ValueError(f"{number}: expected 0 to {MOST_BYTES}")
    return number


def limit_word(limit: int | None) -> int:
    """A limit or budget as the file has it; raises ValueError for one below 1."""
    if limit == 0:
        raise ValueError("0 bytes: expected at least 1, or None for no limit")
    return 0 if limit is None else checked(limit)
