"""The stand-in for the attention kernel computes what tpu-inference's own reference does."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.maxtext.kernels import ragged_paged_attention

PAGE, PAGES, SEQUENCES = 8, 3, 4


STEP = jax.jit(
    ragged_paged_attention, static_argnums=(0, 9, 10, 11), static_argnames="update_kv_cache"
)
# Of each sequence, all its tokens and those of this step.
BATCHES = {
    "prefill": ((5, 5), (9, 9), (7, 7)),
    "decode": ((6, 1), (20, 1)),
    "mixed": ((17, 3), (4, 4)),
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_it_is_the_reference(batch: tuple[tuple[int, int], ...], window: int | None) -> None:
    from tpu_inference.kernels.ragged_paged_attention.v3.kernel import ref_ragged_paged_attention

    keys = jax.random.split(jax.random.key(0), 4)
    tokens = sum(new for _, new in batch)
    q = jax.random.normal(keys[0], (tokens, 4, 16))
    k, v = (jax.random.normal(key, (tokens, 2, 16)) for key in keys[1:3])
    cache = jax.random.normal(keys[3], (1 + PAGES * SEQUENCES, PAGE, 4, 1, 128))
    cache = cache.at[..., 16:].set(0)
    spare = [0] * (SEQUENCES - len(batch))
    starts = np.cumsum([0, *(new for _, new in batch), *spare])
    blocks = np.random.default_rng(0).permutation(PAGES * SEQUENCES) + 1
    arrays = ([n for n, _ in batch] + spare, blocks, starts, [0, 0, len(batch)])
    given = [jnp.array(array, jnp.int32) for array in arrays]
    expected = ref_ragged_paged_attention(q, k, v, cache, *given, sliding_window=window)

    padded = [jnp.pad(each, [(0, 3), (0, 0), (0, 0)]) for each in (q, k, v)]
    out, updated = STEP(None, *padded, cache, *given, None, 1.0, window)
    np.testing.assert_allclose(out[:tokens], expected[0], atol=1e-5)
    np.testing.assert_array_equal(updated, expected[1])
    again, same = STEP(None, *padded, updated, *given, None, 1.0, window, update_kv_cache=False)
    np.testing.assert_allclose(again, out, atol=1e-5)
    np.testing.assert_array_equal(same, updated)
