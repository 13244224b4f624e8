"""Which slot of the runner's cache list each decoder layer uses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kvcached_patch.errors import LayerPlanError

IndexMap = Mapping[str, int] | Iterable[tuple[str, int]]

_LAYER = re.compile(r"layer\.(0|[1-9][0-9]*)")


def resolve(index_map: IndexMap | None, num_slots: int) -> tuple[int, ...] | None:
    """Slot of each decoder layer, in layer order; None if the map names no layer: positional.

    index_map: tpu-inference's ``layer_name_to_kvcache_index``, or its items. Only ``layer.{i}``
    is a decoder layer; drafts (``draft_layer.{i}``) and auxiliary caches are not ours to place.

    Raises LayerPlanError naming the entry and what was expected.
    """
    if index_map is None:
        return None
    found: dict[int, int] = {}
    for name, slot in index_map.items() if isinstance(index_map, Mapping) else index_map:
        match = _LAYER.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            continue
        if type(slot) is not int or not 0 <= slot < num_slots:
            raise LayerPlanError(
                f"KV cache map: {name!r}: {slot!r}: expected an integer of the {num_slots} slots "
                f"0..{num_slots - 1}"
            )
        if found.setdefault(int(match[1]), slot) != slot:
            raise LayerPlanError(
                f"KV cache map: {name!r}: {slot!r}: expected one slot, found another before: "
                f"{found[int(match[1])]}"
            )
    first_missing = next(i for i in range(len(found) + 1) if i not in found)
    if first_missing < len(found):
        raise LayerPlanError(
            f"KV cache map: no entry for layer.{first_missing}; expected layer.0 to "
            f"layer.{max(found)} without a gap"
        )
    return tuple(found[i] for i in range(len(found))) or None
