"""A size is read as people write it, in powers of 1024, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.sizes import MOST_BYTES, format_bytes, parse_bytes
from kvcached_patch.errors import ConfigError

KIB, MIB, GIB, TIB = (1024**power for power in range(1, 5))

SIZES = {
    "0": 0, "4096": 4096, "4096B": 4096, "1K": KIB, "2G": 2 * GIB, "2g": 2 * GIB, "2GiB": 2 * GIB,
    "2 gib": 2 * GIB, " 512MiB\n": 512 * MIB, "1.5GiB": 3 * GIB // 2, "0.5K": 512, "1.1KiB": 1126,
    "3TiB": 3 * TIB, "9223372036854775807": MOST_BYTES, "8388607T": 8388607 * TIB,
}  # fmt: skip
NO_SIZES = [
    "", " ", "G", "GiB", "2GB", "2KB", "-1", "+1", "1.5", "1.5B", ".5G", "1.", "1e9", "0x10", "1_0",
    "1,5G", "2PiB", "2Gi", "2GiBs", "two", "nan", "inf", "none", "٢G", "1 2", "8388608T",
    "9223372036854775808",
]  # fmt: skip


@pytest.mark.parametrize(("text", "nbytes"), SIZES.items())
def test_a_size_is_read(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", NO_SIZES)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected bytes, or a number with K, M, G") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1536, "1.5KiB"), (MIB - 1, "1MiB"),
        (GIB - MIB, "1023MiB"), (GIB + GIB // 4, "1.25GiB"), (2000 * TIB, "2000TiB"),
    ],
)  # fmt: skip
def test_a_size_is_shown(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 2**62))
def test_a_shown_size_reads_back_nearly(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= nbytes * 0.005 + 1
