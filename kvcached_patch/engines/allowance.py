"""How much of a block pool may be committed now, by limits, budget, and what devices have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcached_patch.core.footprint import Footprint
from kvcached_patch.core.free_list import PageAwareQueue
from kvcached_patch.core.pages import Plan
from kvcached_patch.core.totals import Totals
from kvcached_patch.engines.budget import SPARE_SLABS, Budget, Geometry
from kvcached_patch.engines.budgets import Budgets
from kvcached_patch.engines.page_supply import PageSupply


@dataclass(frozen=True)
class Agreement:
    """What the workers of one engine agreed on.

    footprint: None where slabs share no pages. supply: None where pages need not be had ahead.
    """

    geometry: Geometry
    budget: Budget | Budgets
    footprint: Footprint | None = None
    supply: PageSupply | None = None


class Allowance:
    """Gives a queue its room, and holds in the ledger what that takes.

    missed: whether memory could not be had since the last plan.
    """

    def __init__(
        self, agreement: Agreement, queue: PageAwareQueue, clock: Callable[[], float]
    ) -> None:
        """Hold what `queue` has committed already.

        Raises PoolExhausted if there are no pages for it.
        """
        self._queue = queue
        self._budget = agreement.budget
        self._footprint = agreement.footprint or Footprint(agreement.geometry.in_flight)
        self._supply = supply = agreement.supply
        self._clock = clock
        self._lacking = 0  # slabs, while requests wait
        self.missed = False
        self.ask_share()
        self._budget.hold(self.backed)
        if supply is not None:
            supply.need(self.backed, agreement.geometry.slab_bytes)
        self.settle(0)

    @property
    def backed(self) -> int:
        """Slabs whose pages are there, or will be with the next plan."""
        return self._footprint.slabs + self._queue.fresh

    def without_empty(self) -> int:
        """What `backed` would be if all empty slabs had left."""
        return self._footprint.without(self._queue.empty_slabs()) + self._queue.fresh

    @property
    def unsettled(self) -> bool:
        """Whether releases are not in force yet, or more is held than backed."""
        return self._footprint.leaving or self._budget.held > self.backed

    @property
    def totals(self) -> Totals:
        """What has been committed, released and missed."""
        return self._footprint.totals

    @property
    def spare(self) -> int:
        """Slabs to be reserved ahead.

        Of a supply the more the more there are: each asking costs a round to the workers.
        """
        return SPARE_SLABS if self._supply is None else max(SPARE_SLABS, self._queue.committed // 8)

    def ask_share(self) -> int | None:
        """See `Budget.share`."""
        return self._budget.share(cached=self._queue.kept_count)

    def grow(self, slabs: int) -> bool:
        """Give the queue room for so many slabs more, or for one; while it withholds."""
        queue = self._queue
        room = queue.room
        missing = queue.slabs - queue.committed - (room or 0)
        if room is None or missing <= 0:
            return False
        if room < 0:  # over its share: others' memory would not help
            self.missed = True
            return False
        for count in (min(slabs, missing), 1):
            if not self._may_hold(self.backed + room + count):
                # Under shortage a share covers what is held and wanted: the wish comes first.
                self._budget.want(max(count, self._lacking))
                if not self._may_hold(self.backed + room + count):
                    continue
            if not self._budget.must_yield and self._budget.reserve(count):
                more = self._supplied(room, count)
                if more < count:
                    self._budget.release(count - more)
                if self._supply is not None and self._supply.refused:
                    self._budget.refused()
                if more:
                    queue.restore()
                    queue.room = room + more
                    queue.withhold()
                    return True
        self.missed = True
        return False

    def commit_ahead(self) -> None:
        """Where a plan commits anything, commit all that there are pages for.

        Workers own the pages anyway, and wait for their device once for all of them.
        """
        if self._supply is not None and self._queue.fresh:
            self._queue.commit_ahead(max(self._queue.room or 0, 0))

    def follow(self, plan: Plan, lacking: int) -> None:
        """Take note of a plan; lacking: slabs that requests would take that wait for memory."""
        self._footprint.follow(plan, self._queue.now)
        self._footprint.totals.misses += self.missed
        self._lacking = lacking
        self._budget.want(lacking)

    def stamp(self, plan: Plan) -> Plan:
        """The plan as it is sent; a new count of misses begins."""
        self.missed = False
        return plan if self._supply is None else self._supply.stamp(plan)

    def applied(self) -> None:
        """Every worker has carried out every plan."""
        self._footprint.settle(self._clock())
        if self._supply is not None:
            self._supply.applied()

    def settle(self, spare: int) -> None:
        """Bring room and ledger in line with what is committed.

        spare: slabs reserved ahead that may stay so.
        """
        share = self._budget.bound
        bounded = share is not None or self._supply is not None
        # With nothing to bound it the ledger need not be told of each slab at once.
        if bounded or not spare:
            backed = self.settle_ledger(spare)
        self._queue.room = None
        if bounded:
            most = self._budget.held if self._supply is None else self._supply.slabs
            self._queue.room = (most if share is None else min(most, share)) - backed

    def settle_ledger(self, spare: int) -> int:
        """Hold in the ledger what is backed, which is returned, and what may be in a while."""
        share, backed = self._budget.bound, self.backed
        if share is not None:
            spare = min(spare, max(share - backed, 0))
        elif self._supply is None:
            spare = 0
        most = backed + spare
        if self._supply is not None:
            self._supply.settle(backed, most)
            most = max(most, self._supply.owned)
        if backed > self._budget.held:
            self._budget.hold(backed - self._budget.held)
        elif self._budget.held > most:
            self._budget.release(self._budget.held - most)
        return backed

    def _supplied(self, room: int, count: int) -> int:
        """For how many of `count` slabs beyond the room there are pages."""
        if self._supply is None:
            return count
        had = self.backed + room
        return max(self._supply.grow(had + count, self._clock()) - had, 0)

    def _may_hold(self, slabs: int) -> bool:
        share = self.ask_share()
        return share is None or slabs <= share
