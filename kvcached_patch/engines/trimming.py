"""A request to trim, from when it is seen until what it lets go is in force."""

from __future__ import annotations

from kvcached_patch.engines.budget import Budget
from kvcached_patch.engines.budgets import Budgets


class Trimming:
    """Says which plan is to let all go that can, and answers once no worker holds it any more."""

    def __init__(self, budget: Budget | Budgets, in_flight: int) -> None:
        """in_flight: plans that may be on their way at once."""
        self._budget = budget
        self._in_flight = in_flight
        self._request = 0  # that the plan on its way is made for
        self._plans = 0  # until what it releases is in force

    @property
    def due(self) -> bool:
        """Whether the next plan is the one to let all go."""
        return bool(self._budget.asked) and not self._plans

    @property
    def pending(self) -> bool:
        """Whether nothing is to be spare: a plan trims, or has and is on its way."""
        return bool(self._budget.asked)

    def planned(self) -> None:
        """A plan was made, and the ledger told."""
        if self.due:
            self._request, self._plans = self._budget.asked, self._in_flight
        elif self._plans:
            self._plans -= 1
            if not self._plans:
                self._budget.trimmed(self._request)

    def applied(self) -> None:
        """Every worker has carried out every plan, and the ledger was told."""
        if self._plans:
            self._plans = 0
            self._budget.trimmed(self._request)
