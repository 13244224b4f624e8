"""Stand-ins for the TPU kernels: plain, traceable JAX that reads and writes the same caches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from tools.maxtext.weights import seeded_model


def ragged_paged_attention(
    mesh: Any,
    q: Array,
    k: Array,
    v: Array,
    kv_cache: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    distribution: Array,
    attention_sink: Array | None,
    sm_scale: float,
    attention_chunk_size: int | None = None,
    *scales: None,
    update_kv_cache: bool = True,
) -> tuple[Array, Array]:
    """``sharded_ragged_paged_attention``; without an update all K and V come from the cache."""
    tokens, heads, head_dim = q.shape
    blocks, page, *packed, padded_dim = kv_cache.shape
    kv_heads = packed[0] * packed[1] // 2
    capacity = page_indices.shape[0] // kv_lens.shape[0] * page
    sequence, position, live = _tokens(tokens, cu_q_lens, kv_lens, distribution)
    pages = page_indices.reshape(kv_lens.shape[0], -1)
    cache = kv_cache
    if update_kv_cache:
        pad = [(0, 0), (0, 0), (0, 0), (0, padded_dim - head_dim)]
        new = jnp.pad(jnp.stack([k, v], axis=2), pad).astype(cache.dtype)
        block = jnp.where(live, pages[sequence, position // page], blocks)
        new = new.reshape(tokens, *packed, padded_dim)
        cache = cache.at[block, position % page].set(new, mode="drop")
    held = cache[pages].reshape(kv_lens.shape[0], capacity, kv_heads, 2, padded_dim)
    keys, values = (held[:, :, :, i, :head_dim][sequence] for i in (0, 1))
    grouped = q.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("tgrd,tcgd->tgrc", grouped, keys) * sm_scale
    age = (position[:, None] - jnp.arange(capacity))[:, None, None, :]
    seen = age >= 0
    if attention_chunk_size is not None:
        seen &= age < attention_chunk_size
    logits = jnp.where(seen, logits, -jnp.inf)
    if attention_sink is not None:
        sink = jnp.broadcast_to(attention_sink.reshape(kv_heads, -1, 1), (*logits.shape[:3], 1))
        logits = jnp.concatenate([logits, sink], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :capacity]
    out = jnp.einsum("tgrc,tcgd->tgrd", weights, values).reshape(q.shape)
    return jnp.where(live[:, None, None], out, 0).astype(q.dtype), cache


def gated_sum(
    mixed_qkv: Array,
    b: Array,
    a: Array,
    conv_state: Array,
    recurrent_state: Array,
    conv_weight: Array,
    conv_bias: None,
    a_log: Array,
    dt_bias: Array,
    state_indices: Array,
    query_start_loc: Array,
    distribution: Array,
    seq_lens: Array,
    n_kq: int,
    n_v: int,
    d_k: int,
    d_v: int,
    kernel_size: int,
    **_: Any,
) -> tuple[tuple[Array, Array], Array]:
    """``run_jax_gdn_attention``, token by token: a gated sum of k·v, whose state is the request's.

    Not the delta rule; only its caches are what is tested.
    """
    tokens = mixed_qkv.shape[0]
    sequence, position, live = _tokens(tokens, query_start_loc, seq_lens, distribution)

    def step(states: tuple[Array, Array], token: tuple[Array, ...]) -> Any:
        conv, recurrent = states
        x, gate, decay, slot, at, is_live = token
        started = at > 0
        window = jnp.concatenate([conv[slot] * started, x[None].astype(conv.dtype)])
        mixed = jax.nn.silu(jnp.sum(window.astype(x.dtype).T * conv_weight[:, 0], axis=1))
        query, key, value = jnp.split(mixed, [n_kq * d_k, 2 * n_kq * d_k])
        query, key = (
            jnp.repeat(each.reshape(n_kq, d_k), n_v // n_kq, axis=0) for each in (query, key)
        )
        kept = jax.nn.sigmoid(decay + dt_bias - a_log)[:, None, None]
        added = jax.nn.sigmoid(gate)[:, None, None] * key[:, :, None]
        state = recurrent[slot] * started * kept + added * value.reshape(n_v, 1, d_v)
        out = jnp.einsum("hk,hkv->hv", query, state).reshape(-1)
        where = jnp.where(is_live, slot, conv.shape[0])
        states = (
            conv.at[where].set(window[1:], mode="drop"),
            recurrent.at[where].set(state.astype(recurrent.dtype), mode="drop"),
        )
        return states, out.astype(x.dtype)

    inputs = (mixed_qkv, b, a, state_indices[sequence], position, live)
    return jax.lax.scan(step, (conv_state, recurrent_state), inputs)


def fused_moe(
    hidden_states: Array, w1: Array, w2: Array, gating_output: Array, topk: int, **_: Any
) -> Array:
    """A mixture of experts without its kernel: every expert is run, the chosen ones are summed."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(gating_output, axis=-1), topk)
    gate, up = jnp.split(jnp.einsum("td,edf->tef", hidden_states, w1), 2, axis=-1)
    all_out = jnp.einsum("tef,efd->ted", jax.nn.silu(gate) * up, w2)
    chosen = jnp.take_along_axis(all_out, experts[..., None], axis=1)
    return jnp.sum(chosen * weights[..., None], axis=1).astype(hidden_states.dtype)


def _tokens(
    tokens: int, cu_q_lens: Array, kv_lens: Array, distribution: Array
) -> tuple[Array, Array, Array]:
    """Each token's sequence, its position there, and whether it is no padding."""
    token = jnp.arange(tokens)
    sequences = distribution[-1]
    ends = jnp.where(jnp.arange(kv_lens.shape[0]) < sequences, cu_q_lens[1:], tokens + 1)
    sequence = jnp.minimum(jnp.searchsorted(ends, token, side="right"), kv_lens.shape[0] - 1)
    live = (token < cu_q_lens[sequences]) & (sequence < sequences)
    length = cu_q_lens[sequence + 1] - cu_q_lens[sequence]
    position = kv_lens[sequence] - length + token - cu_q_lens[sequence]
    return sequence, jnp.where(live, position, 0), live


def install(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Put the stand-ins where MaxText's layers take the kernels from, and what else is a TPU's."""
    from jax.experimental.pallas import tpu as pltpu
    from maxtext.utils import maxtext_utils_nnx
    from tpu_inference import utils
    from tpu_inference.layers.common import attention_interface, fused_moe_gmm, gdn_attention
    from tpu_inference.models.common import compiler_options, model_loader

    replace(attention_interface, "sharded_ragged_paged_attention", ragged_paged_attention)
    replace(gdn_attention, "run_jax_gdn_attention", gated_sum)
    replace(fused_moe_gmm, "fused_moe_func", fused_moe)
    replace(maxtext_utils_nnx, "create_nnx_sharded_model", seeded_model)
    replace(utils, "hbm_usage_gb", lambda devices: [])
    replace(pltpu, "get_tpu_info", lambda: SimpleNamespace(num_lanes=128))  # MaxText <= 0.2.4
    for module in (compiler_options, model_loader):
        replace(module, "get_step_fn_compiler_options", dict)
