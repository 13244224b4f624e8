"""The ledger on the command line: ``kvcached-patch limit``, ``kvcached-patch top``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcached_patch.errors import ConfigError, LedgerError
from kvcached_patch.ledger import (
    EngineRecord,
    Ledger,
    devices,
    format_bytes,
    ledger_path,
    parse_bytes,
)

DEAD_SHOWN_S = 60
EMPTY = "no engine is running"
HEADINGS = (
    "device", "name", "pid", "model", "reserved", "committed", "cached", "limit", "free",
    "hit rate",
)  # fmt: skip
_TEXTS = ("device", "name", "model")
_BYTES = ("reserved", "committed", "cached", "wanted", "limit", "free")
_REDRAW_S = 1.0
_MODEL_WIDTH = 32


@dataclass(frozen=True)
class Device:
    """What the ledger of one device says; `problem` is set when it cannot be read."""

    name: str
    total: int | None = None
    engines: tuple[EngineRecord, ...] = ()
    problem: str | None = None

    @property
    def live(self) -> list[EngineRecord]:
        """The engines that run."""
        return [engine for engine in self.engines if engine.alive]


def limit(
    ledger_dir: Path, name: str | None, value: str, total: bool, *, device: str | None = None
) -> int:
    """Change the limit of engine `name`, or with `total` the budget of a device.

    `value`: a size, or ``none``. A name counts on every device that has it, unless `device` is
    given. Returns 0; 1 with a line on standard error; 2 for neither or both of name and total.
    """
    if total == (name is not None):
        return _fail("limit", "expected either NAME SIZE or --total SIZE", 2)
    try:
        nbytes = _size_or_none(value)
        found = [device] if device else devices(ledger_dir)
        if total:
            _set_total(ledger_dir, found, nbytes)
        else:
            _set_limit(ledger_dir, found, name or "", nbytes)
    except (ConfigError, LedgerError) as error:
        return _fail("limit", str(error))
    return 0


def top(ledger_dir: Path, *, once: bool, as_json: bool) -> int:
    """Show every engine of every device, redrawn in place until Ctrl-C.

    `as_json` and `once` print one state, as does an output that is no terminal. Returns 1 if a
    ledger cannot be read or ``rich`` is missing for the redrawing, else 0.
    """
    if as_json or once or not sys.stdout.isatty():
        found = read(ledger_dir)
        print(json.dumps(as_data(found), indent=2) if as_json else plain(found))
        return int(any(device.problem for device in found))
    try:
        from rich.live import Live  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _fail(
            "top",
            "redrawing needs rich: pip install 'kvcached-patch[cli]'; --once and --json do without",
        )
    with Live(auto_refresh=False) as live:
        return redraw(lambda: live.update(_rich(read(ledger_dir)), refresh=True))


def redraw(draw: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> int:
    """Call `draw` once a second until Ctrl-C; returns 0."""
    try:
        while True:
            draw()
            wait(_REDRAW_S)
    except KeyboardInterrupt:
        return 0


def read(ledger_dir: Path) -> list[Device]:
    """Read all ledgers of the directory; engines dead for longer than a minute are left out."""
    try:
        names = devices(ledger_dir)
    except LedgerError as error:
        return [Device("-", problem=str(error))]
    return [_read_device(ledger_dir, name) for name in names]


def rows(found: list[Device]) -> list[list[str]]:
    """The table's cells below `HEADINGS`, one row per engine."""
    return [_row(device, engine) for device in found for engine in device.engines]


def plain(found: list[Device]) -> str:
    """Table and summary as aligned text."""
    cells = rows(found)
    lines = []
    if cells:
        table = [[heading.upper() for heading in HEADINGS], *cells]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            padded = (
                cell.ljust(width) if heading in _TEXTS else cell.rjust(width)
                for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
            )
            lines.append("  ".join(padded).rstrip())
    return "\n".join([*lines, *summary(found)])


def summary(found: list[Device]) -> list[str]:
    """One line per device with engines, with a budget or with a problem; at least one line."""
    lines = [] if any(device.live for device in found) else [EMPTY]
    for device in found:
        if device.problem:
            lines.append(f"{device.name}: {device.problem}")
        elif device.live or device.total:
            lines.append(_device_line(device))
    return lines


def _device_line(device: Device) -> str:
    held = format_bytes(sum(engine.committed for engine in device.live))
    budget = "no budget" if device.total is None else f"budget {format_bytes(device.total)}"
    return f"{device.name}: {held} committed, {budget}"


def as_data(found: list[Device]) -> dict[str, Any]:
    """The report as JSON-able data; ``null``: no limit, no budget, no query yet."""
    return {
        "devices": [
            {
                "device": device.name,
                "total_bytes": device.total,
                "committed_bytes": sum(engine.committed for engine in device.live),
                "problem": device.problem,
                "engines": [_engine_data(engine) for engine in device.engines],
            }
            for device in found
        ]
    }


def _engine_data(engine: EngineRecord) -> dict[str, Any]:
    named = {f"{key}_bytes" if key in _BYTES else key: v for key, v in asdict(engine).items()}
    return named | {"hit_rate": engine.hit_rate}


def _read_device(ledger_dir: Path, name: str) -> Device:
    ledger = Ledger(ledger_path(ledger_dir, name))
    try:
        engines = [each for each in ledger.engines() if each.alive or each.age_s < DEAD_SHOWN_S]
        return Device(name, ledger.total, tuple(engines))
    except LedgerError as error:
        return Device(name, problem=str(error))


def _row(device: Device, engine: EngineRecord) -> list[str]:
    model = engine.model.rstrip("/").rpartition("/")[2]
    model = model if len(model) <= _MODEL_WIDTH else f"{model[: _MODEL_WIDTH - 1]}…"
    sizes = (engine.reserved, engine.committed, engine.cached, engine.limit, engine.free)
    shown = ["-" if size is None or not engine.alive else format_bytes(size) for size in sizes]
    rate = "-" if engine.hit_rate is None or not engine.alive else f"{engine.hit_rate:.1%}"
    name = engine.name if engine.alive else f"{engine.name} (dead)"
    return [device.name, name, str(engine.pid), model or "-", *shown, rate]


def _rich(found: list[Device]) -> Any:
    from rich.console import Group  # type: ignore[import-not-found,unused-ignore]
    from rich.table import Table  # type: ignore[import-not-found,unused-ignore]
    from rich.text import Text  # type: ignore[import-not-found,unused-ignore]

    table = Table(box=None, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading.upper(), justify="left" if heading in _TEXTS else "right")
    for row in rows(found):
        table.add_row(*map(Text, row))
    lines = [Text(line) for line in summary(found)]
    return Group(*([table] if table.row_count else []), *lines)


def _size_or_none(value: str) -> int | None:
    if value.strip().lower() == "none":
        return None
    nbytes = parse_bytes(value)
    if not nbytes:
        raise ConfigError(f"{value!r}: expected at least 1 byte, or none to remove the limit")
    return nbytes


def _set_total(ledger_dir: Path, found: list[str], nbytes: int | None) -> None:
    if len(found) != 1:
        known = f"one of: {', '.join(found)}" if found else "a device: no engine has run here yet"
        raise LedgerError(f"found {len(found)} devices; expected --device with {known}")
    Ledger(ledger_path(ledger_dir, found[0])).set_total(nbytes)
    print(_device_line(_read_device(ledger_dir, found[0])))


def _set_limit(ledger_dir: Path, found: list[str], name: str, nbytes: int | None) -> None:
    states = [_read_device(ledger_dir, device) for device in found]
    mine = [device for device in states if name in [engine.name for engine in device.live]]
    for device in mine:
        Ledger(ledger_path(ledger_dir, device.name)).set_limit(name, nbytes)
        held = sum(engine.committed for engine in device.live if engine.name == name)
        shown = "none" if nbytes is None else format_bytes(nbytes)
        print(f"{name} on {device.name}: limit {shown}, {format_bytes(held)} committed")
    if not mine:
        live = [engine.name for device in states for engine in device.live]
        problems = [device.problem for device in states if device.problem]
        known = f"expected one of: {', '.join(dict.fromkeys(live))}" if live else EMPTY
        raise LedgerError("; ".join([f"found no engine {name!r}; {known}", *problems]))


def _fail(command: str, text: str, code: int = 1) -> int:
    print(f"kvcached-patch {command}: {text}", file=sys.stderr)
    return code
