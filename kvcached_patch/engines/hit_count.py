"""How often the prefix cache was asked, and hit."""

from __future__ import annotations

from typing import Any


class HitCount:
    """vLLM's own prefix-cache counters, which it starts anew after each step, added up.

    queries, hits: tokens; 0 while vLLM keeps no statistics.
    """

    def __init__(self) -> None:
        self.queries = self.hits = 0
        self._stats: Any = None
        self._seen = (0, 0)

    def note(self, stats: Any) -> None:
        """Count what was added to `stats`, a ``PrefixCacheStats`` or None, since the last look."""
        if stats is None:
            return
        before = self._seen if stats is self._stats else (0, 0)
        self._stats, self._seen = stats, (stats.queries, stats.hits)
        self.queries += stats.queries - before[0]
        self.hits += stats.hits - before[1]
