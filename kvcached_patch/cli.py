"""The ``kvcached-patch`` command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kvcached_patch import __version__, config
from kvcached_patch.errors import SeamMismatch


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when not, 2 on bad usage (argparse)."""
    options = _parser().parse_args(argv)
    if options.command == "doctor":
        return _doctor(as_json=options.json, live=not options.static)
    if options.command == "seams":
        return _seams(options.wheel, as_json=options.json)
    from kvcached_patch import cli_ledger

    if options.command == "top":
        return cli_ledger.top(config.ledger_dir(), once=options.once, as_json=options.json)
    return cli_ledger.limit(
        config.ledger_dir(), options.name, options.size, options.total, device=options.device
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcached-patch",
        description="Elastic KV-cache memory for stock vLLM: check it, watch it, bound it.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    doctor = commands.add_parser(
        "doctor", help="say whether vLLM started here would be patched, and why not"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--static", action="store_true", help="read vLLM's sources only; do not import it (fast)"
    )

    seams = commands.add_parser(
        "seams", help="say whether a release could be patched, from its wheel alone"
    )
    seams.add_argument(
        "--wheel",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="of vLLM, MaxText or tpu-inference",
    )
    seams.add_argument("--json", action="store_true", help="print the report as JSON")

    top = commands.add_parser("top", help="show the engines of this user and what they hold")
    top.add_argument("--once", action="store_true", help="print the table once")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")

    limit = commands.add_parser(
        "limit", help="change how much memory an engine, or all together, may commit"
    )
    which = limit.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="the engine, as `top` shows it")
    which.add_argument("--total", action="store_true", help="the budget of all engines")
    limit.add_argument("size", help="such as 512MiB or 2GiB; none to lift it")
    limit.add_argument("--device", help="only on this device, such as host")
    return parser


def _doctor(*, as_json: bool, live: bool) -> int:
    from kvcached_patch.doctor import diagnose, text

    diagnosis = diagnose(live=live)
    print(json.dumps(diagnosis.as_json(), indent=2) if as_json else text(diagnosis))
    return 0 if diagnosis.active else 1


def _seams(wheels: Sequence[Path], *, as_json: bool) -> int:
    from kvcached_patch._startup import TARGETS
    from kvcached_patch.seams.wheel import examine

    try:
        reports = [examine(wheel, TARGETS) for wheel in wheels]
    except SeamMismatch as error:
        print(f"kvcached-patch seams: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps([report.as_json() for report in reports], indent=2))
    else:
        print("\n\n".join(report.text() for report in reports))
    return 0 if all(report.ok for report in reports) else 1
