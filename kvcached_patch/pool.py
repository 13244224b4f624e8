"""The worker's elastic pool: plans carried out on memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import PageCounts, Plan, Run
from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.memory import Backing


class Range(Protocol):
    """What a pool needs of `kvcached_patch.memory.Memory`."""

    @property
    def page_bytes(self) -> int:
        """The unit of commit and release."""

    def fence(self) -> None:
        """Wait for the device's work so far."""

    def commit(self, start: int, end: int) -> None:
        """Make whole pages usable."""

    def release(self, start: int, end: int) -> None:
        """Give whole pages back."""


class ElasticPool:
    """The pages of one worker's KV cache, in step with the scheduler's plans.

    Invariants: (P1) plans are carried out in order, none left out; (P2) what plan n releases is
    given back only once step n is done, which is at the latest when plan n + 1 arrives and the
    device has done what was launched before; (P3) what plan n commits is usable before step n
    starts; (P4) a plan that neither commits nor releases waits for nothing and calls nothing.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        range_bytes: Sequence[int],
        cells: Sequence[Cells],
        num_blocks: int,
        slab_blocks: int,
        backing: Backing | None = None,
    ) -> None:
        """Serve the ranges; no slab is committed before the first plan.

        backing: where their pages come from, if they must be had before they are promised.
        """
        self._ranges = ranges
        self._backing = backing
        page_bytes = ranges[0].page_bytes
        self._pages = PageCounts(cells, range_bytes, num_blocks, slab_blocks, page_bytes)
        self._expected = 0
        self._pending: tuple[int, ...] = ()

    def supply(self, slabs: int) -> int:
        """Own pages for so many slabs, or for as many as the device has; returns how many.

        Spare pages beyond that go back to the device.
        """
        assert self._backing is not None, "a supply for memory that needs none"
        price = self._pages.price
        found = min(self._backing.supply(slabs * price) // price, slabs)
        self._backing.keep(found * price)
        return found

    def apply(self, plan: Plan, *, idle: bool) -> None:
        """Carry out a plan before its step.

        idle: the step does no work, so that what the plan releases can go at once. The first plan
        also gives back what warm-up touched. Raises KvcachedPatchError if a plan was lost; what the
        memory raises on the way leaves no slab of the plan committed.
        """
        if plan.sequence != self._expected:
            raise KvcachedPatchError(
                f"memory plan {plan.sequence} reached the worker; expected plan {self._expected}: "
                "a scheduler output was lost on the way, and with it what it released or committed"
            )
        self._expected += 1
        leaving = self._pending + plan.release if idle else self._pending
        if plan.commit or leaving:
            self._ranges[0].fence()
        self._release(self._pending)
        self._pending = plan.release
        self._commit(plan.commit)
        if plan.sequence == 0:
            for index, start, end in self._pages.unneeded():
                self._ranges[index].release(start, end)
        if idle:
            self._release(self._pending)
            self._pending = ()
        if self._backing is not None and plan.keep is not None:
            self._backing.keep(plan.keep * self._pages.price)

    def missing(self) -> None:
        """A step with work came without a plan, after plans had begun.

        Raises KvcachedPatchError in that case.
        """
        if self._expected:
            raise KvcachedPatchError(
                f"a step without a memory plan reached the worker; expected plan {self._expected}"
            )

    def _commit(self, slabs: tuple[int, ...]) -> None:
        done: list[Run] = []
        try:
            for index, start, end in self._pages.commit(slabs):
                self._ranges[index].commit(start, end)
                done.append((index, start, end))
        except KvcachedPatchError:
            self._ranges[0].fence()
            for index, start, end in done:
                self._ranges[index].release(start, end)
            self._pages.release(slabs)
            raise

    def _release(self, slabs: tuple[int, ...]) -> None:
        for index, start, end in self._pages.release(slabs):
            self._ranges[index].release(start, end)
