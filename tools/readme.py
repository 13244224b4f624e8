# SPDX-License-Identifier: Apache-2.0
"""The parts of the README that are made from data, each between two lines that name it.

python -m tools.readme      put these tables in: the settings, from kvcached_patch/config.py; what
                            the plugin costs, from bench/results/{overhead,scheduling}.json; and
                            what depth costs MaxText, from bench/results/scanning-*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvcached_patch.config import SCAN_KINDS, SETTINGS, Setting

README = Path(__file__).resolve().parent.parent / "README.md"
MAKER = "make readme"
RESULTS = README.parent / "bench" / "results"


class ReadmeError(Exception):
    """The README has no place for a part: the message names the lines that it lacks."""


def markers(part: str, maker: str) -> tuple[str, str]:
    """The lines before and after a part, which `maker` makes."""
    return f"<!-- {part}: made by `{maker}` -->\n", f"<!-- {part}: end -->\n"


def with_part(readme: str, part: str, maker: str, text: str) -> str:
    """The README's text with this for that part; raises ReadmeError if it has no place for it."""
    begin, end = markers(part, maker)
    before, found_begin, rest = readme.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ReadmeError(f"{README}: expected the lines {begin!r} and {end!r}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def settings() -> str:
    """The table of settings."""
    lines = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *map(_row, SETTINGS)]) + "\n"


def _row(setting: Setting) -> str:
    values = ", ".join(value if " " in value else f"`{value}`" for value in setting.values)
    default = setting.default if " " in setting.default else f"`{setting.default}`"
    return f"| `{setting.name}` | {values} | {default} | {setting.meaning} |"


def scanning() -> str:
    """The table of what depth costs, of each MaxText that was measured."""
    lines = [
        "| MaxText | model | layers | unrolled: seconds | pools | unrolled: StableHLO | pools "
        "| unrolled: temporaries | pools |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("scanning-*.json"), reverse=True):
        result = _result(path.stem)
        rows = {(row["model"], row["layers"], row["scan"]): row for row in result["rows"]}
        for model, layers in dict.fromkeys((model, layers) for model, layers, _ in rows):
            ways = [rows[model, layers, scan] for scan in SCAN_KINDS]
            cells = [f"{way['seconds']:.2f}" for way in ways]
            for key in ("StableHLO", "temporaries"):
                cells += [f"{way[key] / 1024:.0f} KiB" for way in ways]
            name = model.removesuffix("-scanned")
            lines.append(f"| {result['maxtext']} | {name} | {layers} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cost() -> str:
    """The table of what the plugin costs, measured in pairs."""
    lines = ["| | stock | patched | patched / stock |", "|---|---|---|---|"]
    for each in _result("overhead")["models"]:
        for key, what in (
            ("tokens_per_s", "tokens per second"),
            ("p50_ms", "ms per token, median"),
            ("p99_ms", "ms per token, 99th percentile"),
        ):
            measured = each[key]
            cells = _pair(measured["stock"], measured["patched"], measured["ratio"])
            lines.append(f"| {each['model']}: {what} | {cells} |")
    for each in _result("scheduling")["schedule"]:
        bound = ", with a limit" if each["bounded"] else ""
        requests = f"{each['requests']} request{'s' * (each['requests'] > 1)}"
        cells = _pair(each["vllm"], each["ours"], each["ratio"])
        lines.append(f"| µs to schedule a step of {requests}{bound} | {cells} |")
    return "\n".join(lines) + "\n"


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def _pair(stock: dict[str, float], ours: dict[str, float], ratio: dict[str, float]) -> str:
    spread = f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
    return f"{_short(stock['median'])} | {_short(ours['median'])} | {spread}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.1f}"


PARTS = {"settings": settings, "scanning": scanning, "cost": cost}


def made(readme: str) -> str:
    """The README's text with the parts as they are to be."""
    for part, make in PARTS.items():
        readme = with_part(readme, part, MAKER, make())
    return readme


def main() -> int:
    """Command line."""
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        text = README.read_text(encoding="utf-8")
        README.write_text(made(text))
    except ReadmeError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
