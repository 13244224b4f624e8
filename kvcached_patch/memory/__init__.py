"""Where storage comes from: one module per kind of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Backing(Protocol):
    """One owner's pages of a device, where they must be had before they are promised.

    uuid: of the device.
    """

    @property
    def uuid(self) -> str:
        """Which device it is, the same in every process."""

    def supply(self, pages: int) -> int:
        """Own so many pages, or as many as there are; returns how many these are."""

    def keep(self, pages: int) -> None:
        """Give unused pages back to the device until no more than so many are owned."""


class Memory(Protocol):
    """One reserved range of bytes seen as a flat int8 tensor.

    kind: the name users select it by.
    tensor: the whole range, ``[nbytes]`` int8, reading as zeros until written.
    backing: None where committing needs no supply: the first touch does it, or all is committed.
    """

    kind: str
    tensor: torch.Tensor

    @property
    def backing(self) -> Backing | None:
        """Where its pages come from."""

    @property
    def page_bytes(self) -> int:
        """The unit in which memory can be committed and released; 0 if it cannot."""

    def fence(self) -> None:
        """Wait for the device's work so far: before pages that were in use are exchanged."""

    def commit(self, start: int, end: int) -> None:
        """Make the bytes of ``[start, end)``, whole pages, usable; they read as zeros."""

    def release(self, start: int, end: int) -> None:
        """Give the pages of ``[start, end)`` back; they still read, as zeros."""

    def close(self) -> None:
        """Give the range back; an error while anything still views it."""


# The type of device that memory of a kind serves; static memory serves all.
DEVICE_TYPES = {"host": "cpu", "cuda": "cuda"}


def reserve(kind: str, nbytes: int, device: torch.device, beside: Memory | None = None) -> Memory:
    """Reserve exactly `nbytes` bytes on `device` from memory of this kind.

    beside: memory of the same kind, device and owner, if there is any: both draw on one backing.

    Raises ValueError for an unknown kind, DriverError if the memory cannot be had.
    """
    if kind == "host":
        from kvcached_patch.memory.host import HostMemory

        return HostMemory(nbytes, device)
    if kind == "cuda":
        from kvcached_patch.memory.cuda import CudaMemory

        return CudaMemory(nbytes, device, beside if isinstance(beside, CudaMemory) else None)
    if kind == "static":
        from kvcached_patch.memory.static import StaticMemory

        return StaticMemory(nbytes, device)
    raise ValueError(f"memory kind {kind!r}: expected cuda, host or static")
