"""One engine's standing with the shared ledger, counted in slabs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcached_patch import config
from kvcached_patch.core.sizes import format_bytes
from kvcached_patch.ledger import Account, Ledger, LedgerError, ledger_path

T = TypeVar("T")
logger = logging.getLogger("vllm.kvcached_patch")

# Slabs reserved ahead that a bounded engine may keep without using them.
SPARE_SLABS = 4


@dataclass(frozen=True)
class Geometry:
    """What the workers agreed on.

    block_bytes: of one block, in all their pools together. least_slabs: what one request of the
    greatest length needs. reserved_bytes: of all their ranges.
    """

    slab_blocks: int
    block_bytes: int
    least_slabs: int = 1
    reserved_bytes: int = 0
    model: str = ""

    @property
    def slab_bytes(self) -> int:
        """Of one slab, in all pools together."""
        return self.slab_blocks * self.block_bytes


class Budget:
    """Keeps an account in step with what the free queue has committed.

    held: slabs reserved in the ledger. An engine does not die of its ledger, nor do its requests
    wait for it: a fault is said once, and until it is over nothing is bounded. The account follows
    at the first call after it.
    """

    def __init__(self, account: Account | None, geometry: Geometry) -> None:
        """`account` is None if there is no ledger to be had."""
        self._account = account
        self._slab_bytes = geometry.slab_bytes
        self._least = geometry.least_slabs
        self._generation = -2
        self._share: int | None = None
        self._faulty = False
        self.held = 0

    @property
    def changed(self) -> bool:
        """Whether limits, the budget or demands changed since `share` last asked; takes no lock."""
        return self._ask(lambda account: account.generation, self._generation) != self._generation

    def share(self) -> int | None:
        """Slabs that may be held now; None if nothing bounds them.

        Never fewer than one request of the greatest length needs, which else would wait for ever.
        """
        if self.changed:
            self._generation = self._ask(lambda account: account.generation, self._generation)
            share = self._ask(lambda account: account.share(), None)
            self._share = None if share is None else max(share // self._slab_bytes, self._least)
        return self._share

    def reserve(self, slabs: int) -> bool:
        """Hold more slabs, if limit and budget allow."""
        wanted = (self.held + slabs) * self._slab_bytes
        if not self._ask(lambda account: account.reserve(max(wanted - account.committed, 0)), True):
            return False
        self.held += slabs
        return True

    def release(self, slabs: int) -> None:
        """Hold fewer slabs."""
        self.held -= slabs
        left = self.held * self._slab_bytes
        self._ask(lambda account: account.release(max(account.committed - left, 0)), None)

    def want(self, slabs: int) -> None:
        """Tell other engines what this one lacks; 0: nothing."""
        self._ask(lambda account: account.want(slabs * self._slab_bytes), None)

    def publish(self, *, cached: int, free: int) -> None:
        """Publish statistics in bytes, with a heartbeat."""
        self._ask(lambda account: account.publish(cached=cached, free=free), None)

    def _ask(self, question: Callable[[Account], T], otherwise: T) -> T:
        if self._account is None:
            return otherwise
        try:
            answer = question(self._account)
        except LedgerError as error:
            if not self._faulty:
                logger.warning("kvcached-patch: unbounded, the ledger cannot be used: %s", error)
            self._faulty = True
            return otherwise
        self._faulty = False
        return answer


def join(geometry: Geometry) -> Budget:
    """Enter this engine in the ledger of host memory, by the last part of its model's name.

    Raises LedgerError if the ledger cannot be used though a limit or a budget was asked for.
    """
    settings = config.load()
    name = Path(geometry.model).name or "engine"
    try:
        ledger = Ledger(ledger_path(config.ledger_dir(), "host"))
        if settings.budget is not None:
            _set_budget(ledger, settings.budget)
        account = ledger.join(
            name, model=geometry.model, reserved=geometry.reserved_bytes, limit=settings.limit
        )
    except LedgerError as error:
        if settings.limit is not None or settings.budget is not None:
            raise
        logger.warning("kvcached-patch: running without the shared ledger: %s", error)
        return Budget(None, geometry)
    return Budget(account, geometry)


def _set_budget(ledger: Ledger, nbytes: int) -> None:
    """The first engine sets the budget; later ones must not undo what was set live."""
    if ledger.total is None or not any(engine.alive for engine in ledger.engines()):
        ledger.set_total(nbytes)
    elif ledger.total != nbytes:
        logger.warning(
            "kvcached-patch: %s=%s is not applied: running engines share a budget of %s; change it "
            "with `kvcached-patch limit --total`",
            config.BUDGET,
            format_bytes(nbytes),
            format_bytes(ledger.total),
        )
