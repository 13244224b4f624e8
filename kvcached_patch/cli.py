"""The ``kvcached-patch`` command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from kvcached_patch import __version__
from kvcached_patch.doctor import Diagnosis, diagnose


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when all is well, 1 when not, 2 on bad usage (argparse)."""
    parser = argparse.ArgumentParser(prog="kvcached-patch", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser(
        "doctor", help="say whether vLLM started here would be patched, and why not"
    )
    doctor.add_argument("--json", action="store_true", help="print the report as JSON")
    doctor.add_argument(
        "--static", action="store_true", help="read vLLM's sources only; do not import it (fast)"
    )
    options = parser.parse_args(argv)
    return _doctor(as_json=options.json, live=not options.static)


def _doctor(*, as_json: bool, live: bool) -> int:
    diagnosis = diagnose(live=live)
    print(json.dumps(diagnosis.as_json(), indent=2) if as_json else _text(diagnosis))
    return 0 if diagnosis.active else 1


def _text(diagnosis: Diagnosis) -> str:
    marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
    lines = [
        f"{marks[f.state]}  {f.name:<15} {f.text.replace(chr(10), chr(10) + ' ' * 25)}"
        for f in diagnosis.findings
    ]
    for seam in diagnosis.seams:
        lines.append(f"{marks['ok' if seam['ok'] else 'problem']}  seam {seam['id']}")
        lines.append(f"{'':9}target    {seam['target']} ({seam['process']})")
        lines.append(f"{'':9}expected  {seam['expected']}")
        lines.append(f"{'':9}found     {seam['found']}")
    lines.append(f"active: {'yes' if diagnosis.active else 'no'}")
    return "\n".join(lines)
