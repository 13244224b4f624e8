"""A range of a GPU's addresses whose pages come and go under it."""

from __future__ import annotations

from collections.abc import Sequence
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
    result is masked: callers wait for `DevicePages.fence` first. Pages that were never committed
    need no wait, since no block table ever named them.
    """

    def __init__(self, pages: DevicePages, nbytes: int) -> None:
        """Reserve addresses for `nbytes` bytes (> 0) and lay zeros under all of them.

        Raises DriverError, or PoolExhausted; then nothing is left behind.
        """
        self._pages = pages
        self._unit = unit = pages.page_bytes
        self.pages: list[Any] = [None] * -(-nbytes // unit)
        size = len(self.pages) * unit
        with pages.current(), ExitStack() as undo:
            self.address = pages.reserve(size)
            undo.callback(pages.unreserve, self.address, size)
            for address in range(self.address, self.address + size, unit):
                pages.map(address, pages.zeros)
                undo.callback(pages.unmap, address)
            pages.allow(self.address, size)
            undo.pop_all()
        pages.ranges += 1

    @property
    def committed(self) -> int:
        """Pages that are committed now."""
        return len(self.pages) - self.pages.count(None)

    def commit(self, start: int, end: int, stream: int) -> None:
        """Lay pages of its own under the bytes ``[start, end)``, cleared in the stream's order.

        start: a multiple of the page; end: another, or the range's end. Raises PoolExhausted,
        DriverError; a page that is committed already is a DriverError.
        """
        numbers = self._numbers(start, end)
        if any(self.pages[number] is not None for number in numbers):
            raise DriverError(f"commit of bytes {start} to {end}: a page is committed already")
        with self._pages.current(), ExitStack() as undo:
            new = self._pages.take(len(numbers))
            undo.callback(self._pages.give, new)
            self._exchange(numbers, [self._pages.zeros] * len(new), new, undo)
            self._pages.clear(self.address + start, len(numbers) * self._unit, stream)
            undo.pop_all()
        self.pages[numbers.start : numbers.stop] = new

    def release(self, start: int, end: int, stream: int) -> None:
        """Lay zeros under the bytes ``[start, end)``; their pages become spare.

        Pages that are not committed stay as they are. Raises DriverError.
        """
        numbers = self._numbers(start, end)
        held = [number for number in numbers if self.pages[number] is not None]
        with self._pages.current(), ExitStack() as undo:
            self._pages.clean(stream)
            old = [self.pages[number] for number in held]
            self._exchange(held, old, [self._pages.zeros] * len(old), undo)
            undo.pop_all()
        self._pages.give(old)
        for number in held:
            self.pages[number] = None

    def close(self) -> None:
        """Give addresses and pages back; nobody may be at work on them. Raises DriverError."""
        with self._pages.current():
            for number, page in enumerate(self.pages):
                self._pages.unmap(self._at(number))
                if page is not None:
                    self._pages.give([page])
            self._pages.unreserve(self.address, len(self.pages) * self._unit)
        self._pages.ranges -= 1

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
        undo.callback(self._pages.allow, first, size)
        for number, before, after in zip(numbers, old, new, strict=True):
            address = self._at(number)
            self._pages.unmap(address)
            undo.callback(self._pages.map, address, before)
            self._pages.map(address, after)
            undo.callback(self._pages.unmap, address)
        self._pages.allow(first, size)
