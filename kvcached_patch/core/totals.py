"""What an engine has done since it started, in numbers that only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

# Seconds; the upper bounds of the latency histogram's buckets, after which comes one without.
RELEASE_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


@dataclass
class Totals:
    """Counters of one engine.

    committed, released: pages, or slabs until `in_pages`. misses: scheduling misses. releases: how
    many plans let memory go, by the bucket that the time falls in until all workers have carried
    them out. release_ns: the sum of those times.
    """

    committed: int = 0
    released: int = 0
    misses: int = 0
    release_ns: int = 0
    releases: list[int] = field(default_factory=lambda: [0] * (len(RELEASE_BOUNDS) + 1))

    def count_release(self, slabs: int, seconds: float) -> None:
        """Count what a plan let go, which is in force `seconds` after the plan was made."""
        self.released += slabs
        self.releases[bisect_left(RELEASE_BOUNDS, seconds)] += 1
        self.release_ns += int(seconds * 1e9)

    def in_pages(self, slab_pages: int) -> Totals:
        """The same with the pages of so many slabs."""
        committed, released = self.committed * slab_pages, self.released * slab_pages
        return replace(self, committed=committed, released=released)

    def words(self) -> list[int]:
        """All numbers in a fixed order; see `of`."""
        return [self.committed, self.released, self.misses, self.release_ns, *self.releases]

    @classmethod
    def of(cls, words: Sequence[int]) -> Totals:
        """What `words` told."""
        committed, released, misses, release_ns, *releases = words
        return cls(committed, released, misses, release_ns, releases)
