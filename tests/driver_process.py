"""A process of the driver model: its state, how calls enter it, and what tests do with it."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from cuda.bindings import driver as cuda

from tests.driver_memory import AddressSpace, Device, Handle, Refused, refuse
from tests.driver_streams import Event, Streams, Work

Code = cuda.CUresult
CONTEXTS = 0x1000  # the primary context of ordinal 0; the next ones follow


def call(
    values: int = 0, *, context: bool = True, initialised: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]:
    """A driver function of so many values: returns (code, *values), the values None on an error.

    context: it needs a current one. initialised: it needs cuInit.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        @functools.wraps(function)
        def entered(self: Process, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    self.enter(function.__name__)
                    refuse(initialised and not self.initialised, Code.CUDA_ERROR_NOT_INITIALIZED)
                    if context:
                        self.current()
                    result = function(self, *args, **kwargs)
                except Refused as refused:
                    return (refused.code, *[None] * values)
            return (Code.CUDA_SUCCESS, *(result if values > 1 else [result] * values))

        return entered

    return wrap


def number(value: Any) -> int:
    """A handle or pointer as the bindings take it: of any of their types, an int, None for NULL."""
    return 0 if value is None else int(value)


class Process:
    """A process that uses `devices` (one granularity for all), by ordinal.

    calls: how often each driver function was called, but those that name errors.
    """

    def __init__(self, *devices: Device) -> None:
        (granularity,) = {device.granularity for device in devices}
        self.devices = devices
        self.space = AddressSpace(granularity)
        self.streams = Streams(self.space)
        self.calls: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.initialised = False
        self.retained = [0] * len(devices)
        self.handles: dict[int, Handle] = {}
        self.events: dict[int, Event] = {}
        self.ids = count(1)
        self._failures: dict[int, Code] = {}
        self._thread = threading.local()

    # What tests do.

    def fail_at(self, k: int, code: Code = Code.CUDA_ERROR_OUT_OF_MEMORY) -> None:
        """Let the `k`-th driver call from now on (from 1) return `code` and do nothing."""
        self._failures[self.calls.total() + k] = code

    def forgive(self) -> None:
        """No call is to fail any more."""
        self._failures.clear()

    def launch(
        self,
        stream: int = 0,
        reads: Sequence[tuple[int, int]] = (),
        writes: Sequence[tuple[int, int, int]] = (),
        device: int = 0,
    ) -> Work:
        """Queue a kernel: it reads (address, bytes) and sets (address, byte value, bytes)."""
        with self.lock:
            return self.streams.launch(Work((device, stream), reads, writes))

    def run_some(self, n: int = 1, stream: int | None = None) -> int:
        """Run the `n` pieces of work launched first, of all streams or of one; returns how many."""
        with self.lock:
            pending = [w for w in self.streams.pending if stream is None or w.stream[1] == stream]
            for work in pending[:n]:
                self.streams.run(work)
            return len(pending[:n])

    def read(self, address: Any, nbytes: int, device: int = 0) -> bytes:
        """What `device` would read now; runs nothing. Raises Fault where it has no access."""
        with self.lock:
            return self.space.read(number(address), nbytes, device)

    def leaks(self) -> dict[str, list[int]]:
        """What is open, by kind: handles, addresses, ordinals; `pushed` by the calling thread."""
        found = {
            "handles": [key for key, handle in self.handles.items() if not handle.released],
            "mappings": [mapping.start for mapping in self.space.mappings],
            "reservations": list(self.space.reservations),
            "events": list(self.events),
            "retained": [i for i, times in enumerate(self.retained) for _ in range(times)],
            "pushed": list(self.stack()),
        }
        return {kind: things for kind, things in found.items() if things}

    # What calls need.

    def enter(self, name: str) -> None:
        """Count a call; raises Refused if it is one that is to fail."""
        self.calls[name] += 1
        code = self._failures.pop(self.calls.total(), None)
        if code is not None:
            raise Refused(code)

    def stack(self) -> list[int]:
        """The ordinals of this thread's contexts, the current one last."""
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[int] = self._thread.stack
        return stack

    def current(self) -> int:
        """The ordinal of this thread's current context."""
        refuse(not self.stack(), Code.CUDA_ERROR_INVALID_CONTEXT)
        ordinal = self.stack()[-1]
        refuse(not self.retained[ordinal], Code.CUDA_ERROR_CONTEXT_IS_DESTROYED)
        return ordinal

    def ordinal(self, device: Any) -> int:
        found = number(device)
        refuse(found not in range(len(self.devices)), Code.CUDA_ERROR_INVALID_DEVICE)
        return found

    def context(self, ctx: Any) -> int:
        """The ordinal of a context that is retained."""
        ordinal = number(ctx) - CONTEXTS
        known = ordinal in range(len(self.devices)) and self.retained[ordinal]
        refuse(not known, Code.CUDA_ERROR_INVALID_CONTEXT)
        return ordinal

    def located(self, location: Any) -> int:
        """The ordinal of a CUmemLocation; only device memory is modelled."""
        refuse(location.type != cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        return self.ordinal(location.id)

    def handle(self, value: Any) -> Handle:
        found = self.handles.get(number(value))
        if found is None or found.released:
            raise Refused
        return found

    def event(self, value: Any) -> Event:
        found = self.events.get(number(value))
        if found is None:
            raise Refused(Code.CUDA_ERROR_INVALID_HANDLE)
        return found

    def place(self, prop: Any) -> Device:
        """Where a CUmemAllocationProp wants memory."""
        if not isinstance(prop, cuda.CUmemAllocationProp):
            raise TypeError(f"prop: {prop!r}; expected CUmemAllocationProp")
        refuse(prop.type != cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        device = self.devices[self.located(prop.location)]
        refuse(not device.vmm, Code.CUDA_ERROR_NOT_SUPPORTED)
        return device
