"""Seeded weights: compiling MaxText's own initialiser takes longer than all else in the lane."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

STD = 0.25  # with fans of 16 to 64 hidden states keep their size, and attention is not uniform


def seeded_model(abstract_model: Any, init_fn: Any, mesh: Any = None, **_: Any) -> Any:
    """``maxtext_utils_nnx.create_nnx_sharded_model``: the weights a name and a shape decide."""
    graphdef, abstract = nnx.split(abstract_model)
    random = np.random.default_rng(0)

    def value(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0), leaf.shape or 1).reshape(leaf.shape)
        drawn = random.normal(0, STD, leaf.shape)
        if "scale" in jax.tree_util.keystr(path):
            drawn += 1
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            drawn = np.zeros(leaf.shape)
        return jax.device_put(drawn.astype(leaf.dtype), leaf.sharding)

    return nnx.merge(graphdef, jax.tree_util.tree_map_with_path(value, abstract))
