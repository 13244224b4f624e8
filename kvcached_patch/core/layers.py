"""Which layers own KV-cache storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvcached_patch.errors import LayerPlanError


@dataclass(frozen=True)
class LayerPlan:
    """How the layers of one worker (or of the scheduler) are served.

    owners: per KV cache group, in vLLM's order, the layers that own storage.
    aliases: sharing layer -> its target, an owner whose cache object it must be.
    """

    owners: tuple[tuple[str, ...], ...]
    aliases: Mapping[str, str]

    @property
    def pool_count(self) -> int:
        """Pools needed: layer i of every group overlays pool i (vLLM's hybrid layout)."""
        return max(map(len, self.owners), default=0)


def plan_layers(
    groups: Iterable[Sequence[str]],
    stored: Iterable[Collection[str]],
    *,
    runner_only: Collection[str] = (),
    sharing: Mapping[str, str] | None = None,
) -> LayerPlan:
    """Decide owners and aliases.

    groups: ``layer_names`` of each KV cache group. vLLM's worker appends sharing and
        encoder-only layers to them after the scheduler made its plan
        (``add_kv_sharing_layers_to_kv_cache_groups``), so a raw count is too big there.
    stored: the layer names of each storage descriptor (``KVCacheTensor.shared_by`` up to 0.28,
        ``.layers`` from 0.29).
    runner_only: the V1 runner's ``runner_only_attn_layers``: sharing and encoder-only layers.
    sharing: sharing layer -> target (``shared_kv_cache_layers``).

    Raises LayerPlanError, naming the layers, for a layer that is neither an owner nor
    runner-only nor sharing, for storage given to a layer that owns none or sits in no group,
    for a layer in two groups, for a target without a cache and for a chain of sharing.
    """
    sharing = dict(sharing or {})
    storeless = set(runner_only) | set(sharing)
    named = [tuple(names) for names in groups]
    stored_names = {name for names in stored for name in names}
    owners = tuple(tuple(n for n in names if n not in storeless) for names in named)

    counts = Counter(name for names in owners for name in names)
    owned = set(counts)
    _refuse("in more than one KV cache group", {n for n in owned if counts[n] > 1})
    _refuse(
        "neither an owner (no storage descriptor names it) nor runner-only nor sharing",
        owned - stored_names,
    )
    _refuse("given storage though it shares or needs none", stored_names & storeless)
    _refuse("given storage but in no KV cache group", stored_names - owned)

    chained = {f"{n} -> {t} -> {sharing[t]}" for n, t in sharing.items() if t in sharing}
    _refuse("a chain of sharing; a target must own its cache", chained)
    _refuse(
        "sharing a target that has no cache",
        {f"{n} -> {t}" for n, t in sharing.items() if t not in owned},
    )
    return LayerPlan(owners=owners, aliases=sharing)


def alias_sharing(caches: dict[str, object], aliases: Mapping[str, str]) -> None:
    """Make each sharing layer's cache its target's very object, in place."""
    _refuse(
        "sharing a target that was not bound",
        {f"{n} -> {t}" for n, t in aliases.items() if t not in caches},
    )
    caches.update({name: caches[target] for name, target in aliases.items()})


def _refuse(why: str, layers: Collection[str]) -> None:
    if layers:
        raise LayerPlanError(f"KV cache layers {why}: {', '.join(sorted(layers))}")
