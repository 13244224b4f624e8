"""The seam of EngineCore's input queue: plans for an engine that has gone quiet."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, ref

from kvcached_patch.engines.elastic import Elastic
from kvcached_patch.engines.vllm_scheduler import elastic_of
from kvcached_patch.engines.vllm_worker import TIMEOUT_SECONDS, apply_idle_plan

# How soon the engine may notice, once quiet, that something has become due.
TICK_SECONDS = 0.05


class IdleWatch:
    """Wakes a quiet EngineCore when a plan has become due.

    After the last request vLLM runs one empty step and then blocks on its input queue, where
    retention and limits would never take effect. A thread looks at a clock (never at the
    scheduler's state beyond one number) and puts vLLM's own WAKEUP into that queue; the work is
    done by EngineCore's main thread.
    """

    def __init__(self, core: Any, elastic: Elastic, wakeup: Any) -> None:
        """Watch `core`, an ``EngineCoreProc``, for as long as it exists."""
        self._core = ref(core)
        self.wakeup = wakeup
        self.elastic = elastic
        self.due: float | None = None
        self._look = threading.Event()
        threading.Thread(target=self._run, name="kvcached-patch-idle", daemon=True).start()

    def arm(self) -> None:
        """Called by the main thread when the engine may go quiet."""
        self.due = self.elastic.due()
        self._look.set()

    def _run(self) -> None:
        while True:
            self._look.wait()
            self._look.clear()
            core = self._core()
            if core is None:
                return
            del core
            while (due := self._next()) > time.monotonic():
                if self._look.wait(min(due - time.monotonic(), TICK_SECONDS)):
                    self._look.clear()
            core = self._core()
            if core is None:
                return
            core.input_queue.put_nowait((self.wakeup, self))
            del core

    def _next(self) -> float:
        """When to wake EngineCore: now if the ledger has changed."""
        if self._core() is None or self.elastic.budget.changed:
            return 0.0
        return math.inf if self.due is None else self.due


_watches: WeakKeyDictionary[Any, IdleWatch] = WeakKeyDictionary()


def process_input_queue(
    wrapped: Callable[..., Any], core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``EngineCoreProc._process_input_queue``: where EngineCore waits when it has no work."""
    watch = _watch_of(core)
    if watch is not None and not _schedules(core):
        watch.arm()
    return wrapped(*args, **kwargs)


def handle_client_request(
    wrapped: Callable[..., Any], core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``EngineCoreProc._handle_client_request``: a WAKEUP while quiet carries out what is due."""
    result = wrapped(*args, **kwargs)
    watch = _watches.get(core)
    if watch is not None and core.is_running() and not _schedules(core):
        if args[1] is watch:  # not the WAKEUP of a shutdown, whose workers may be gone
            plan = watch.elastic.plan(quiet=True)
            core.model_executor.collective_rpc(apply_idle_plan, TIMEOUT_SECONDS, args=(plan,))
            watch.elastic.applied()
        watch.arm()  # the request may have been to reset the prefix cache
    return result


def _schedules(core: Any) -> bool:
    """Whether steps of its own bring plans to the workers.

    Not `has_work`: a data-parallel rank without requests runs along with the others, by
    `execute_dummy_batch`, which brings none.
    """
    return bool(core.scheduler.has_requests() or core.batch_queue)


def _watch_of(core: Any) -> IdleWatch | None:
    watch = _watches.get(core)
    if watch is None and (elastic := elastic_of(core.scheduler)) is not None:
        from vllm.v1.engine import EngineCoreRequestType

        watch = _watches[core] = IdleWatch(core, elastic, EngineCoreRequestType.WAKEUP)
    return watch
