"""One engine's standing with the shared ledger, counted in slabs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from kvcached_patch import config
from kvcached_patch.core.sizes import format_bytes
from kvcached_patch.core.totals import Totals
from kvcached_patch.errors import ConfigError
from kvcached_patch.ledger import Account, Ledger, LedgerError, ledger_path

T = TypeVar("T")
logger = logging.getLogger("vllm.kvcached_patch")

# Slabs reserved ahead that a bounded engine may keep without using them.
SPARE_SLABS = 4
# How long a device that refused memory is taken to have no more than engines hold.
REFUSED_SECONDS = 5.0


@dataclass(frozen=True)
class Geometry:
    """What the workers on one device agreed on.

    block_bytes: of one block, in all their pools together. least_slabs: what one request of the
    greatest length needs. in_flight: plans whose releases may not be in force yet.
    reserved_bytes: of all their ranges. page_bytes: of all the pages that a slab may need, where
    pages are counted; else 0. slab_pages: how many those are. device: whose ledger it is; None if
    it is on another machine.
    """

    slab_blocks: int
    block_bytes: int
    least_slabs: int = 1
    in_flight: int = 1
    reserved_bytes: int = 0
    model: str = ""
    page_bytes: int = 0
    slab_pages: int = 1
    device: str | None = "host"

    @property
    def slab_bytes(self) -> int:
        """Of one slab, in all pools together."""
        return self.page_bytes or self.slab_blocks * self.block_bytes


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
        self._block_bytes = geometry.block_bytes
        self._slab_pages = geometry.slab_pages
        self._least = geometry.least_slabs
        self._generation = -2
        self.fair: int | None = None  # slabs, as the ledger had it when `share` last asked
        self.keep: int | None = None  # the same for what the prefix cache may add to
        self.asked = 0  # the ledger's request to trim, as `share` saw it; 0: none
        self._wanted = 0
        self._faulty = False
        self.held = 0

    @property
    def changed(self) -> bool:
        """Whether limits, the budget or demands changed since `share` last asked; takes no lock."""
        return self._outdated or self._generation_now != self._generation

    def share(self, *, cached: int = 0) -> int | None:
        """Slabs that may be in use now; None if nothing bounds them.

        cached: blocks that only this engine's prefix cache keeps.

        Never fewer than one request of the greatest length needs, which else would wait for ever;
        `fair` is the share without that.
        """
        generation = self._generation_now
        if generation != self._generation or self._outdated:
            self._generation = generation
            share = self._ask(lambda account: account.share(), None)
            self._ask(lambda account: account.publish(cached=cached * self._block_bytes), None)
            keep = self._ask(lambda account: account.keep(), None)
            self.fair = None if share is None else share // self._slab_bytes
            self.keep = None if keep is None else keep // self._slab_bytes
            self.asked = self._ask(lambda account: account.asked, 0)
        return self.bound

    @property
    def _generation_now(self) -> int:
        return self._ask(lambda account: account.generation, self._generation)

    @property
    def _outdated(self) -> bool:
        """Whether what the device has is to be found out anew."""
        until = 0 if self._account is None else self._account.until
        return bool(until) and time.monotonic_ns() >= until

    def refused(self) -> None:
        """The device has no more, whatever limit and budget say."""
        self._ask(lambda account: account.refused(REFUSED_SECONDS), None)

    @property
    def bound(self) -> int | None:
        """What `share` last said."""
        return None if self.fair is None else max(self.fair, self._least)

    @property
    def must_yield(self) -> bool:
        """Whether the budget is too small for all that want, and others come first."""
        short = self.fair is not None and self.fair < self._least
        return short and not self._ask(lambda account: account.first_in_line(), True)

    def reserve(self, slabs: int) -> bool:
        """Hold more slabs, if limit and budget allow."""
        wanted = (self.held + slabs) * self._slab_bytes
        if not self._ask(lambda account: account.reserve(max(wanted - account.committed, 0)), True):
            return False
        self.held += slabs
        return True

    def hold(self, slabs: int) -> None:
        """Count slabs that are committed already, whatever limit and budget say."""
        self.held += slabs
        held = self.held * self._slab_bytes
        self._ask(lambda account: account.hold(max(held - account.committed, 0)), None)

    def release(self, slabs: int) -> None:
        """Hold fewer slabs."""
        self.held -= slabs
        left = self.held * self._slab_bytes
        self._ask(lambda account: account.release(max(account.committed - left, 0)), None)

    def want(self, slabs: int) -> None:
        """Tell other engines what this one lacks; 0: nothing."""
        if slabs != self._wanted and self._ask(partial(_want, slabs * self._slab_bytes), False):
            self._wanted = slabs

    def trimmed(self, request: int) -> None:
        """Answer what was `asked`, but for what is later than `request`."""
        if 0 < self.asked <= request:
            self.asked = 0
            self._ask(lambda account: account.trimmed(request), None)

    def publish(self, *, cached: int, free: int, queries: int, hits: int, totals: Totals) -> None:
        """Publish statistics, with a heartbeat.

        cached, free: blocks. queries, hits: tokens of the prefix cache. totals: counted in slabs.
        """
        size = self._block_bytes
        self._ask(
            lambda account: account.publish(
                cached=cached * size,
                free=free * size,
                queries=queries,
                hits=hits,
                totals=totals.in_pages(self._slab_pages),
            ),
            None,
        )

    def close(self) -> None:
        """Leave the ledger."""
        self._ask(lambda account: account.close(), None)
        self._account = None

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


def _want(nbytes: int, account: Account) -> bool:
    account.want(nbytes)
    return True


def join(geometry: Geometry) -> Budget:
    """Enter this engine in the ledger of its device, by the last part of its model's name.

    A device of another machine has no ledger here; nothing is bounded there.

    Raises LedgerError if the ledger cannot be used though a limit or a budget was asked for,
    ConfigError if the memory allowed cannot hold one request of the greatest length: such a
    request would wait for ever.
    """
    if geometry.device is None:
        logger.warning("kvcached-patch: running without the shared ledger on other machines")
        return Budget(None, geometry)
    settings = config.load()
    asked = settings.limit is not None or settings.budget is not None
    least = geometry.least_slabs * geometry.slab_bytes
    _check(f"{config.LIMIT}={config.raw(config.LIMIT)!r}", settings.limit, least)
    _check(f"{config.BUDGET}={config.raw(config.BUDGET)!r}", settings.budget, least)
    try:
        ledger = Ledger(ledger_path(config.ledger_dir(), geometry.device))
        if settings.budget is not None:
            _set_budget(ledger, settings.budget)
        total = ledger.total
        account = ledger.join(
            Path(geometry.model).name or "engine",
            model=geometry.model,
            reserved=geometry.reserved_bytes,
            limit=settings.limit,
            least=least,
        )
    except LedgerError as error:
        if asked:
            raise
        logger.warning("kvcached-patch: running without the shared ledger: %s", error)
        return Budget(None, geometry)
    budget = Budget(account, geometry)
    try:
        _check("the budget in force (`kvcached-patch limit --total`)", total, least)
    except ConfigError:
        budget.close()
        raise
    return budget


def _check(what: str, nbytes: int | None, least: int) -> None:
    if nbytes is not None and nbytes < least:
        raise ConfigError(
            f"{what}: {format_bytes(nbytes)} is too small for one request of max_model_len; "
            f"expected at least {least} bytes ({format_bytes(least)}), or a lower max_model_len"
        )


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
