# SPDX-License-Identifier: Apache-2.0
"""The parts of the README that are made from data, each between two lines that name it.

python -m tools.readme      put the table of settings in, from kvcached_patch/config.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcached_patch.config import SETTINGS, Setting

README = Path(__file__).resolve().parent.parent / "README.md"
PART, MAKER = "settings", "make readme"


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


def main() -> int:
    """Command line."""
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        text = README.read_text(encoding="utf-8")
        README.write_text(with_part(text, PART, MAKER, settings()))
    except ReadmeError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
