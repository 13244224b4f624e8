"""What an engine has done since it started, in numbers that only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# Seconds; the upper bounds of the latency histogram's buckets, after which comes one without.
RELEASE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass
class Totals:
    """Counters of one engine.

    misses: scheduling misses. releases: how many plans let memory go, by the bucket that the time
    falls in until all workers have carried them out. release_ns: the sum of those times.
    """

    pages_committed: int = 0
    pages_released: int = 0
    misses: int = 0
    release_ns: int = 0
    releases: list[int] = field(default_factory=lambda: [0] * (len(RELEASE_BOUNDS) + 1))

    def released(self, seconds: float) -> None:
        """Count a plan whose releases are in force `seconds` after it was made."""
        self.releases[bisect_left(RELEASE_BOUNDS, seconds)] += 1
        self.release_ns += int(seconds * 1e9)

    def words(self) -> list[int]:
        """All numbers in a fixed order; see `of`."""
        singles = self.pages_committed, self.pages_released, self.misses, self.release_ns
        return [*singles, *self.releases]

    @classmethod
    def of(cls, words: Sequence[int]) -> Totals:
        """What `words` told."""
        committed, released, misses, release_ns, *releases = words
        return cls(committed, released, misses, release_ns, releases)
