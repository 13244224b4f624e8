"""The ledger's file: private, locked, mended when it can be.

Every field that changes is one aligned word of 8 bytes, written by one pwrite(2): a process killed
between any two instructions leaves old or new words, and the kernel drops its lock. Nothing is
mapped, because a mapping of a file that someone cuts short kills its reader with SIGBUS.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import sys
import threading
import time
import weakref
from array import array
from itertools import compress
from pathlib import Path

from kvcached_patch.errors import LedgerError
from kvcached_patch.system import alive, private_file

logger = logging.getLogger("vllm.kvcached_patch")

MAGIC = b"KVLEDGER"
VERSION = 2
SLOTS = 64
_HEADER = 64
RECORD = 384
SIZE = _HEADER + SLOTS * RECORD
# Of any version: magic; version, header bytes, record bytes, slots; and in each record first
# state (0: free), pid, start time. So one version can tell whether another is in use.
_HEAD = struct.Struct("=8s4I")
_OWNER = struct.Struct("=3Q")
_BEGIN = _HEAD.pack(MAGIC, VERSION, _HEADER, RECORD, SLOTS)
_TOTAL, _GENERATION, _FOUND, _UNTIL = range(3, 7)  # words of the header

TOTALS, NAME, MODEL = slice(11, 26), slice(28, 36), slice(36, 48)  # words of a record
WORDS = RECORD // 8
UNUSED, LIVE, DEAD = range(3)  # states; any other is as good as UNUSED
_WAIT_S = 2.0
_FIRST = _HEADER // 8


class Field:
    """Words of a record; sizes in bytes, a limit of 0: none; SEEN, TRIM: time.monotonic_ns().

    TRIM: when the engine was asked to give back what only its prefix cache keeps; 0 once it has.
    """

    STATE, PID, START, RESERVED, COMMITTED, WANTED = range(6)
    LIMIT, CACHED, FREE, QUERIES, HITS = range(6, 11)
    SEEN = TOTALS.stop
    TRIM = SEEN + 1


class Table:
    """The file's content as it was when the lock was taken; changes go to both."""

    def __init__(self, fd: int, data: bytes) -> None:
        """Take over what was read from `fd`."""
        self._fd = fd
        self._words = array("Q", data)

    @property
    def total(self) -> int:
        """The budget of all engines in bytes; 0: none."""
        return self._words[_TOTAL]

    def set_total(self, nbytes: int) -> None:
        """Change the budget."""
        self.changed()
        self._write(_TOTAL, nbytes)

    @property
    def bound(self) -> int:
        """The most bytes that engines can commit: the budget, or what there is; 0: no bound."""
        there = self._words[_FOUND] if self.until else 0
        return min(self.total or there, there or self.total)

    @property
    def until(self) -> int:
        """When what there is is to be found out anew, by time.monotonic_ns(); 0: it is not known.

        No engine has been refused memory by the device in a while.
        """
        until = self._words[_UNTIL]
        return until if time.monotonic_ns() < until else 0

    def found(self, nbytes: int, until: int) -> None:
        """Until then there are so many bytes on the device: it refused more."""
        self.changed()
        self._write(_FOUND, nbytes, until)

    def changed(self) -> None:
        """Move the generation: before the change, so that none is ever missed."""
        self._write(_GENERATION, (self._words[_GENERATION] + 1) % 2**64)

    def get(self, slot: int, field: int) -> int:
        """One field of one record."""
        return self._words[_FIRST + slot * WORDS + field]

    def put(self, slot: int, field: int, *values: int) -> None:
        """Write a field, or neighbouring fields, of one record."""
        self._write(_FIRST + slot * WORDS + field, *values)

    def live(self) -> list[int]:
        """The slots of engines that are not known to be dead."""
        return [slot for slot, state in enumerate(self.column(Field.STATE)) if state == LIVE]

    @property
    def committed(self) -> int:
        """Committed bytes of all engines that are not known to be dead."""
        living = map(LIVE.__eq__, self.column(Field.STATE))
        return sum(compress(self.column(Field.COMMITTED), living))

    def column(self, field: int) -> array[int]:
        """One field of every record."""
        return self._words[_FIRST + field :: WORDS]

    def row(self, slot: int) -> array[int]:
        """A copy of one record."""
        return self._words[_FIRST + slot * WORDS : _FIRST + (slot + 1) * WORDS]

    def text(self, slot: int, place: slice) -> str:
        """The name or model of one record."""
        return text_of(self.row(slot), place)

    def _write(self, word: int, *values: int) -> None:
        new = array("Q", values)
        os.pwrite(self._fd, new, word * 8)
        self._words[word : word + len(values)] = new


def text_of(row: array[int], place: slice) -> str:
    """The name or model in a record."""
    return row[place].tobytes().rstrip(b"\0").decode(errors="replace")


class LedgerFile:
    """One opening of the file. As a context manager: the lock, and the table read under it.

    Threads take turns. A forked child opens the file anew: a lock belongs to an opening, so sharing
    the parent's would let both in.
    """

    def __init__(self, path: Path) -> None:
        """Open nothing yet."""
        self.path = path
        self._total = 0
        self.forget()
        _files.add(self)

    def forget(self) -> None:
        """Start as if never opened, without waiting for other threads: for a forked child."""
        self._fd = -1
        self._turn = threading.Lock()

    def __enter__(self) -> Table:
        """Lock the file, made or mended if need be, and read it.

        Raises LedgerError if it is not private, in use by another version, or cannot be had.
        """
        self._take_turn()
        try:
            return self._read()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise LedgerError(f"ledger {self.path}: {error.strerror or error}") from error
            raise

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Unlock; after an error, by closing the file."""
        if kind is None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            self._turn.release()
        else:
            self._release()
            if isinstance(error, OSError):
                raise LedgerError(f"ledger {self.path}: {error.strerror or error}") from error

    def reap(self, table: Table, *, but: int = -1) -> bool:
        """Mark the dead among the engines of a table read before; True if there were any.

        Asks about processes without holding the lock. `but`: a slot known to be live.
        """
        owner = (Field.PID, Field.START)
        found = {slot: [table.get(slot, field) for field in owner] for slot in table.live()}
        dead = [
            slot for slot, (pid, start) in found.items() if slot != but and not alive(pid, start)
        ]
        if dead:
            with self as now:
                now.changed()
                for slot in set(dead).intersection(now.live()):
                    if found[slot] == [now.get(slot, field) for field in owner]:
                        now.put(slot, Field.SEEN, time.monotonic_ns())
                        now.put(slot, Field.STATE, DEAD)
        return bool(dead)

    def close(self, *, only_if_deleted: bool = False) -> None:
        """Close the file; the next use opens what is at the path by then."""
        self._take_turn()
        try:
            if self._fd >= 0 and not (only_if_deleted and os.fstat(self._fd).st_nlink):
                self._close()
        finally:
            self._turn.release()

    def generation(self) -> int:
        """The generation, read without a lock; -1 if the file is not as it should be."""
        try:
            word = os.pread(self._fd, 8, _GENERATION * 8)
        except OSError:
            return -1
        return int.from_bytes(word, sys.byteorder) if len(word) == 8 else -1

    def _take_turn(self) -> None:
        if not self._turn.acquire(timeout=_WAIT_S):
            raise LedgerError(f"ledger {self.path}: another thread kept it for {_WAIT_S} s")

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _release(self) -> None:
        self._close()
        self._turn.release()

    def _read(self) -> Table:
        for _ in range(10):
            if self._fd < 0:
                self._fd = private_file(self.path)
            self._lock()
            data = os.pread(self._fd, SIZE, 0)
            if len(data) == SIZE and data.startswith(_BEGIN):
                table = Table(self._fd, data)
                self._total = table.total
                return table
            if self._replaced() or self._mend(data):
                self._close()
        raise LedgerError(f"ledger {self.path}: replaced again and again while it was opened")

    def _lock(self) -> None:
        # No blocking flock(2): a process stopped while it holds the lock must not stop all others.
        end = time.monotonic() + _WAIT_S
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise LedgerError(
                        f"ledger {self.path}: another process kept it locked for {_WAIT_S} s"
                    ) from None
            time.sleep(0.00005)

    def _replaced(self) -> bool:
        try:
            return not os.path.samestat(os.lstat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return True

    def _mend(self, data: bytes) -> bool:
        """Make the locked file usable; True if it was moved away instead."""
        if not data.strip(b"\0"):  # new, or its maker was killed
            self._begin()
            return False
        if data.startswith(_BEGIN):
            found = f"cut short, {len(data)} bytes of {SIZE}"
            if len(data) < _HEADER:
                self._begin()
            else:
                whole = len(data) - (len(data) - _HEADER) % RECORD
                os.pwrite(self._fd, bytes(SIZE - whole), whole)
            logger.warning("ledger %s: %s; filled up with free records", self.path, found)
            return False
        found = self._other(os.pread(self._fd, 1 << 20, 0))
        aside = f"{self.path}.bad"
        os.replace(self.path, aside)
        logger.warning("ledger %s: %s; moved to %s, begun anew", self.path, found, aside)
        return True

    def _begin(self) -> None:
        os.pwrite(self._fd, bytes(SIZE - _HEADER), _HEADER)
        header = _BEGIN + struct.pack("=2Q", self._total, time.monotonic_ns())
        os.pwrite(self._fd, header.ljust(_HEADER, b"\0"), 0)

    def _other(self, data: bytes) -> str:
        """What a foreign content is; raises LedgerError if it is another version's, in use."""
        if not data.startswith(MAGIC) or len(data) < _HEAD.size:
            return f"no ledger (begins with {data[:8]!r})"
        _, version, header, record, slots = _HEAD.unpack_from(data)
        found = f"format {version} with {slots} records of {record} bytes"
        if record >= _OWNER.size:
            last = min(header + slots * record, len(data)) - _OWNER.size
            for offset in range(header, last + 1, record):
                state, pid, start = _OWNER.unpack_from(data, offset)
                if state and alive(pid, start):
                    raise LedgerError(
                        f"ledger {self.path}: {found}, in use by process {pid};"
                        f" expected format {VERSION} with {SLOTS} records of {RECORD} bytes."
                        f" Run one version of kvcached-patch at a time"
                    )
        return found


_files: weakref.WeakSet[LedgerFile] = weakref.WeakSet()


def _after_fork() -> None:
    for file in list(_files):
        if file._fd >= 0:
            os.close(file._fd)
        file.forget()


os.register_at_fork(after_in_child=_after_fork)
