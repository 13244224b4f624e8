"""The ``kvcached-patch`` command.

Reports have no colour and fold to the terminal's width. What ``--json`` prints keeps its keys and
their types, all of them written down in tests/unit/test_cli.py, as long as `api.API_VERSION` is the
same; keys may be added.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from kvcached_patch import __version__, config
from kvcached_patch.api import API_VERSION
from kvcached_patch.cli_text import folded, width
from kvcached_patch.core.sizes import parse_bytes
from kvcached_patch.errors import ConfigError, KvcachedPatchError

EXIT_STATUS = """\
exit status:
  0  {0}
  1  {1}
  2  the command line is wrong
"""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Folds each line of a description or epilog by itself."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.splitlines()
        return "\n".join(folded(line, width, indent=5 * line.startswith(" ")) for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status, which its ``--help`` explains.

    As shells have it, 130 after Ctrl-C, and 141 if nobody reads on (``| head``). Raises SystemExit
    with status 2 for a wrong command line.
    """
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(argv: Sequence[str]) -> int:
    words, serve = _divided(argv)
    parser = _parser()
    options = parser.parse_args(words)
    if options.command == "doctor":
        if options.arguments:
            misplaced = " ".join(options.arguments)
            parser.error(f"put the arguments of vllm serve after --: doctor -- {misplaced}")
        return _doctor(as_json=options.json, probe=not options.static, arguments=serve)
    if options.command == "seams":
        return _seams(options.wheel, as_json=options.json)
    from kvcached_patch import cli_ledger

    directory = config.ledger_dir()
    if options.command == "top":
        return cli_ledger.top(directory, once=options.once, as_json=options.json)
    if options.command == "trim":
        return cli_ledger.trim(directory, options.name, device=options.device, wait_s=options.wait)
    if options.total:
        return cli_ledger.budget(directory, options.size, device=options.device)
    return cli_ledger.limit(directory, options.name, options.size, device=options.device)


def _divided(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our own words, and the arguments of ``vllm serve`` that doctor takes after ``--``."""
    if words[:1] != ["doctor"] or "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcached-patch",
        description="Elastic KV-cache memory for stock vLLM: check it, watch it, bound it.",
        epilog=EXIT_STATUS.format("all is well", "it is not, as the output says"),
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, summary: str, well: str, ill: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=EXIT_STATUS.format(well, ill),
            formatter_class=_Help,
        )

    doctor = command(
        "doctor",
        "say whether vLLM started here would be patched, and why not",
        "it would be patched",
        "it would not, or does not start; the report says why",
    )
    doctor.usage = "%(prog)s [-h] [--json] [--static] [-- ARGUMENT ...]"
    doctor.description = f"{doctor.description} After --: arguments of vllm serve, to be judged."
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    # Those after -- are taken away before; these are for an error that says so.
    doctor.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    doctor.add_argument(
        "--static", action="store_true", help="read vLLM's sources only; do not import it (fast)"
    )

    seams = command(
        "seams",
        "say whether a release could be patched, from its wheel alone",
        "each of the releases could be",
        "one could not, or a file is no wheel of these libraries",
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

    top = command(
        "top",
        "show the engines of this user and what they hold",
        "shown, also if no engine is running",
        "a device's ledger cannot be read, or redrawing needs rich",
    )
    top.add_argument("--once", action="store_true", help="print the table once")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")

    limit = command(
        "limit",
        "change how much memory an engine, or all together, may commit",
        "changed",
        "no such engine or device, or its ledger cannot be used",
    )
    which = limit.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", help="the engine, as `top` shows it")
    which.add_argument("--total", action="store_true", help="the budget of all engines")
    limit.add_argument("size", type=_size, help="such as 512MiB or 2GiB; none to lift it")
    limit.add_argument("--device", type=_device, help="only on this device, such as host")

    trim = command(
        "trim",
        "have an engine give back what only its prefix cache keeps",
        "given back",
        "no such engine, its ledger cannot be used, or it has not done it in time",
    )
    trim.add_argument("name", help="the engine, as `top` shows it")
    trim.add_argument("--device", type=_device, help="only on this device, such as host")
    trim.add_argument(
        "--wait",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for it (default 10)",
    )
    return parser


def _device(text: str) -> str:
    """The name of a device's ledger, in which a MIG instance's UUID has the prefix of a GPU's."""
    kind, dash, rest = text.partition("-")
    if not (dash and kind in ("GPU", "MIG")):
        return text
    try:
        return f"GPU-{uuid.UUID(rest)}"
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a UUID after the first -, as nvidia-smi -L prints it"
        ) from error


def _seconds(text: str) -> float:
    """A time to wait, of zero seconds or more."""
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of seconds, 0 or more")
    return seconds


def _size(text: str) -> int | None:
    """A size of at least one byte, or None for ``none``."""
    if text.strip().lower() == "none":
        return None
    try:
        nbytes = parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not nbytes:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected at least 1 byte, or none to remove the limit"
        )
    return nbytes


def _doctor(*, as_json: bool, probe: bool, arguments: Sequence[str]) -> int:
    from kvcached_patch.doctor import diagnose, text

    diagnosis = diagnose(probe=probe, arguments=arguments)
    if as_json:
        print(json.dumps({"api_version": API_VERSION, **diagnosis.as_json()}, indent=2))
    else:
        print(folded(text(diagnosis), width(), indent=25))
    return 0 if diagnosis.active else 1


def _seams(wheels: Sequence[Path], *, as_json: bool) -> int:
    from kvcached_patch._startup import TARGETS
    from kvcached_patch.seams.wheel import examine

    try:
        chosen = config.load().chosen
        reports = [examine(wheel, TARGETS, chosen) for wheel in wheels]
    except KvcachedPatchError as error:
        print(f"kvcached-patch seams: {error}", file=sys.stderr)
        return 1
    if as_json:
        found = [report.as_json() for report in reports]
        print(json.dumps({"api_version": API_VERSION, "releases": found}, indent=2))
    else:
        print(folded("\n\n".join(report.text() for report in reports), width()))
    return 0 if all(report.ok for report in reports) else 1
