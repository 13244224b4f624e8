# SPDX-License-Identifier: Apache-2.0
"""Check the seams against the sources of every vLLM release.

    python -m tools.seams [VERSION ...]        (or: make seams)

Wheels are downloaded once; of each, its Python files are kept in out/wheels/. Prints a table of
releases and seams, and ends with 1 if one differs or is imported by value where no manifest says
so. pip's own settings (index, proxy, certificates) are honoured.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.table import Table

from kvcached_patch.seams.wheel import WheelReport, examine
from tools.wheels import RELEASES, NoWheel, wheel


def show(reports: list[WheelReport]) -> None:
    """Print the table, then what differs."""
    names = list(dict.fromkeys(s.seam.id for r in reports for s in r.verdict.statuses))
    table = Table(title="does the seam match? (blank: the release has none of that name)")
    table.add_column("seam")
    for report in reports:
        table.add_column(str(report.verdict.installed.version).removesuffix(".0"))
    for name in names:
        cells = []
        for report in reports:
            found = {status.seam.id: status.ok for status in report.verdict.statuses}
            cells.append({True: "yes", False: "[red]NO[/]", None: ""}[found.get(name)])
        table.add_row(name, *cells)
    console = Console(width=max(100, 24 + 9 * len(reports)), highlight=False)
    console.print(table)
    for report in reports:
        if not report.ok:
            console.print(report.text(), markup=False)
    console.print(f"{sum(report.ok for report in reports)} of {len(reports)} releases hold")


def main() -> int:
    """Command line: the releases, by default all."""
    try:
        with ThreadPoolExecutor(4) as pool:
            wheels = list(pool.map(wheel, sys.argv[1:] or RELEASES))
    except NoWheel as error:
        print(error, file=sys.stderr)
        return 1
    reports = [examine(path, ["vllm"], []) for path in wheels]
    show(reports)
    return 0 if all(report.ok for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
