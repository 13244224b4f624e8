"""How much memory the workers hold after the plans so far, as the scheduler can tell."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvcached_patch.core.pages import PageCounts, Plan
from kvcached_patch.core.totals import Totals


class Footprint:
    """Slabs whose pages are there: committed by a plan, or released by one not yet in force.

    Where slabs share pages at their borders, fewer pages are there than slabs would need alone:
    then the pages are counted as each worker counts them, and given as so many slabs at their
    price, the most pages that a slab may need.
    """

    def __init__(self, in_flight: int, workers: Sequence[PageCounts] = ()) -> None:
        """Start with nothing committed; `totals` counts slabs.

        in_flight: plans whose releases may not be in force yet: one more than workers may have
        before them, since what one releases is in force when the next is applied (`ElasticPool`,
        P2). workers: all of them, if slabs share pages on any.
        """
        self._workers = tuple(workers)
        self._committed: set[int] = set()
        self._leaving: deque[tuple[int, ...]] = deque([()] * in_flight)
        self._planned = deque([0.0] * in_flight)  # when that was
        self.totals = Totals()

    @property
    def slabs(self) -> int:
        """As much as so many slabs' price, rounded up."""
        if self._workers:
            return max(-(-pages.needed // pages.price) for pages in self._workers)
        return len(self._committed)

    def without(self, slabs: Iterable[int]) -> int:
        """What `slabs` would be if these, of those committed, had left."""
        gone = self._committed.intersection(slabs)
        if not self._workers:
            return len(self._committed) - len(gone)
        left = 0
        for pages in self._workers:
            pages.release(gone)
            left = max(left, -(-pages.needed // pages.price))
            pages.commit(gone)
        return left

    @property
    def leaving(self) -> bool:
        """Whether plans whose releases may not be in force yet released anything."""
        return any(self._leaving)

    def follow(self, plan: Plan, now: float) -> None:
        """Take note of a plan that is on its way to the workers; `now`: seconds."""
        if plan.commit:
            self._leaving = deque(
                tuple(slab for slab in slabs if slab not in plan.commit) for slabs in self._leaving
            )
        new = tuple(slab for slab in plan.commit if slab not in self._committed)
        self._committed.update(new)
        self.totals.committed += len(new)
        for pages in self._workers:
            pages.commit(new)
        self._leave(plan.release, now)

    def settle(self, now: float) -> None:
        """Every worker has carried out every plan, with what it releases; `now`: seconds."""
        for _ in range(len(self._leaving)):
            self._leave((), now)

    def _leave(self, last: tuple[int, ...], now: float) -> None:
        """Take it that what the oldest plan released has left; `last`: what the newest releases."""
        slabs, planned = self._leaving.popleft(), self._planned.popleft()
        self._leaving.append(last)
        self._planned.append(now)
        if not slabs:
            return
        self.totals.count_release(len(slabs), now - planned)
        self._committed.difference_update(slabs)
        for pages in self._workers:
            pages.release(slabs)
