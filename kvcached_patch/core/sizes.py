"""Byte sizes as people write them."""

from __future__ import annotations

import re

from kvcached_patch.errors import ConfigError

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(?:([kmgt])(?:ib)?|b)?", re.IGNORECASE)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
MOST_BYTES = 2**63 - 1


def parse_bytes(text: str) -> int:
    """Bytes meant by ``2GiB``, ``1.5 GiB``, ``512M`` or ``4096``; every unit is binary.

    A fraction of a byte is dropped. Raises ConfigError naming the value and what is expected, also
    for ``GB``, which means two things.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found[2] if found else None
    if found and (unit or "." not in found[1]):
        power = " kmgt".index(unit.lower()) if unit else 0
        whole, _, fraction = found[1].partition(".")
        nbytes = int(int(whole + fraction) * 1024**power // 10 ** len(fraction))
        if nbytes <= MOST_BYTES:
            return nbytes
    raise ConfigError(
        f"{text!r}: not a size; expected bytes, or a number with K, M, G, T, KiB, MiB, GiB or TiB"
        f" (powers of 1024), below 8388608TiB: 4096, 512MiB, 1.5GiB"
    )


def format_bytes(nbytes: int) -> str:
    """`nbytes` in the largest unit that leaves at least 1, to two decimals: ``1.5GiB``."""
    power = 0
    while power + 1 < len(_UNITS) and round(nbytes / 1024**power, 2) >= 1024:
        power += 1
    number = f"{nbytes / 1024**power:.2f}".rstrip("0").rstrip(".")
    return number + _UNITS[power]
