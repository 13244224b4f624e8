"""Where the runner's caches become pools: after tpu-inference has laid them out by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from kvcached_patch import config
from kvcached_patch.core.pool_plan import PoolPlan, plan_pools
from kvcached_patch.errors import ConfigError, LayerPlanError
from kvcached_patch.jax.index_map import resolve
from kvcached_patch.jax.pools import pages_of, pooled
from kvcached_patch.seams.apply import armed

logger = logging.getLogger("vllm.kvcached_patch")

POOLED = f"{config.SCAN}=pool"


def initialize_kv_cache(
    wrapped: Callable[..., Any], manager: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``KVCacheManager.initialize_kv_cache``: one array for the layers of each kind.

    Kinds are the places in the cycle that MaxText scans over. The memory is that of the caches by
    layer, which are deleted before it is taken. Models whose layers are not scanned, or cannot
    share arrays, stay as they are; the log says so, and why.

    Raises ConfigError naming what addresses caches by layer from outside.
    """
    wrapped(*args, **kwargs)
    runner = manager.runner
    if config.load().scan != "pool" or not runner.kv_caches:
        return
    try:
        slots, plan = _planned(runner)
    except LayerPlanError as error:
        logger.warning("kvcached-patch: %s: KV caches stay as they are: %s", POOLED, error)
        return
    _refuse_others(runner, slots)
    _pool(runner, slots, plan)


def _planned(runner: Any) -> tuple[tuple[int, ...], PoolPlan]:
    """Which cache each layer has, and the pools.

    Raises LayerPlanError saying why there can be none.
    """
    slots = resolve(runner.layer_name_to_kvcache_index, len(runner.kv_caches))
    model = getattr(runner, "model", None)
    settings = getattr(model, "maxtext_config", None)
    if settings is None or slots is None:
        raise LayerPlanError(f"{type(model).__name__} is not MaxText's")
    if not any(entry.package == "maxtext" for entry in armed()):
        raise LayerPlanError("MaxText is not patched, and would not know what to do with pools")
    if not settings.scan_layers:
        raise LayerPlanError("its layers are not scanned (scan_layers: false)")
    if not getattr(settings, "pure_nnx_decoder", True):
        raise LayerPlanError("its decoder is linen's, which stacks them (pure_nnx_decoder: false)")
    pages = [pages_of(runner.kv_caches[slot]) for slot in slots]
    return slots, plan_pools(slots, pages, _cycle(settings, len(slots)))


def _cycle(settings: Any, layers: int) -> int:
    """Attention layers in one step of MaxText's scan.

    Gemma's patterns are constants of their modules, others' are settings (nnx_decoders.py).
    """
    from maxtext.models.gemma3 import GEMMA3_ATTENTION_PATTERN
    from maxtext.models.gemma4 import GEMMA4_ATTENTION_PATTERN

    patterns = {"gemma3": GEMMA3_ATTENTION_PATTERN, "gemma4": GEMMA4_ATTENTION_PATTERN}
    if (block := settings.decoder_block.value) in patterns:
        return len(patterns[block])
    in_a_layer, rest = divmod(layers, settings.num_decoder_layers)  # gemma2 has two
    if rest:
        raise LayerPlanError(f"{layers} KV caches for {settings.num_decoder_layers} decoder layers")
    cycle = int(settings.inhomogeneous_layer_cycle_interval) * in_a_layer
    if layers % cycle and block != "qwen3_next":
        raise LayerPlanError(
            f"MaxText scans {block} in whole blocks of {cycle}, not {layers} layers"
        )
    return cycle


def _refuse_others(runner: Any, slots: Sequence[int]) -> None:
    """Raises ConfigError for what knows the caches of single layers, by name."""
    from tpu_inference.core.disagg_utils import is_disagg_enabled

    others = _others(runner, slots).items()
    if (transfer := runner.vllm_config.kv_transfer_config) is not None:
        found = f"the KV connector {transfer.kv_connector}"
    elif is_disagg_enabled():
        found = "disaggregated serving (PREFILL_SLICES)"
    else:
        found = next((name for name, slot in others if slot in slots), "")
    if found:
        raise ConfigError(
            f"{POOLED}: {found} addresses the KV caches of single layers; expected nothing that "
            f"does, or {config.SCAN} unset"
        )


def _others(runner: Any, slots: Sequence[int]) -> dict[str, int]:
    """What of the index map is no decoder layer's, such as drafts."""
    ours = {f"layer.{layer}" for layer in range(len(slots))}
    index_map = runner.layer_name_to_kvcache_index
    return {name: slot for name, slot in index_map.items() if name not in ours}


def _pool(runner: Any, slots: Sequence[int], plan: PoolPlan) -> None:
    """Put the pools first in the runner's list; caches of no decoder layer follow."""
    caches = runner.kv_caches
    nbytes = _nbytes(caches)
    others = _others(runner, slots)
    pools = pooled([caches[slot] for slot in slots], plan)
    rest = sorted(set(range(len(caches))) - set(slots))
    caches[:] = [*pools, *(caches[slot] for slot in rest)]
    assert _nbytes(caches) == nbytes
    runner.layer_name_to_kvcache_index.update(
        {f"layer.{layer}": plan.where(layer)[0] for layer in range(len(slots))}
        | {name: len(pools) + rest.index(slot) for name, slot in others.items()}
    )
    logger.info(
        "kvcached-patch: %s: %d KV caches in %d pools of layers %s",
        POOLED,
        len(slots),
        len(pools),
        ", ".join(str(list(layers)) for layers in plan.pools),
    )


def _nbytes(caches: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
