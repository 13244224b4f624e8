"""Where the runner's caches become pools: after tpu-inference has laid them out by layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
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
    runner = manager.runner
    if config.load().scan == "pool":
        _refuse_others(runner)
    wrapped(*args, **kwargs)
    if config.load().scan == "pool" and runner.kv_caches:
        try:
            plan = _plan(runner)
        except LayerPlanError as error:
            logger.warning("kvcached-patch: %s: KV caches stay as they are: %s", POOLED, error)
            return
        _pool(runner, plan)


def _plan(runner: Any) -> PoolPlan:
    """Raises LayerPlanError saying why there can be no pools."""
    slots = resolve(runner.layer_name_to_kvcache_index, len(runner.kv_caches))
    settings = getattr(runner.model, "maxtext_config", None)
    if settings is None or slots is None:
        raise LayerPlanError(f"{type(runner.model).__name__} is not MaxText's")
    if not any(entry.package == "maxtext" for entry in armed()):
        raise LayerPlanError("MaxText is not patched, and would not know what to do with pools")
    if not settings.scan_layers:
        raise LayerPlanError("its layers are not scanned (scan_layers: false)")
    if not getattr(settings, "pure_nnx_decoder", True):
        raise LayerPlanError("its decoder is linen's, which stacks them (pure_nnx_decoder: false)")
    pages = [pages_of(runner.kv_caches[slot]) for slot in slots]
    return plan_pools(slots, pages, _cycle(settings, len(slots)))


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
    return int(settings.inhomogeneous_layer_cycle_interval) * in_a_layer


def _pool(runner: Any, plan: PoolPlan) -> None:
    """Put the pools first in the runner's list; caches of no decoder layer follow."""
    index_map = runner.layer_name_to_kvcache_index
    slots = resolve(index_map, len(runner.kv_caches))
    assert slots is not None, "planned"
    names = {name: layer for layer in range(len(slots)) for name in [f"layer.{layer}"]}
    others = {name: slot for name, slot in index_map.items() if name not in names}
    for name, slot in others.items():
        if slot in slots:
            raise ConfigError(
                f"{POOLED}: {name} shares the KV cache of layer.{slots.index(slot)}; expected no "
                f"draft model that does, or {config.SCAN} unset"
            )
    caches = runner.kv_caches
    nbytes = _nbytes(caches)
    pools = [pooled([caches[slots[i]] for i in layers]) for layers in plan.pools]
    rest = sorted(set(range(len(caches))) - set(slots))
    places = {slot: len(pools) + i for i, slot in enumerate(rest)}
    caches[:] = [*pools, *(caches[slot] for slot in rest)]
    for name, layer in names.items():
        index_map[name] = plan.where(layer)[0]
    index_map.update({name: places[slot] for name, slot in others.items()})
    assert _nbytes(caches) == nbytes
    logger.info(
        "kvcached-patch: %s: %d KV caches in %d pools of layers %s",
        POOLED,
        len(slots),
        len(pools),
        ", ".join(str(list(layers)) for layers in plan.pools),
    )


def _nbytes(caches: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))


def _refuse_others(runner: Any) -> None:
    """Raises ConfigError for what moves blocks of single layers, by name."""
    from tpu_inference.core.disagg_utils import is_disagg_enabled

    transfer = runner.vllm_config.kv_transfer_config
    if transfer is not None:
        found = f"the KV connector {transfer.kv_connector}"
    elif is_disagg_enabled():
        found = "disaggregated serving (PREFILL_SLICES)"
    else:
        return
    raise ConfigError(
        f"{POOLED}: {found} moves blocks of single layers; expected none, or {config.SCAN} unset"
    )
