"""Where storage comes from: one module per kind of memory."""

from __future__ import annotations

from typing import Protocol

import torch

from kvcached_patch.memory.host import HostMemory
from kvcached_patch.memory.static import StaticMemory


class Memory(Protocol):
    """One reserved range of bytes seen as a flat int8 tensor.

    kind: the name users select it by.
    tensor: the whole range, ``[nbytes]`` int8, reading as zeros until written.
    """

    kind: str
    tensor: torch.Tensor

    def resident_bytes(self) -> int:
        """Bytes of the range that physical memory backs right now."""

    @property
    def page_bytes(self) -> int:
        """The unit in which memory can be committed and released; 0 if it cannot."""

    def commit(self, start: int, end: int) -> None:
        """Make the bytes of ``[start, end)``, whole pages, usable; they read as zeros."""

    def release(self, start: int, end: int) -> None:
        """Give the pages of ``[start, end)`` back; they still read, as zeros."""

    def close(self) -> None:
        """Give the range back; an error while anything still views it."""


def reserve(kind: str, nbytes: int, device: torch.device) -> Memory:
    """Reserve exactly `nbytes` bytes on `device` from memory of this kind.

    Raises ValueError for an unknown kind, DriverError if the memory cannot be had.
    """
    if kind == HostMemory.kind:
        return HostMemory(nbytes, device)
    if kind == StaticMemory.kind:
        return StaticMemory(nbytes, device)
    raise ValueError(f"memory kind {kind!r}: expected host or static")
