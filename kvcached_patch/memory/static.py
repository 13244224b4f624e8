"""Plain device memory, committed in full when it is reserved."""

from __future__ import annotations

import torch

from kvcached_patch.errors import DriverError


class StaticMemory:
    """One ordinary tensor: for devices whose memory cannot be committed page by page."""

    kind = "static"
    backing = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """Allocate `nbytes` zeroed bytes; raises DriverError if the allocator refuses."""
        try:
            self.tensor = torch.zeros(nbytes, dtype=torch.int8, device=device)
        except RuntimeError as error:
            raise DriverError(f"allocating {nbytes} bytes on {device}: {error}") from error

    @property
    def page_bytes(self) -> int:
        """No part of it can be given back."""
        return 0

    def fence(self) -> None:
        """Nothing to do: no page is ever exchanged."""

    def commit(self, start: int, end: int) -> None:
        """Nothing to do: all of it is committed."""

    def release(self, start: int, end: int) -> None:
        """Raises DriverError: no part of it can be given back."""
        raise DriverError(f"releasing {end - start} bytes: static memory is never released")

    def close(self) -> None:
        """Drop the tensor; the allocator frees the bytes with the last view of them."""
        del self.tensor
