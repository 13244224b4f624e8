"""The KV caches of many layers in one array, where each layer's pages are a part of it.

A layer finds its own by its block table, moved on by the pages of the layers before it; a mesh
that shards the pages has in each shard a part of every layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvcached_patch.core.pool_plan import PoolPlan
from kvcached_patch.errors import LayerPlanError
from kvcached_patch.jax.layer_caches import LayerCaches
from kvcached_patch.jax.scan import Supply


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pool:
    """An entry of the runner's list of caches, of the layers that the index map says, in order.

    cache: ``[layers x pages, …]``, or a tuple of such (states of a GDN layer). shards: in how many
    parts the mesh splits the pages, of each layer alike. How many pages there are is no part of
    the pytree's structure: tpu-inference knows a step function again by its caches' shardings only.
    """

    cache: Any
    shards: int = dataclasses.field(metadata={"static": True})

    def pages(self, layers: int) -> int:
        """Of each of so many layers, in one shard."""
        return int(jax.tree.leaves(self.cache)[0].shape[0]) // self.shards // layers


def pooled(caches: Sequence[Any], plan: PoolPlan) -> list[Pool]:
    """Put empty pools in the place of the layers' empty caches.

    All of these are deleted before the first pool is made: a pool is one piece of memory, and what
    is left of caches that lay among others is not.
    """
    makers = [_maker([caches[layer] for layer in layers]) for layers in plan.pools]
    for leaf in jax.tree.leaves(list(caches)):
        leaf.delete()
    return [make() for make in makers]


def _maker(caches: Sequence[Any]) -> Callable[[], Pool]:
    """What makes the pool of these caches, once they are gone."""
    leaves, structure = jax.tree.flatten(caches[0])
    shapes = [(len(caches) * leaf.shape[0], *leaf.shape[1:]) for leaf in leaves]
    dtypes, shardings = ([getattr(leaf, of) for leaf in leaves] for of in ("dtype", "sharding"))
    shards = leaves[0].shape[0] // shardings[0].shard_shape(leaves[0].shape)[0]

    def zeros() -> list[jax.Array]:
        return list(map(jnp.zeros, shapes, dtypes))

    def make() -> Pool:
        return Pool(
            jax.tree.unflatten(structure, jax.jit(zeros, out_shardings=shardings)()), shards
        )

    return make


def pages_of(cache: Any) -> str:
    """What the caches of two layers must have in common to be of one pool.

    Raises LayerPlanError if a layer's states do not have the same number of pages in a shard.
    """
    leaves = jax.tree.leaves(cache)
    found = ", ".join(
        f"{leaf.dtype}{list(leaf.shape)} over {leaf.sharding.spec}" for leaf in leaves
    )
    if len(_pages(leaves)) != 1:
        raise LayerPlanError(f"the states of a layer differ in the number of their pages: {found}")
    return found


def _pages(leaves: Sequence[jax.Array]) -> set[int]:
    """How many each has in a shard."""
    return {leaf.sharding.shard_shape(leaf.shape)[0] for leaf in leaves}


def moved(metadata: Any, pages: Any) -> Any:
    """Attention metadata of a layer whose pages begin so many into its pool."""
    states = getattr(metadata, "mamba_state_indices", None)
    tables = getattr(metadata, "block_tables", None)
    return dataclasses.replace(
        metadata,
        **({} if tables is None else {"block_tables": tables + pages}),
        **({} if states is None else {"mamba_state_indices": states + pages}),
    )


class PooledCaches(LayerCaches):
    """Supplies by layer; all layers of a pool have the pool itself for a cache.

    What is written must come of the pool as it is: of several layers that were read together only
    one can be written, and the next one is an error.
    """

    def __init__(
        self, caches: Sequence[Any], slots: Sequence[int], metadata: Sequence[Any]
    ) -> None:
        """`slots` and attention `metadata` are by layer; each layer's slot must be a pool.

        layers: by slot, in the order of their first ones.
        """
        self.layers: dict[int, list[int]] = {}
        for layer, slot in enumerate(slots):
            if not isinstance(caches[slot], Pool):
                raise LayerPlanError(f"KV cache map: layer.{layer}: slot {slot} is no pool")
            self.layers.setdefault(slot, []).append(layer)
        super().__init__([c.cache if isinstance(c, Pool) else c for c in caches], slots)
        self.metadata = tuple(metadata)
        self._by_slot = list(caches)
        self._versions = dict.fromkeys(slots, 0)
        self._read: dict[int, int] = {}
        self._ran: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        """Read one layer's supply, or those of a slice of layers.

        They are made here: a scan reads none, and needs no metadata of every layer in its trace.
        """
        if isinstance(index, slice):
            return [self[layer] for layer in range(len(self))[index]]
        layer = self._layer(index)
        slot = self.slots[layer]
        self._read[layer] = self._versions[slot]
        pages = self.layers[slot].index(layer) * self.pages(slot)
        return Supply(super().__getitem__(layer), moved(self.metadata[layer], pages))

    def __iter__(self) -> Iterator[Supply]:
        """Read the layers' supplies one by one."""
        return (self[layer] for layer in range(len(self)))

    def pool(self, slot: int) -> Pool:
        """A slot's pool as it is now."""
        cache = super().__getitem__(self.layers[slot][0])
        return dataclasses.replace(self._by_slot[slot], cache=cache)

    def pages(self, slot: int) -> int:
        """Of each layer of a slot's pool, in one shard."""
        return self._by_slot[slot].pages(len(self.layers[slot]))

    def store(self, cache: Any, layers: Sequence[int]) -> None:
        """Replace a pool's cache, after these of its layers have run."""
        slot = self._take(layers[0], cache)
        self._ran.update(layers)
        self._versions[slot] += 1
        for other in self.layers[slot]:
            list.__setitem__(self, other, cache)

    def unwritten(self) -> list[int]:
        """The layers that have not run: each writes the pool, not for the others."""
        return [layer for layer in range(len(self)) if layer not in self._ran]

    def by_slot(self) -> list[Any]:
        """The runner's list of caches."""
        return [
            self.pool(slot) if slot in self.layers else cache
            for slot, cache in enumerate(self._by_slot)
        ]

    def _write(self, layer: int, supply: Any) -> None:
        if isinstance(supply, Supply) and supply.cache is super().__getitem__(layer):
            return
        slot = self.slots[layer]
        if self._read.get(layer) != self._versions[slot]:
            raise LayerPlanError(
                f"KV cache of layer.{layer}: another layer of its pool was written since it was "
                "read. Unset KVCACHED_PATCH_SCAN to serve this model"
            )
        self.store(supply.cache if isinstance(supply, Supply) else supply, [layer])
