"""What other programs may build on: the engines of a user, what they hold, their bounds.

    from kvcached_patch import api

    for engine in api.engines():
        print(engine.device, engine.name, engine.committed_bytes)
    api.set_budget(8 * 2**30, device="host")
    api.set_limit("gemma-3n", 2 * 2**30)
    api.trim("gemma-3n", wait_s=10)

``kvcached-patch top``, ``limit`` and ``trim`` are made of these functions, and the fields of
`Engine` and `Usage` are those of ``top --json``. Importing this module loads neither vLLM nor torch
and does nothing; a function call opens a ledger, looks or writes, and closes it.

`API_VERSION` grows when something that is here is removed, renamed or given another meaning, in
Python or in the JSON. Functions, keyword arguments with a default, and fields are added without
that, so a reader has to ignore fields it does not know.

Sizes are bytes. `device` is a name as `devices` lists it. `directory` is where the ledgers are: by
default those of this user, in ``$XDG_RUNTIME_DIR``. Every function can raise LedgerError, for a
ledger that cannot be used: it is not this user's alone, or another version of kvcached-patch is in
it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcached_patch import config, ledger
from kvcached_patch.errors import EngineNotFound, LedgerError
from kvcached_patch.ledger import EngineRecord, Ledger, ledger_path

__all__ = [
    "API_VERSION",
    "Engine",
    "EngineNotFound",
    "LedgerError",
    "Usage",
    "devices",
    "engines",
    "set_budget",
    "set_limit",
    "trim",
    "usage",
]

API_VERSION = 1
_ENDED_SHOWN_S = 60
_LOOK_S = 0.01


@dataclass(frozen=True)
class Engine:
    """One engine on one device; all that it held is 0 once it is no longer `alive`.

    model: as vLLM was given it. reserved_bytes: of its address range, which is all it can ever
    hold. committed_bytes: what it holds. cached_bytes: of these, what only its prefix cache keeps.
    wanted_bytes: what it lacks while requests wait. free_bytes: of blocks in no use, committed or
    not. limit_bytes: the most it may commit; None: no limit.

    Since its start: queries, hits: tokens looked up and found in the prefix cache. pages_committed,
    pages_released: how many. misses: steps in which memory could not be had.

    age_s: seconds since it last said how it stands, or since it was found ended. trimming: it was
    asked to `trim`, and has not yet.
    """

    device: str
    name: str
    pid: int
    model: str
    alive: bool
    age_s: float
    reserved_bytes: int
    committed_bytes: int
    cached_bytes: int
    wanted_bytes: int
    free_bytes: int
    limit_bytes: int | None
    queries: int
    hits: int
    pages_committed: int
    pages_released: int
    misses: int
    trimming: bool

    @property
    def hit_rate(self) -> float | None:
        """`hits` per query, 0 to 1; None before the first query."""
        return self.hits / self.queries if self.queries else None


@dataclass(frozen=True)
class Usage:
    """One device at one moment.

    budget_bytes: the most that all its engines may commit together; None: no budget. engines: those
    that run, and those that ended less than a minute ago.
    """

    device: str
    budget_bytes: int | None
    engines: tuple[Engine, ...]

    @property
    def committed_bytes(self) -> int:
        """What all engines hold."""
        return sum(engine.committed_bytes for engine in self.engines)


def devices(*, directory: Path | None = None) -> list[str]:
    """The devices that have a ledger, such as ``host``: an engine has run there."""
    return ledger.devices(_directory(directory))


def usage(device: str, *, directory: Path | None = None) -> Usage:
    """What is held on a device, by whom; nothing if no engine has run there."""
    return _usage(_ledger(device, directory))


def engines(device: str | None = None, *, directory: Path | None = None) -> list[Engine]:
    """The engines that run, on one device or on all."""
    names = devices(directory=directory) if device is None else [device]
    found = [usage(name, directory=directory) for name in names]
    return [engine for each in found for engine in each.engines if engine.alive]


def set_limit(
    name: str, nbytes: int | None, *, device: str | None = None, directory: Path | None = None
) -> list[Engine]:
    """Change the most that an engine may commit while it runs; None: no limit.

    Without a device this goes for every one where an engine has this name. One that holds more
    gives it back as its requests end. Returns these engines. Raises EngineNotFound, ValueError for
    a size below 1.
    """
    return _each(name, device, directory, lambda found: found.set_limit(name, nbytes))


def set_budget(nbytes: int | None, *, device: str, directory: Path | None = None) -> Usage:
    """Change the most that all engines of a device may commit together; None: no budget.

    Raises ValueError for a size below 1.
    """
    found = _ledger(device, directory)
    found.set_total(nbytes)
    return _usage(found)


def trim(
    name: str, *, device: str | None = None, wait_s: float = 0.0, directory: Path | None = None
) -> list[Engine]:
    """Ask an engine to give back, once, what only its prefix cache keeps, and what it has spare.

    Without a device this goes for every one where an engine has this name. A quiet engine does it
    at once (in vLLM's in-process mode with its next request), a busy one with its next steps.
    Returns these engines, but for one that ended meanwhile, once they have done it or `wait_s`
    seconds have passed; those still `trimming` will do it yet. Raises EngineNotFound.
    """
    end = time.monotonic() + wait_s
    found = _each(name, device, directory, lambda found: found.trim(name))
    while any(engine.trimming for engine in found) and time.monotonic() < end:
        time.sleep(_LOOK_S)
        found = [
            now
            for asked in found
            for now in engines(asked.device, directory=directory)
            if (now.name, now.pid) == (asked.name, asked.pid)
        ]
    return found


def _directory(directory: Path | None) -> Path:
    return config.ledger_dir() if directory is None else directory


def _ledger(device: str, directory: Path | None) -> Ledger:
    return Ledger(ledger_path(_directory(directory), device))


def _each(
    name: str, device: str | None, directory: Path | None, act: Callable[[Ledger], None]
) -> list[Engine]:
    """Act on each ledger with a live engine of this name; what they are afterwards."""
    names = devices(directory=directory) if device is None else [device]
    found: list[Engine] = []
    live: list[str] = []
    problems: list[str] = []
    for each in names:
        ledger_of_device = _ledger(each, directory)
        try:
            here = [record.name for record in ledger_of_device.engines() if record.alive]
        except LedgerError as error:
            problems.append(str(error))
            continue
        live += here
        if name in here:
            act(ledger_of_device)
            found += [e for e in _usage(ledger_of_device).engines if e.alive and e.name == name]
    if name not in live:
        raise EngineNotFound(name, list(dict.fromkeys(live)), problems)
    return found


def _usage(found: Ledger) -> Usage:
    budget, records = found.read()
    shown = [each for each in records if each.alive or each.age_s < _ENDED_SHOWN_S]
    return Usage(found.device, budget, tuple(_engine(found.device, each) for each in shown))


def _engine(device: str, record: EngineRecord) -> Engine:
    return Engine(
        device=device,
        name=record.name,
        pid=record.pid,
        model=record.model,
        alive=record.alive,
        age_s=record.age_s,
        reserved_bytes=record.reserved,
        committed_bytes=record.committed,
        cached_bytes=record.cached,
        wanted_bytes=record.wanted,
        free_bytes=record.free,
        limit_bytes=record.limit,
        queries=record.queries,
        hits=record.hits,
        pages_committed=record.totals.committed,
        pages_released=record.totals.released,
        misses=record.totals.misses,
        trimming=record.trimming,
    )
