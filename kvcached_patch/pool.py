"""The worker's elastic pool: plans carried out on memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import PageCounts, Plan
from kvcached_patch.errors import KvcachedPatchError


class Range(Protocol):
    """What a pool needs of `kvcached_patch.memory.Memory`."""

    @property
    def page_bytes(self) -> int:
        """The unit of commit and release."""

    def commit(self, start: int, end: int) -> None:
        """Make whole pages usable."""

    def release(self, start: int, end: int) -> None:
        """Give whole pages back."""


class ElasticPool:
    """The pages of one worker's KV cache, in step with the scheduler's plans.

    Invariants: (P1) plans are carried out in order, none left out; (P2) what plan n releases is
    given back only once step n is done, which is at the latest when plan n + 1 arrives; (P3) what
    plan n commits is usable before step n starts.
    """

    def __init__(
        self,
        ranges: Sequence[Range],
        range_bytes: Sequence[int],
        cells: Sequence[Cells],
        num_blocks: int,
        slab_blocks: int,
    ) -> None:
        """Serve the ranges; no slab is committed before the first plan."""
        self._ranges = ranges
        page_bytes = ranges[0].page_bytes
        self._pages = PageCounts(cells, range_bytes, num_blocks, slab_blocks, page_bytes)
        self._expected = 0
        self._pending: tuple[int, ...] = ()

    def apply(self, plan: Plan, *, idle: bool) -> None:
        """Carry out a plan before its step.

        idle: the step does no work, so that what the plan releases can go at once. The first plan
        also gives back what warm-up touched. Raises KvcachedPatchError if a plan was lost.
        """
        if plan.sequence != self._expected:
            raise KvcachedPatchError(
                f"memory plan {plan.sequence} reached the worker; expected plan {self._expected}: "
                "a scheduler output was lost on the way, and with it what it released or committed"
            )
        self._expected += 1
        self._release(self._pending)
        self._pending = plan.release
        for index, start, end in self._pages.commit(plan.commit):
            self._ranges[index].commit(start, end)
        if plan.sequence == 0:
            for index, start, end in self._pages.unneeded():
                self._ranges[index].release(start, end)
        if idle:
            self._release(self._pending)
            self._pending = ()

    def missing(self) -> None:
        """A step with work came without a plan, after plans had begun.

        Raises KvcachedPatchError in that case.
        """
        if self._expected:
            raise KvcachedPatchError(
                f"a step without a memory plan reached the worker; expected plan {self._expected}"
            )

    def _release(self, slabs: tuple[int, ...]) -> None:
        for index, start, end in self._pages.release(slabs):
            self._ranges[index].release(start, end)
