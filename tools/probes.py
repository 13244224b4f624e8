# SPDX-License-Identifier: Apache-2.0
"""Functions that a job calls in the workers or in the front-end process."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from typing import Any

_CHUNK_PAGES = 1 << 18
# mincore(2): only the lowest bit of each byte is defined.
_LOW_BIT = bytes(value & 1 for value in range(256))


def kv_resident(worker: Any) -> dict[str, int]:
    """Reserved and resident bytes of the storages behind the worker's KV cache."""
    sizes: dict[int, int] = {}
    for tensor in _tensors(_kv_caches(worker)):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            sizes[storage.data_ptr()] = max(storage.nbytes(), sizes.get(storage.data_ptr(), 0))
    return {
        "reserved_bytes": sum(sizes.values()),
        "resident_bytes": sum(resident_bytes(start, size) for start, size in sizes.items()),
        "storages": len(sizes),
    }


def process_memory(_worker: Any = None) -> dict[str, int]:
    """Process id and resident memory, anonymous and in total."""
    fields: dict[str, int] = {"pid": os.getpid()}
    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        for line in status:
            key, _, value = line.partition(":")
            if key in ("VmRSS", "RssAnon", "RssShmem"):
                fields[key] = int(value.split()[0]) * 1024
    return fields


def resident_bytes(start: int, size: int) -> int:
    """Bytes in memory by mincore(2), by whole pages but never more than `size`."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    first, last = start // page, -(-(start + size) // page)
    resident = 0
    while first < last:
        count = min(last - first, _CHUNK_PAGES)
        vector = (ctypes.c_ubyte * count)()
        address, length = ctypes.c_void_p(first * page), ctypes.c_size_t(count * page)
        if libc.mincore(address, length, vector) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        resident += bytes(vector).translate(_LOW_BIT).count(1)
        first += count
    return min(resident * page, size)


def _kv_caches(worker: Any) -> Any:
    runner = worker.model_runner
    caches = getattr(runner, "kv_caches", None)
    if caches:
        return caches
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    return [getattr(layer, "kv_cache", None) for layer in layers]


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "untyped_storage"):
        yield value
