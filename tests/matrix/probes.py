"""Questions about vLLM's processes and caches, asked while the engine is quiet."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PATIENCE_SECONDS = 30.0
LEAST_BYTES = 64 << 10


def contents(worker: Any, blocks: list[tuple[int, int]]) -> list[str]:
    """Of each (KV cache group, block id): a hash over what the group's layers hold there."""
    runner = getattr(worker, "worker", worker).model_runner
    layers = runner.compilation_config.static_forward_context
    config = runner.kv_cache_config
    found = []
    for group, block in blocks:
        digest = hashlib.sha256()
        for name in sorted(config.kv_cache_groups[group].layer_names):
            cache = layers[name].kv_cache
            rows = cache.shape[0] // config.num_blocks
            held = cache[block * rows : (block + 1) * rows].contiguous()
            digest.update(held.view(torch.uint8).numpy().tobytes())
        found.append(digest.hexdigest())
    return found


def until_given_back() -> dict[str, float]:
    """Watch the KV cache's resident bytes until hardly any are left, or patience ends."""
    start, never = time.monotonic(), threading.Event()
    while (left := kv_resident_anywhere()) > LEAST_BYTES:
        if time.monotonic() > start + PATIENCE_SECONDS:
            break
        never.wait(0.05)
    return {"left_bytes": left, "seconds": time.monotonic() - start}


def kv_resident_anywhere() -> int:
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
        try:
            children = (task / "children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # this thread has ended meanwhile
        for child in children:
            yield int(child)
            yield from _descendants(int(child))
