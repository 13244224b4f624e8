"""What the GPU tests measured, printed at the end and kept with what they ran on."""

from __future__ import annotations

import statistics
from typing import Any

FOUND: dict[str, Any] = {}


def times(name: str, seconds: list[float], per: int = 1) -> None:
    """Keep median, least and most, in microseconds, each divided by `per`."""
    each = sorted(second / per * 1e6 for second in seconds)
    FOUND[name] = {
        "median_us": round(statistics.median(each), 2),
        "least_us": round(each[0], 2),
        "most_us": round(each[-1], 2),
        "samples": len(each),
    }
