"""``kvcached-patch top``, ``limit`` and ``trim``: `kvcached_patch.api` in words."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvcached_patch import api
from kvcached_patch.cli_text import folded, width
from kvcached_patch.core.sizes import format_bytes

EMPTY = "no engine is running"
HEADINGS = (
    "device", "name", "pid", "model", "reserved", "committed", "cached", "limit", "free",
    "hit rate",
)  # fmt: skip
_TEXTS = ("device", "name", "model")
_REDRAW_S = 1.0
_MODEL_WIDTH = 32


@dataclass(frozen=True)
class Report:
    """What is known of one device; empty, with a `problem`, if its ledger cannot be read."""

    usage: api.Usage
    problem: str | None = None


def limit(ledger_dir: Path, name: str, nbytes: int | None, *, device: str | None = None) -> int:
    """Change the limit of engine `name`: on every device that has it, unless `device` is given.

    Returns 0, or 1 with a line on standard error.
    """
    try:
        found = api.set_limit(name, nbytes, device=device, directory=ledger_dir)
    except api.LedgerError as error:
        return _fail("limit", str(error))
    for engine in found:
        shown, held = _or_none(engine.limit_bytes), format_bytes(engine.committed_bytes)
        print(f"{engine.name} on {engine.device}: limit {shown}, {held} committed")
    return 0


def budget(ledger_dir: Path, nbytes: int | None, *, device: str | None = None) -> int:
    """Change the budget of a device, which need not be given if there is only one.

    Returns 0, or 1 with a line on standard error.
    """
    try:
        found = api.devices(directory=ledger_dir)
        if device is None and len(found) == 1:
            (device,) = found
        # A GPU's engines may start after their budget was set.
        if device is None or not (device in (*found, "host") or device.startswith("GPU-")):
            known = ", ".join(found) or "host for CPUs, a UUID as nvidia-smi -L prints it for a GPU"
            what = f"{len(found)} devices" if device is None else f"no device {device!r}"
            return _fail("limit", f"found {what}; expected --device with one of: {known}")
        print(_device_line(api.set_budget(nbytes, device=device, directory=ledger_dir)))
    except api.LedgerError as error:
        return _fail("limit", str(error))
    return 0


def trim(ledger_dir: Path, name: str, *, device: str | None = None, wait_s: float) -> int:
    """Have engine `name` give back what only its prefix cache keeps.

    Returns 0; 1, with a line on standard error, if it is not found or has not done it in time.
    """
    try:
        before = api.engines(device, directory=ledger_dir)
        found = api.trim(name, device=device, wait_s=wait_s, directory=ledger_dir)
    except api.LedgerError as error:
        return _fail("trim", str(error))
    held = {(engine.device, engine.pid): engine.committed_bytes for engine in before}
    for engine in found:
        was, now = held.get((engine.device, engine.pid), 0), engine.committed_bytes
        change = f"{format_bytes(now)} committed, {format_bytes(was)} before"
        print(f"{engine.name} on {engine.device}: {change}")
    late = [engine.device for engine in found if engine.trimming]
    if late:
        return _fail("trim", f"{name} on {', '.join(late)}: asked, not done in {wait_s:g} s")
    return 0


def top(ledger_dir: Path, *, once: bool, as_json: bool) -> int:
    """Show every engine of every device, redrawn in place until Ctrl-C.

    `as_json` and `once` print one state, as does an output that is no terminal. Returns 1 if a
    ledger cannot be read or ``rich`` is missing for the redrawing, else 0.
    """
    if as_json or once or not sys.stdout.isatty():
        found = read(ledger_dir)
        if as_json:
            print(json.dumps(as_data(found), indent=2))
        else:
            print(plain(found, width(), empty=f"{EMPTY} (looked in {ledger_dir})"))
        return int(any(report.problem for report in found))
    try:
        from rich.live import Live  # type: ignore[import-not-found,unused-ignore]
        from rich.text import Text  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return _fail(
            "top",
            "redrawing needs rich: pip install 'kvcached-patch[cli]'; --once and --json do without",
        )
    with Live(auto_refresh=False) as live:

        def draw() -> None:
            live.update(Text(plain(read(ledger_dir), live.console.width)), refresh=True)

        return redraw(draw)


def redraw(draw: Callable[[], None], wait: Callable[[float], None] = time.sleep) -> int:
    """Call `draw` once a second until Ctrl-C; returns 0."""
    try:
        while True:
            draw()
            wait(_REDRAW_S)
    except KeyboardInterrupt:
        return 0


def read(ledger_dir: Path) -> list[Report]:
    """Read the ledgers of all devices, of which some may have a problem."""
    try:
        names = api.devices(directory=ledger_dir)
    except api.LedgerError as error:
        return [Report(api.Usage("-", None, ()), str(error))]
    found = []
    for name in names:
        try:
            found.append(Report(api.usage(name, directory=ledger_dir)))
        except api.LedgerError as error:
            found.append(Report(api.Usage(name, None, ()), str(error)))
    return found


def as_data(found: list[Report]) -> dict[str, Any]:
    """The report as JSON-able data: the fields of `api.Usage` and `api.Engine`."""
    return {
        "api_version": api.API_VERSION,
        "devices": [
            {
                "device": usage.device,
                "budget_bytes": usage.budget_bytes,
                "committed_bytes": usage.committed_bytes,
                "problem": report.problem,
                "engines": [asdict(each) | {"hit_rate": each.hit_rate} for each in usage.engines],
            }
            for report in found
            for usage in [report.usage]
        ],
    }


def plain(found: list[Report], columns: int = 0, *, empty: str = EMPTY) -> str:
    """Table and summary in lines of at most so many columns; 0: as long as they are.

    Where the table is too wide each engine is a paragraph that says the same. empty: what is said
    where no engine runs.
    """
    cells = [_row(engine) for report in found for engine in report.usage.engines]
    lines = _table(cells) if cells else []
    if columns and max(map(len, lines), default=0) > columns:
        lines = [", ".join(map(" ".join, zip(HEADINGS, row, strict=True))) for row in cells]
    return folded("\n".join([*lines, *summary(found, empty)]), columns)


def summary(found: list[Report], empty: str = EMPTY) -> list[str]:
    """One line per device with engines, with a budget or with a problem; at least one line."""
    running = [report for report in found if _runs(report)]
    lines = [] if running else [empty]
    for report in found:
        if report.problem:
            lines.append(f"{report.usage.device}: {report.problem}")
        elif _runs(report) or report.usage.budget_bytes:
            lines.append(_device_line(report.usage))
    return lines


def _runs(report: Report) -> bool:
    return any(engine.alive for engine in report.usage.engines)


def _table(cells: list[list[str]]) -> list[str]:
    table = [[heading.upper() for heading in HEADINGS], *cells]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded = (
            cell.ljust(width) if heading in _TEXTS else cell.rjust(width)
            for heading, cell, width in zip(HEADINGS, row, widths, strict=True)
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def _row(engine: api.Engine) -> list[str]:
    model = engine.model.rstrip("/").rpartition("/")[2]
    model = model if len(model) <= _MODEL_WIDTH else f"{model[: _MODEL_WIDTH - 1]}…"
    sizes = (
        engine.reserved_bytes,
        engine.committed_bytes,
        engine.cached_bytes,
        engine.limit_bytes,
        engine.free_bytes,
    )
    shown = ["-" if size is None or not engine.alive else format_bytes(size) for size in sizes]
    rate = "-" if engine.hit_rate is None or not engine.alive else f"{engine.hit_rate:.1%}"
    name = engine.name if engine.alive else f"{engine.name} (dead)"
    return [engine.device, name, str(engine.pid), model or "-", *shown, rate]


def _device_line(usage: api.Usage) -> str:
    held = format_bytes(usage.committed_bytes)
    bound = "no budget" if usage.budget_bytes is None else f"budget {_or_none(usage.budget_bytes)}"
    return f"{usage.device}: {held} committed, {bound}"


def _or_none(nbytes: int | None) -> str:
    return "none" if nbytes is None else format_bytes(nbytes)


def _fail(command: str, text: str) -> int:
    print(f"kvcached-patch {command}: {text}", file=sys.stderr)
    return 1
