"""How a budget that is too small is divided."""

from __future__ import annotations

from collections.abc import Sequence


def fair_shares(budget: int, demands: Sequence[int], limits: Sequence[int | None]) -> list[int]:
    """Max-min fair shares of `budget` bytes, in the order of `demands`.

    Each demand counts up to its limit (None: no limit). Small demands are met in full; the others
    get one equal share each. Up to ``len(demands) - 1`` bytes of a short budget stay unassigned.
    """
    wanted = [
        demand if limit is None else min(demand, limit)
        for demand, limit in zip(demands, limits, strict=True)
    ]
    left = max(budget, 0)
    for position, demand in enumerate(sorted(wanted)):
        level = left // (len(wanted) - position)
        if demand > level:
            return [min(each, level) for each in wanted]
        left -= demand
    return wanted


def shares_with_caches(
    budget: int, demands: Sequence[int], limits: Sequence[int], caches: Sequence[int]
) -> list[int]:
    """What each may hold of its demand if `caches` bytes of it only wait to be used again.

    What is in use or wanted comes first; what that leaves of the budget is for the caches. Both
    are divided by `fair_shares`.
    """
    needs = [demand - cache for demand, cache in zip(demands, caches, strict=True)]
    needs = fair_shares(budget, needs, limits)
    rests = [
        min(demand, limit) - need
        for demand, limit, need in zip(demands, limits, needs, strict=True)
    ]
    kept = fair_shares(budget - sum(needs), list(map(min, rests, caches)), limits)
    return [need + cache for need, cache in zip(needs, kept, strict=True)]
