"""tpu-inference's fused decode loop carries the caches through a ``while_loop``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.jax.conftest import Serve
from tools.maxtext.decoding import PROMPTS

STEPS = 5


def greedy(rng: Any, mesh: Any, logits: jax.Array, *_: Any, **__: Any) -> Any:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), logits


@pytest.mark.parametrize(
    ("name", "scan"),
    [("gemma4-e2b", "layers"), ("olmo3-scanned", "layers"), ("olmo3-scanned", "pool")],
)
def test_it_decodes_what_single_steps_decode(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, name: str, scan: str
) -> None:
    from tpu_inference.runner import decode_loop

    for options in ("get_step_fn_compiler_options", "get_sampling_compiler_options"):
        monkeypatch.setattr(decode_loop, options, dict)
    served = serve(name, scan)
    interface = served.interface
    prefill = [(r, range(n)) for r, n in enumerate(PROMPTS)]
    single, hidden, *_ = served.step(served.caches(), prefill)
    fused, *_ = served.step(served.caches(), prefill)

    def choose(hidden: jax.Array, rows: list[int]) -> list[int]:
        logits = interface.compute_logits_fn(interface.state_leaves, hidden, None)
        return np.asarray(greedy(None, None, logits)[0])[rows].tolist()

    first = choose(hidden, [PROMPTS[0] - 1, sum(PROMPTS) - 1])
    ids, chosen = first, []
    for i in range(STEPS):
        batch = [(r, range(n + i, n + i + 1)) for r, n in enumerate(PROMPTS)]
        single, hidden, *_ = served.step(single, batch, ids=ids)
        ids = choose(hidden, [0, 1])
        chosen.append(ids)

    metadata = served.metadata([(r, range(n, n + 1)) for r, n in enumerate(PROMPTS)])
    metadata.input_positions = metadata.input_positions[: len(PROMPTS)]
    tokens, fused, *_ = decode_loop.continue_decode(
        interface.state_leaves,
        interface.model.step_fn_no_options,
        interface.compute_logits_fn,
        greedy,
        decode_loop.TpuSamplingState(
            jnp.array(first, jnp.int32), jnp.array([True, True]), metadata, jnp.array(0)
        ),
        fused,
        STEPS,
        STEPS,
        (-1,),
        0,
        jax.random.key(0),
        mesh=served.mesh,
        sampling_metadata=None,
        layer_name_to_kvcache_index=tuple(served.index_map.items()),
    )
    assert np.asarray(tokens).tolist() == chosen
    for one, other in zip(jax.tree.leaves(single), jax.tree.leaves(fused), strict=True):
        scale = float(jnp.abs(one).max())
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * scale)
