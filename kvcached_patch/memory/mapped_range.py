"""A range of a GPU's addresses whose pages come and go under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from kvcached_patch.errors import DriverError
from kvcached_patch.memory.device_pages import DevicePages


class MappedRange:
    """Addresses that never move; under each page of them lies a page of its own, or zeros.

    Driver calls, k pages at once: `commit` 2k + 1 (unmap, map; one set access) and one memset,
    `release` the same, where the memset clears the page of zeros. Creating and releasing pages is
    `DevicePages`'s.

    Invariants: (R1) outside a call of ours every address can be read; (R2) a call that fails
    leaves what was there; (R3) a page reads as zeros when it is committed, whoever had it before.

    While a page is exchanged its addresses cannot be accessed: there is no driver call that does
    it at one go. So nobody may still be at work that could read them, not even a read whose
    result is masked, of a block that has left: callers wait for `fence` first.
    """

    def __init__(self, backing: DevicePages, nbytes: int, stream: Callable[[], int]) -> None:
        """Reserve addresses for `nbytes` bytes (> 0) and lay zeros under all of them.

        stream: the one in whose order memory is used and cleared, asked for at each call. Raises
        DriverError, or PoolExhausted; then nothing is left behind.
        """
        self.backing = pages = backing
        self._stream = stream
        self._unit = unit = pages.page_bytes
        self.pages: list[Any] = [None] * -(-nbytes // unit)
        self._size = size = len(self.pages) * unit
        pages.enter()
        with ExitStack() as undo:
            self.address = pages.reserve(size)
            undo.callback(pages.unreserve, self.address, size)
            for address in range(self.address, self.address + size, unit):
                pages.map(address, pages.zeros)
                undo.callback(pages.unmap, address)
            pages.allow(self.address, size)
            undo.pop_all()
        pages.ranges += 1

    @property
    def page_bytes(self) -> int:
        """The unit in which memory is committed and released."""
        return self._unit

    def fence(self) -> None:
        """Wait for all that was launched on the stream: then pages may be exchanged."""
        self.backing.fence(self._stream())

    def commit(self, start: int, end: int) -> None:
        """Lay pages of its own under the bytes ``[start, end)``, cleared in the stream's order.

        start: a multiple of the page; end: another, or the range's end. Raises PoolExhausted,
        DriverError; a page that is committed already is a DriverError.
        """
        numbers = self._numbers(start, end)
        if any(self.pages[number] is not None for number in numbers):
            raise DriverError(f"commit of bytes {start} to {end}: a page is committed already")
        self.backing.enter()
        with ExitStack() as undo:
            new = self.backing.take(len(numbers))
            undo.callback(self.backing.give, new)
            self._exchange(numbers, [self.backing.zeros] * len(new), new, undo)
            self.backing.clear(self.address + start, len(numbers) * self._unit, self._stream())
            undo.pop_all()
        self.pages[numbers.start : numbers.stop] = new

    def release(self, start: int, end: int) -> None:
        """Lay zeros under the bytes ``[start, end)``; their pages become spare.

        Pages that are not committed stay as they are. Raises DriverError.
        """
        numbers = self._numbers(start, end)
        held = [number for number in numbers if self.pages[number] is not None]
        self.backing.enter()
        with ExitStack() as undo:
            self.backing.clean(self._stream())
            old = [self.pages[number] for number in held]
            self._exchange(held, old, [self.backing.zeros] * len(old), undo)
            undo.pop_all()
        self.backing.give(old)
        for number in held:
            self.pages[number] = None

    def close(self) -> None:
        """Give addresses and pages back; nobody may be at work on them.

        Raises DriverError; the next call goes on from there, and one more does nothing.
        """
        if not self._size:
            return
        self.backing.enter()
        while self.pages:
            self.backing.unmap(self._at(len(self.pages) - 1))
            page = self.pages.pop()
            if page is not None:
                self.backing.give([page])
        self.backing.unreserve(self.address, self._size)
        self._size = 0
        self.backing.ranges -= 1

    def _numbers(self, start: int, end: int) -> range:
        return range(start // self._unit, -(-end // self._unit))

    def _at(self, number: int) -> int:
        return self.address + number * self._unit

    def _exchange(
        self, numbers: Sequence[int], old: Sequence[Any], new: Sequence[Any], undo: ExitStack
    ) -> None:
        """Map other pages under these numbers, which ascend; one set access for all of them."""
        if not numbers:
            return
        first, size = self._at(numbers[0]), (numbers[-1] + 1 - numbers[0]) * self._unit
        undo.callback(self.backing.allow, first, size)
        for number, before, after in zip(numbers, old, new, strict=True):
            address = self._at(number)
            self.backing.unmap(address)
            undo.callback(self.backing.map, address, before)
            self.backing.map(address, after)
            undo.callback(self.backing.unmap, address)
        self.backing.allow(first, size)
