"""Memory of the driver model: devices, handles, and the address space of a process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from cuda.bindings.driver import CUresult

GARBAGE = 0xAA  # what new memory reads as
READ, WRITE = 1, 2  # the bits of CUmemAccess_flags
_serials = count(1)


class Fault(Exception):
    """What kills a context on a real device: an access that hits nothing, or may hit nothing."""


class Refused(Exception):
    """A call that returns `code` and does nothing."""

    def __init__(self, code: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
        super().__init__(code.name)
        self.code = code


def refuse(wrong: bool, code: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    """Raise Refused with `code` if `wrong`."""
    if wrong:
        raise Refused(code)


@dataclass
class Device:
    """A device's memory, in bytes; several `Driver` objects on one device are several processes."""

    capacity: int
    granularity: int = 16
    vmm: bool = True
    uuid: bytes = field(default_factory=lambda: next(_serials).to_bytes(16, "big"))
    used: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def take(self, nbytes: int) -> None:
        """What a foreign process, or a handle, takes; raises Refused if there is less."""
        with self._lock:
            refuse(nbytes > self.free, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
            self.used += nbytes

    def give(self, nbytes: int) -> None:
        """What it gives back."""
        with self._lock:
            assert nbytes <= self.used, f"{nbytes} bytes given back, {self.used} taken"
            self.used -= nbytes


@dataclass(eq=False)
class Handle:
    """Physical memory; it goes back to its device when it is released and mapped nowhere."""

    device: Device
    content: bytearray
    released: bool = False
    mappings: int = 0

    def settle(self) -> None:
        if self.released and not self.mappings:
            self.device.give(len(self.content))


@dataclass(eq=False)
class Mapping:
    """A handle at an address; access: CUmemAccess_flags by device ordinal."""

    start: int
    end: int
    handle: Handle
    access: dict[int, int] = field(default_factory=dict)


class AddressSpace:
    """The reservations and mappings of a process; every size and address is in bytes.

    What the driver would refuse raises Refused; what would kill a context raises Fault.
    """

    def __init__(self, granularity: int) -> None:
        self.granularity = granularity
        self.reservations: dict[int, int] = {}
        self._pages: dict[int, Mapping] = {}  # by address // granularity
        self._next = 1 << 40

    @property
    def mappings(self) -> list[Mapping]:
        return list(dict.fromkeys(self._pages.values()))

    def reserve(self, nbytes: int, alignment: int, hint: int) -> int:
        """A new range. No address is used twice, nor are two ranges adjacent."""
        self._aligned(nbytes, hint)
        refuse(nbytes <= 0 or alignment & (alignment - 1) != 0)
        unit = max(alignment, self.granularity)
        start = -(-self._next // unit) * unit
        self._next = start + nbytes + self.granularity
        self.reservations[start] = nbytes
        return start

    def free(self, start: int, nbytes: int) -> None:
        refuse(self.reservations.get(start) != nbytes)
        refuse(any(page in self._pages for page in self._range(start, nbytes)))
        del self.reservations[start]

    def map(self, start: int, nbytes: int, offset: int, handle: Handle) -> None:
        self._aligned(start, nbytes, offset)
        refuse(nbytes <= 0 or offset != 0 or nbytes > len(handle.content))
        refuse(
            not any(
                base <= start and start + nbytes <= base + size
                for base, size in self.reservations.items()
            )
        )
        pages = self._range(start, nbytes)
        refuse(any(page in self._pages for page in pages))
        mapping = Mapping(start, start + nbytes, handle)
        handle.mappings += 1
        self._pages.update((page, mapping) for page in pages)

    def unmap(self, start: int, nbytes: int, in_flight: Callable[[int, int], bool]) -> None:
        """Raises Fault if work that is `in_flight` touches the mapping."""
        refuse([(m.start, m.end) for m in self._whole(start, nbytes)] != [(start, start + nbytes)])
        if in_flight(start, start + nbytes):
            raise Fault(f"unmapped under work in flight: {nbytes} bytes at {start:#x}")
        mapping = self._pages[start // self.granularity]
        for page in self._range(start, nbytes):
            del self._pages[page]
        mapping.handle.mappings -= 1
        mapping.handle.settle()

    def set_access(self, start: int, nbytes: int, access: Sequence[tuple[int, int]]) -> None:
        for mapping in self._whole(start, nbytes):
            mapping.access.update(access)

    def read(self, address: int, nbytes: int, device: int) -> bytes:
        """What device `device` reads; raises Fault where it has no access."""
        pieces = self._pieces(address, nbytes, device, READ)
        return b"".join(content[start:end] for content, start, end in pieces)

    def write(self, address: int, value: int, nbytes: int, device: int) -> None:
        """Set bytes, all or none; raises Fault where `device` has no access."""
        for content, start, end in list(self._pieces(address, nbytes, device, READ | WRITE)):
            content[start:end] = bytes([value]) * (end - start)

    def _pieces(
        self, address: int, nbytes: int, device: int, right: int
    ) -> Iterator[tuple[bytearray, int, int]]:
        at, end = address, address + nbytes
        while at < end:
            mapping = self._pages.get(at // self.granularity)
            if mapping is None:
                raise Fault(f"device {device} touches {at:#x}: not mapped")
            if mapping.access.get(device, 0) & right != right:
                raise Fault(f"device {device} touches {at:#x}: no access")
            stop = min(end, mapping.end)
            yield mapping.handle.content, at - mapping.start, stop - mapping.start
            at = stop

    def _whole(self, start: int, nbytes: int) -> list[Mapping]:
        """The mappings that fill a range, which has no hole and cuts none of them."""
        found = [self._pages.get(page) for page in self._range(start, nbytes)]
        mappings = list(dict.fromkeys(mapping for mapping in found if mapping is not None))
        refuse(not mappings or None in found)
        refuse(mappings[0].start != start or mappings[-1].end != start + nbytes)
        return mappings

    def _range(self, start: int, nbytes: int) -> range:
        return range(start // self.granularity, (start + nbytes) // self.granularity)

    def _aligned(self, *numbers: int) -> None:
        refuse(any(number % self.granularity for number in numbers))
