"""Text for terminals of any width."""

from __future__ import annotations

import shutil
import textwrap


def width() -> int:
    """Columns of the terminal, or what ``COLUMNS`` says; 0: neither, lines may be of any length."""
    return shutil.get_terminal_size(fallback=(0, 0)).columns


def folded(text: str, columns: int, *, indent: int = 2) -> str:
    """`text` with long lines folded at spaces; what follows a fold is indented.

    A word is never broken: paths are to be copied.
    """
    if not columns:
        return text
    indent = min(indent, columns // 2)
    fold = textwrap.TextWrapper(
        columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join("\n".join(fold.wrap(line)) for line in text.split("\n"))
