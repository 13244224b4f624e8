"""What an engine on the GPU holds, looked at from outside."""

from __future__ import annotations

import time

from kvcached_patch import api


def committed() -> int:
    """Bytes that all engines hold."""
    return sum(engine.committed_bytes for engine in api.engines())


def left() -> int:
    """The least bytes that they hold in the seconds after the last answer."""
    found = [committed()]
    for _ in range(50):
        time.sleep(0.1)
        found.append(committed())
    return min(found)
