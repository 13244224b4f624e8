"""One owner's pages of a GPU: created ahead, handed out, given back."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvcached_patch.errors import DriverError, KvcachedPatchError, PoolExhausted
from kvcached_patch.memory.driver import call

# One part in so many of a GPU's memory is left alone: 320 MiB of 80 GiB.
HEADROOM = 256


class DevicePages:
    """Pages of one GPU that a worker owns, whose `ranges` draw from them.

    Sizes are bytes where named so, else pages. A page is one allocation of the driver's minimum
    granularity, 2 MiB on every GPU so far. `owned` counts those in ranges and the spare ones.

    Invariants: (D1) a page is spare or in one range at one address; (D2) one more page, which only
    ever holds zeros, lies under every address that none of these is mapped at, so that a stray
    read finds zeros; (D3) a thread that calls the driver has made this GPU's context its own
    before: CUDA's device is per thread (kvcached#413).
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        """Retain the GPU's primary context, which is PyTorch's too, and make the page of zeros.

        ordinal: the GPU as CUDA numbers it in this process. Raises DriverError or PoolExhausted.
        """
        self._driver = driver
        self.owned = 0
        self.ranges = 0
        self._spare: list[Any] = []
        self._device = self.call("cuDeviceGet", ordinal)
        mappable = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self.call("cuDeviceGetAttribute", mappable, self._device):
            raise DriverError(
                f"GPU {ordinal}: found no virtual memory management; expected it, or "
                "KVCACHED_PATCH_POOL=static"
            )
        self._describe(ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        self._undo: list[tuple[Any, ...]] = []
        try:
            self._prepare()
        except KvcachedPatchError:
            self._give_back()
            raise

    def _describe(self, ordinal: int) -> None:
        """What pages are made as, and who may access them."""
        driver = self._driver
        self._prop = driver.CUmemAllocationProp()
        self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = ordinal
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._prop.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    def _prepare(self) -> None:
        """Make the page of zeros, at an address of its own for writing to it, and the event."""
        driver = self._driver
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.page_bytes: int = self.call("cuMemGetAllocationGranularity", self._prop, least)
        flags = driver.CUevent_flags
        waiting = int(flags.CU_EVENT_DISABLE_TIMING) | int(flags.CU_EVENT_BLOCKING_SYNC)
        self.enter()
        self._event = self.call("cuEventCreate", waiting)
        self._undo.append(("cuEventDestroy", self._event))
        self.zeros = self._create()
        self._undo.append(("cuMemRelease", self.zeros))
        self._zeros_at = self.reserve(self.page_bytes)
        self._undo.append(("cuMemAddressFree", self._zeros_at, self.page_bytes))
        self.map(self._zeros_at, self.zeros)
        self._undo.append(("cuMemUnmap", self._zeros_at, self.page_bytes))
        self.allow(self._zeros_at, self.page_bytes)
        self.clean(stream=0)
        self._undo.append(("cuStreamSynchronize", 0))
        self.call("cuStreamSynchronize", 0)

    def _give_back(self) -> None:
        """Undo what was acquired, the last first; an error can be gone on from."""
        self.enter()
        while self._undo:
            self.call(*self._undo[-1])
            self._undo.pop()
        self.call("cuCtxSetCurrent", 0)
        self.call("cuDevicePrimaryCtxRelease", self._device)

    def call(self, name: str, *arguments: Any) -> Any:
        """See `kvcached_patch.memory.driver.call`."""
        return call(self._driver, name, *arguments)

    def enter(self) -> None:
        """Make this GPU's context the calling thread's (D3)."""
        self.call("cuCtxSetCurrent", self._context)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep the thread's context, which may be in the midst of other calls.

        Begins by waiting for all that this process has launched on the GPU.
        """
        before = self.call("cuCtxGetCurrent")
        self.call("cuDevicePrimaryCtxRetain", self._device)
        try:
            self.enter()
            self.call("cuCtxSynchronize")
            yield
        finally:
            self.call("cuCtxSetCurrent", before)
            self.call("cuDevicePrimaryCtxRelease", self._device)

    @property
    def uuid(self) -> str:
        """The GPU's UUID as ``nvidia-smi -L`` has it; of a MIG instance, its own.

        Other than an ordinal it means the same in every process, whatever
        ``CUDA_VISIBLE_DEVICES`` says.
        """
        # cuda-bindings 12 has the older function under the plain name, which knows no MIG.
        new = "cuDeviceGetUuid_v2"
        name = new if hasattr(self._driver, new) else "cuDeviceGetUuid"
        return f"GPU-{uuid.UUID(bytes=bytes(self.call(name, self._device).bytes))}"

    def supply(self, pages: int) -> int:
        """Own so many pages, or as many as the GPU can spare; returns how many these are.

        A little stays free (`HEADROOM`): what PyTorch or the driver next ask for must not fail.
        """
        self.enter()
        if self.owned < pages:
            free, total = self.call("cuMemGetInfo")
            spare = max(free - total // HEADROOM, 0) // self.page_bytes
            pages = min(pages, self.owned + spare)
        while self.owned < pages:
            try:
                self._spare.append(self._create())
            except PoolExhausted:
                break
            self.owned += 1
        return self.owned

    def keep(self, pages: int) -> None:
        """Give spare pages back to the GPU until no more than so many are owned."""
        if self._spare and self.owned > pages:
            self.enter()
        while self._spare and self.owned > pages:
            self.call("cuMemRelease", self._spare[-1])
            self._spare.pop()
            self.owned -= 1

    def take(self, pages: int) -> Sequence[Any]:
        """Hand out pages, made now if too few are spare.

        Raises PoolExhausted, and nothing has changed but the spare pages, if there are no more.
        """
        missing = pages - len(self._spare)
        if missing > 0:
            wanted = self.owned + missing
            if self.supply(wanted) < wanted:
                raise PoolExhausted(
                    f"{self.uuid}: {missing} pages of {self.page_bytes} bytes wanted; "
                    f"the GPU has {missing - wanted + self.owned}"
                )
        first = len(self._spare) - pages
        taken, self._spare[first:] = self._spare[first:], []
        return taken

    def give(self, pages: Sequence[Any]) -> None:
        """Take pages back, which are mapped nowhere any more."""
        self._spare += pages

    def fence(self, stream: int) -> None:
        """Wait for all that was launched on the stream before this call."""
        self.enter()
        self.call("cuEventRecord", self._event, stream)
        self.call("cuEventSynchronize", self._event)

    def clean(self, stream: int) -> None:
        """Clear the page of zeros, in the stream's order: warm-up writes to invented blocks."""
        self.clear(self._zeros_at, self.page_bytes, stream)

    def clear(self, address: int, nbytes: int, stream: int) -> None:
        """Fill mapped bytes with zeros, in the stream's order."""
        self.call("cuMemsetD8Async", address, 0, nbytes, stream)

    def reserve(self, nbytes: int) -> int:
        """Reserve a range of addresses, whole pages; returns its first."""
        return int(self.call("cuMemAddressReserve", nbytes, self.page_bytes, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Give a reserved range back, in which nothing is mapped."""
        self.call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, page: Any) -> None:
        """Map one page; nobody may access it before `allow`."""
        self.call("cuMemMap", address, self.page_bytes, 0, page, 0)

    def unmap(self, address: int) -> None:
        """Unmap what is mapped at the address of one page."""
        self.call("cuMemUnmap", address, self.page_bytes)

    def allow(self, address: int, nbytes: int) -> None:
        """Let this GPU read and write a range that pages are mapped at throughout."""
        self.call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def close(self) -> None:
        """Give everything back; an error, and nothing is given back, while pages are in ranges.

        Raises DriverError.
        """
        if len(self._spare) < self.owned:
            raise DriverError(f"{self.uuid}: {self.owned - len(self._spare)} pages are in use")
        self.keep(0)
        self._give_back()

    def _create(self) -> Any:
        return self.call("cuMemCreate", self.page_bytes, self._prop, 0)
