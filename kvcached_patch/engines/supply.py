"""Give vLLM's own allocation code storage from our memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcached_patch.memory import Memory


class StorageSupply(TorchFunctionMode):
    """While active, ``torch.zeros(n, dtype=torch.int8, …)`` returns memory of ours.

    That one call is how every vLLM release gets its KV-cache bytes; what shapes them, names
    them and checks them stays vLLM's code. The seam manifest requires the call to be there.
    """

    def __init__(self, reserve: Callable[[int, torch.device, Memory | None], Memory]) -> None:
        """Take each range from `reserve` (bytes, device, one that was taken before)."""
        super().__init__()
        self._reserve = reserve
        self.taken: list[Memory] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Serve raw KV-cache allocations; pass everything else through."""
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        (nbytes,) = args
        beside = self.taken[0] if self.taken else None
        memory = self._reserve(nbytes, torch.device(kwargs["device"]), beside)
        self.taken.append(memory)
        return memory.tensor
