"""Questions about vLLM's processes, asked from the front end while the engine is quiet."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PATIENCE_SECONDS = 30.0
LEAST_BYTES = 64 << 10


def until_given_back() -> dict[str, float]:
    """Watch the KV cache's resident bytes until hardly any are left, or patience ends."""
    start, never = time.monotonic(), threading.Event()
    while (left := _kv_resident()) > LEAST_BYTES:
        if time.monotonic() > start + PATIENCE_SECONDS:
            break
        never.wait(0.05)
    return {"left_bytes": left, "seconds": time.monotonic() - start}


def _kv_resident() -> int:
    """Resident bytes of the KV cache: the largest MAP_NORESERVE mapping of all processes."""
    found = [mapping for pid in _descendants(os.getpid()) for mapping in _mappings(pid)]
    return max(found)[1]


def kv_caches(pid: int) -> list[tuple[int, int]]:
    """Reserved and resident bytes of each KV cache of a GiB or more, of all processes below one."""
    found = [mapping for child in _descendants(pid) for mapping in _mappings(child)]
    return [(size, resident) for size, resident in found if size >= 1 << 30]


def _mappings(pid: int) -> Iterator[tuple[int, int]]:
    """Length and resident bytes of a process's MAP_NORESERVE mappings."""
    size = resident = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "Size":
            size = int(value.split()[0]) * 1024
        elif key == "Rss":
            resident = int(value.split()[0]) * 1024
        elif key == "VmFlags" and "nr" in value.split():
            yield size, resident


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))
