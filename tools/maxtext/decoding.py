"""Prefill, then decode step by step, against one prefill of everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tools.maxtext.served import Cache, Served, permuted

PROMPTS = (9, 12)  # tokens of two requests, whose blocks lie between each other
STEPS = 8


@dataclass(frozen=True)
class Decoded:
    """Largest difference from the full prefill, scale of the hidden states, and the caches.

    hidden: what each of the steps gave, the full prefill first.
    """

    delta: float
    scale: float
    caches: list[Cache]
    hidden: list[Any]


def decode(served: Served, index_map: dict[str, int] | None = None, order: Any = None) -> Decoded:
    """Decode two requests; `order` is where each slot of the manager's list lies instead."""
    given = {} if index_map is None else {"index_map": tuple(index_map.items())}

    def caches() -> list[Cache]:
        empty = served.caches()
        return empty if order is None else [empty[order.index(slot)] for slot in range(len(order))]

    whole = [(r, range(n + STEPS)) for r, n in enumerate(PROMPTS)]
    expected = np.asarray(served.step(caches(), whole, **given)[1])
    rows = dict(zip(_tokens(whole), expected, strict=False))
    held, delta, seen = caches(), 0.0, [expected]
    batches = [[(r, range(n)) for r, n in enumerate(PROMPTS)]]
    batches += [[(r, range(n + i, n + i + 1)) for r, n in enumerate(PROMPTS)] for i in range(STEPS)]
    for batch in batches:
        held, hidden, *_ = served.step(held, batch, **given)
        seen.append(np.asarray(hidden))
        for at, row in zip(_tokens(batch), seen[-1], strict=False):
            delta = max(delta, float(np.abs(row - rows[at]).max()))
    return Decoded(delta, float(np.abs(expected).max()), held, seen)


def decode_permuted(served: Served, seed: int = 1) -> tuple[Decoded, list[int]]:
    """Decode with the slots shuffled; also the new place of each slot."""
    index_map, order = permuted(served.index_map, len(served.caches()), seed)
    return decode(served, index_map, order), order


def written(caches: list[Cache]) -> list[bool]:
    """Which of these caches hold anything: each leaf of them."""
    return [all(bool(np.any(leaf)) for leaf in jax.tree.leaves(cache)) for cache in caches]


def _tokens(batch: list[tuple[int, range]]) -> list[tuple[int, int]]:
    return [(request, position) for request, span in batch for position in span]
