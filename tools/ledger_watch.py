# SPDX-License-Identifier: Apache-2.0
"""Sample what engines hold of their shared budget while they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

from kvcached_patch.config import ledger_dir
from kvcached_patch.ledger import Ledger, ledger_path
from tools.engine_serve import Served, session_of

SAMPLE_SECONDS = 0.05


class LedgerWatch:
    """As a context manager: `samples` grows by (time, bytes committed by each engine).

    Each sample is one look at the ledger, so that its sum is what was held at that moment.
    """

    def __init__(self, runtime: Path, engines: Sequence[Served]) -> None:
        """`runtime`: XDG_RUNTIME_DIR of the engines."""
        self._ledger = Ledger(ledger_path(ledger_dir({"XDG_RUNTIME_DIR": str(runtime)}), "host"))
        self._sessions = [engine.process.pid for engine in engines]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.samples: list[tuple[float, tuple[int, ...]]] = []

    def __enter__(self) -> LedgerWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def held(self) -> tuple[int, ...]:
        """Bytes that each engine has committed now."""
        held = {
            session_of(record.pid): record.committed
            for record in self._ledger.engines()
            if record.alive
        }
        return tuple(held.get(session, 0) for session in self._sessions)

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            held = self.held()
            self.samples.append((time.monotonic(), held))
