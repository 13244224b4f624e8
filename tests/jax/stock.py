"""Stock MaxText in a patched process, for as long as a test needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import NoReturn

from packaging.version import Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.apply import arm, armed, restore

# An entry that is no layer's: JAX caches a trace by the map, and this makes it another one.
MARK = {"stock": 0}


@contextmanager
def stock() -> Iterator[None]:
    """Take the patches away, then put them back."""
    entries = armed()
    assert entries
    assert all(entry.applied for entry in entries if entry.loaded)
    restore()
    try:
        yield
    finally:
        for package in {entry.package for entry in entries}:
            seams = [entry.seam for entry in entries if entry.package == package]
            arm(seams, Version(version(package)), _never)


def _never(error: SeamMismatch) -> NoReturn:
    raise error
