# SPDX-License-Identifier: Apache-2.0
"""Seeded traces of requests for several engines.

Times are in units of the time that a full batch takes (`colocation.unit`), so that a trace means
the same load on any machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SEED = 1
PROMPT_TOKENS, OUTPUT_TOKENS = (500, 700), (100, 200)
# Lengths in units, requests per unit.
PEAK_LENGTH, PEAK_RATE, QUIET_RATE = 16.0, 6.0, 0.3
CONSTANT_LENGTH, CONSTANT_RATE = 8.0, 1.0


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, to which engine, how many tokens long it and its answer are."""

    time: float
    engine: int
    prompt: int
    output: int

    def tokens(self, run: str) -> list[int]:
        """Its prompt, another one in every run: nothing of it is in a prefix cache."""
        rng = random.Random(f"{SEED} {run} {self}")
        return [rng.randrange(4, 500) for _ in range(self.prompt)]


def intermittent(engines: int, scale: float) -> list[Arrival]:
    """Poisson arrivals; each engine has its peak while the others have little to do."""
    rng = random.Random(SEED)
    length = PEAK_LENGTH * scale
    found = []
    for engine in range(engines):
        for turn in range(engines):
            rate = PEAK_RATE if turn == engine else QUIET_RATE
            time = rng.expovariate(rate)
            while time < length:
                found.append(_arrival(rng, turn * length + time, engine))
                time += rng.expovariate(rate)
    return sorted(found, key=lambda arrival: arrival.time)


def constant(engines: int, scale: float) -> list[Arrival]:
    """The same load on all engines all the time, evenly spaced, one engine after the other."""
    rng = random.Random(SEED)
    every = 1 / (CONSTANT_RATE * engines)
    count = max(round(CONSTANT_LENGTH * scale / every), engines)
    return [_arrival(rng, n * every, n % engines) for n in range(count)]


def _arrival(rng: random.Random, time: float, engine: int) -> Arrival:
    return Arrival(round(time, 3), engine, rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS))
