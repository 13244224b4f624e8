"""The README has a row for every warning and error that our code can say."""

from __future__ import annotations

import re

import pytest

from tests.lanes import ROOT
from tests.messages import HOLE, Message, messages

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n## Messages\n")[2].partition("\n## ")[0]
ROWS = [
    text
    for cell in re.findall(r"^\| (`.+?`) \| .+ \|$", SECTION, re.MULTILINE)
    for text in re.findall(r"`(.+?)`(?:, |$)", cell)
]
FEW_WORDS = 14  # fewer say nothing by themselves: their row is named here
NAMED = {
    "ledger …: …": "ledger …: No space left on device",
    "…(…): …": "cuMem…(…): CUDA_ERROR_…",
}
PTH = "kvcached-patch: not active, its installation is damaged: …"  # of autopatch.pth

# Not for the README: a user does not meet them, only who changes the code does.
OURS = {
    "0 bytes": "config words it as a bad value",
    "…: release of … bytes; expected at most the … that it holds": "the budget counts slabs",
    "…: joined by process …, used in its child …; expected the child to join by itself": "fork",
    "…: used after close()": "",
    "closing a range of GPU memory: tensors still view it": "a binding keeps its views",
    "munmap: tensors still view this range": "the same",
    "…: … pages are in use": "the same",
    "commit of bytes … to …: a page is committed already": "pages are counted before",
    "releasing … bytes: static memory is never released": "it has no slabs",
    "host memory: cannot serve device …; expected cpu": "binding says it before, of the variable",
    "cuda memory: cannot serve device …; expected cuda": "the same",
}
MANIFESTS = "kvcached_patch/seams/manifest.py"  # of the package itself: tests read them all
FOUND = [each for each in messages() if each.path != MANIFESTS and each.text not in OURS]


def pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split(HOLE))))


def stands_for(row: str, message: Message) -> bool:
    """Whether a row has all words of a message, or it all those of the row, and enough of them."""
    if len(message.words) < FEW_WORDS:
        return row == NAMED[message.text]
    enough = len(row.replace(HOLE, "")) >= FEW_WORDS
    return bool(pattern(message.text).fullmatch(row)) or (
        enough and bool(pattern(row).fullmatch(message.text))
    )


@pytest.mark.parametrize("message", FOUND, ids=str)
def test_each_message_has_a_row(message: Message) -> None:
    assert any(stands_for(row, message) for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_of_a_message(row: str) -> None:
    assert row == PTH or any(stands_for(row, message) for message in FOUND)


def test_the_hook_says_what_the_readme_says_it_does() -> None:
    assert PTH in ROWS
    assert f'"{PTH.removesuffix(f" {HOLE}")}"' in (ROOT / "autopatch.pth").read_text()


def test_what_is_left_out_is_there() -> None:
    texts = {message.text for message in messages()}
    assert texts >= {*OURS, *NAMED}


def test_messages_are_found_however_they_are_made() -> None:
    """Plain, formatted, by a function, by a variable, added up, by a constructor of their own."""
    texts = [message.text for message in messages()]
    for text in (
        "kvcached-patch: running without the shared ledger on other machines",
        "kvcached-patch: unbounded, the ledger cannot be used: …",
        "…=…: …; expected one of: …",
        "… …: … differs, which is relied on: …",
        "MaxText's decoder … (scan_layers: …) replaced the list; expected it to update those of "
        "its … layers in place",
        "found no engine …; …; …",
    ):
        assert text in texts
    assert HOLE not in texts
