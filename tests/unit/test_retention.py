"""How long cached blocks that nobody uses are kept."""

from __future__ import annotations

import pytest

from kvcached_patch.core.retention import KEEP_ALL, Retention, parse_retention
from kvcached_patch.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("all", KEEP_ALL),
        (" NONE ", Retention(nbytes=0)),
        ("2GiB", Retention(nbytes=2 << 30)),
        ("512m", Retention(nbytes=512 << 20)),
        ("4096", Retention(nbytes=4096)),
        ("0", Retention(nbytes=0)),
        ("500ms", Retention(seconds=0.5)),
        ("90s", Retention(seconds=90.0)),
        ("1.5 min", Retention(seconds=90.0)),
        ("1h", Retention(seconds=3600.0)),
    ],
)
def test_forms(text: str, expected: Retention) -> None:
    assert parse_retention(text) == expected


@pytest.mark.parametrize("text", ["", "some", "5 parsecs", "-1s", "1s2", "GiB", "ms"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_retention(text)
    assert str(caught.value).startswith(f"{text!r}: expected all, none, a size")
