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
    processes = list(_descendants(os.getpid()))
    start, never = time.monotonic(), threading.Event()
    while (left := max(map(_resident, processes))) > LEAST_BYTES:
        if time.monotonic() > start + PATIENCE_SECONDS:
            break
        never.wait(0.05)
    return {"left_bytes": left, "seconds": time.monotonic() - start}


def _resident(pid: int) -> int:
    """Resident bytes of a process's largest MAP_NORESERVE mapping, as our host memory is."""
    size = resident = largest = found = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "Size":
            size = int(value.split()[0])
        elif key == "Rss":
            resident = int(value.split()[0])
        elif key == "VmFlags" and "nr" in value.split() and size > largest:
            largest, found = size, resident
    return found * 1024


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _descendants(int(child))
