"""Pages that every worker owns before the scheduler promises them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvcached_patch.core.pages import Plan
from kvcached_patch.errors import PoolExhausted

# How long nobody is asked again after the device had no more.
RETRY_SECONDS = 0.5


class PageSupply:
    """For how many slabs all workers own pages.

    A worker cannot refuse a plan, which the others carry out all the same. So what a device may
    refuse, whatever the ledger says, is asked for beforehand, of every worker; the least of their
    answers is what there is, and those that got more give it back with the next plan.

    refused: whether a device was found to have no more, at the last call of `grow`.
    """

    def __init__(self, ask: Callable[[int], int], in_flight: int) -> None:
        """Begin with none.

        ask: has every worker own pages for so many slabs in all, and returns for how many the
        worker with the fewest does. in_flight: plans that some worker may not have carried out yet.
        """
        self._ask = ask
        self.slabs = 0
        self.refused = False
        self._kept = deque([0] * in_flight)  # of the plans on their way
        self._closed_until = 0.0

    @property
    def owned(self) -> int:
        """For how many slabs a worker may own pages that has not carried out every plan yet."""
        return max(self.slabs, *self._kept)

    def grow(self, slabs: int, now: float) -> int:
        """Have pages for so many slabs in all; returns for how many there are."""
        self.refused = False
        if slabs > self.slabs and now >= self._closed_until:
            found = self._ask(slabs)
            self.refused = found < slabs
            if self.refused:
                self._closed_until = now + RETRY_SECONDS
            self.slabs = min(found, slabs)
            # They own these until a plan says otherwise, the last one not knowing of them.
            self._kept[-1] = max(self._kept[-1], self.slabs)
        return self.slabs

    def need(self, slabs: int, slab_bytes: int) -> None:
        """Have pages for so many slabs to begin with; raises PoolExhausted if there are not."""
        if self.grow(slabs, 0.0) < slabs:
            raise PoolExhausted(
                f"the device has pages for {self.slabs} slabs of {slab_bytes} bytes; expected at "
                f"least {slabs} to begin with"
            )

    def settle(self, backed: int, most: int) -> None:
        """Keep no more than so many slabs' pages, those of `backed` slabs in any case."""
        self.slabs = max(min(self.slabs, most), backed)

    def stamp(self, plan: Plan) -> Plan:
        """The plan, saying what workers keep."""
        self._kept.append(self.slabs)
        self._kept.popleft()
        return plan._replace(keep=self.slabs)

    def applied(self) -> None:
        """Every worker has carried out every plan."""
        self._kept = deque([self._kept[-1]] * len(self._kept))
