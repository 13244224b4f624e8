"""Streams of the driver model: work that was launched, and the order in which it may run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.driver_memory import AddressSpace

Stream = tuple[int, int]  # device ordinal, handle


@dataclass(eq=False)
class Work:
    """A kernel: ranges (address, bytes) it reads, ranges (address, byte value, bytes) it sets.

    seen: what it read, in the order of `reads`, once it has run.
    """

    stream: Stream
    reads: Sequence[tuple[int, int]] = ()
    writes: Sequence[tuple[int, int, int]] = ()
    done: bool = False
    seen: list[bytes] = field(default_factory=list)

    def touches(self, start: int, end: int) -> bool:
        ranges = [*self.reads, *((address, nbytes) for address, _, nbytes in self.writes)]
        return any(address < end and start < address + nbytes for address, nbytes in ranges)


@dataclass(eq=False)
class Event:
    """A point in a stream: complete when `after`, the last work before it, is done."""

    device: int
    after: Work | None = None

    @property
    def complete(self) -> bool:
        return self.after is None or self.after.done


class Streams:
    """Launched work in launch order; each stream keeps its own, and only its own, order."""

    def __init__(self, space: AddressSpace) -> None:
        self._space = space
        self.pending: list[Work] = []

    def launch(self, work: Work) -> Work:
        self.pending.append(work)
        return work

    def last(self, stream: Stream) -> Work | None:
        return next((work for work in reversed(self.pending) if work.stream == stream), None)

    def in_flight(self, start: int, end: int) -> bool:
        """Whether work that has not run touches ``[start, end)``."""
        return any(work.touches(start, end) for work in self.pending)

    def run(self, work: Work) -> None:
        """Run one piece; raises Fault, and leaves it where it is, if it lacks an access."""
        device = work.stream[0]
        work.seen = [self._space.read(address, nbytes, device) for address, nbytes in work.reads]
        for address, value, nbytes in work.writes:
            self._space.write(address, value, nbytes, device)
        work.done = True
        self.pending.remove(work)

    def run_all(self, device: int) -> None:
        """Run all of a device's work."""
        for work in [work for work in self.pending if work.stream[0] == device]:
            self.run(work)

    def run_until(self, last: Work | None) -> None:
        """Run a stream's work up to and including `last`; nothing else."""
        while last is not None and not last.done:
            self.run(next(work for work in self.pending if work.stream == last.stream))
