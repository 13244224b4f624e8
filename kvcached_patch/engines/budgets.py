"""One engine's standing with the ledgers of several devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcached_patch.core.totals import Totals
from kvcached_patch.engines.budget import Budget, Geometry, join


class Budgets:
    """The `Budget` of each device, asked and told as one.

    A slab lies in part on every device, so it can be had where all devices have it.
    """

    def __init__(self, budgets: Sequence[Budget]) -> None:
        """Of at least one device."""
        self._budgets = budgets

    @property
    def held(self) -> int:
        """See `Budget`; the same on every device."""
        return self._budgets[0].held

    @property
    def changed(self) -> bool:
        """See `Budget.changed`."""
        return any(budget.changed for budget in self._budgets)

    def share(self, *, cached: int = 0) -> int | None:
        """See `Budget.share`."""
        return _least([budget.share(cached=cached) for budget in self._budgets])

    @property
    def bound(self) -> int | None:
        """See `Budget.bound`."""
        return _least(budget.bound for budget in self._budgets)

    @property
    def keep(self) -> int | None:
        """See `Budget`."""
        return _least(budget.keep for budget in self._budgets)

    @property
    def asked(self) -> int:
        """See `Budget`: the latest request of any device."""
        return max(budget.asked for budget in self._budgets)

    @property
    def must_yield(self) -> bool:
        """See `Budget.must_yield`."""
        return any(budget.must_yield for budget in self._budgets)

    def reserve(self, slabs: int) -> bool:
        """See `Budget.reserve`: on every device, or on none."""
        for number, budget in enumerate(self._budgets):
            if not budget.reserve(slabs):
                for before in self._budgets[:number]:
                    before.release(slabs)
                return False
        return True

    def hold(self, slabs: int) -> None:
        """See `Budget.hold`."""
        for budget in self._budgets:
            budget.hold(slabs)

    def release(self, slabs: int) -> None:
        """See `Budget.release`."""
        for budget in self._budgets:
            budget.release(slabs)

    def refused(self) -> None:
        """See `Budget.refused`; which of the devices it was is not known."""
        for budget in self._budgets:
            budget.refused()

    def want(self, slabs: int) -> None:
        """See `Budget.want`."""
        for budget in self._budgets:
            budget.want(slabs)

    def trimmed(self, request: int) -> None:
        """See `Budget.trimmed`."""
        for budget in self._budgets:
            budget.trimmed(request)

    def publish(self, *, cached: int, free: int, queries: int, hits: int, totals: Totals) -> None:
        """See `Budget.publish`."""
        for budget in self._budgets:
            budget.publish(cached=cached, free=free, queries=queries, hits=hits, totals=totals)

    def close(self) -> None:
        """See `Budget.close`."""
        for budget in self._budgets:
            budget.close()


def join_all(geometries: Sequence[Geometry]) -> Budget | Budgets:
    """Enter this engine in the ledger of every device; see `join`, also for what it raises."""
    joined: list[Budget] = []
    try:
        for geometry in geometries:
            joined.append(join(geometry))
    except BaseException:
        for budget in joined:
            budget.close()
        raise
    return joined[0] if len(joined) == 1 else Budgets(joined)


def _least(slabs: Iterable[int | None]) -> int | None:
    return min((each for each in slabs if each is not None), default=None)
