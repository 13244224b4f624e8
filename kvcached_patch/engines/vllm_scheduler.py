"""The seams of vLLM's scheduler: a page-aware free queue, and a plan with every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import finalize

from kvcached_patch.core.pages import PLAN
from kvcached_patch.engines.allowance import Agreement
from kvcached_patch.engines.elastic import Elastic

_agreed: Agreement | None = None
# The attribute of vLLM's KVCacheManager that holds its elastic side: each refers to the other, so
# that a table here, even of weak keys, would keep both alive, and the engine in the ledger.
ELASTIC = "kvcached_patch_elastic"


def agree(agreement: Agreement | None) -> None:
    """Set what the scheduler that this process makes next is given; None: it is not elastic.

    What was agreed on before and no scheduler took, because the start failed, leaves the ledger.
    """
    global _agreed
    if _agreed is not None:
        _agreed.budget.close()
    _agreed = agreement


def elastic_of(scheduler: Any) -> Elastic | None:
    """The elastic side of a scheduler, None if its memory is not elastic."""
    return getattr(scheduler.kv_cache_manager, ELASTIC, None)


def manage(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``KVCacheManager.__init__``, made only by the scheduler: afterwards, adopt its queue."""
    global _agreed
    wrapped(*args, **kwargs)
    agreed, _agreed = _agreed, None
    if agreed is not None:
        finalize(manager, agreed.budget.close)
        setattr(manager, ELASTIC, Elastic(manager, agreed))


def allocate_slots(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``KVCacheManager.allocate_slots``: memory that cannot be had is a scheduling miss.

    After the first call the manager's attribute of that name is another: see `Elastic.admit`.
    """
    elastic = getattr(manager, ELASTIC, None)
    if elastic is None:
        manager.allocate_slots = wrapped
    else:
        elastic.admit(wrapped)
    return manager.allocate_slots(*args, **kwargs)


def schedule(
    wrapped: Callable[..., Any], scheduler: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Scheduler.schedule``: the plan travels as an attribute of the SchedulerOutput."""
    elastic = elastic_of(scheduler)
    if elastic is None:
        return wrapped(*args, **kwargs)
    elastic.begin()
    try:
        output = wrapped(*args, **kwargs)
    finally:
        elastic.end()
    setattr(output, PLAN, elastic.plan(waiting=scheduler.waiting))
    elastic.publish()
    return output
