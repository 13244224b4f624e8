"""The seams of MaxText's vLLM adapter: decoders get their caches by layer, live."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

from packaging.specifiers import SpecifierSet

from kvcached_patch import __version__
from kvcached_patch.engines.arguments import named
from kvcached_patch.errors import LayerPlanError, SeamMismatch
from kvcached_patch.jax import pool_scan, scan, stacked
from kvcached_patch.jax.index_map import IndexMap, resolve
from kvcached_patch.jax.layer_caches import LayerCaches
from kvcached_patch.jax.pools import Pool, PooledCaches
from kvcached_patch.seams.apply import tally
from kvcached_patch.seams.check import locate
from kvcached_patch.seams.manifest import covers

logger = logging.getLogger("vllm.kvcached_patch")

# Decoders with GDN layers, and the tpu-inference that each MaxText can run them on: 0.2.3 imports
# a name that 0.27 dropped, 0.2.4 calls a private function whose arguments changed in 0.30.
HYBRID = ("qwen3_next", "qwen3_5")
HYBRID_PAIRS = {"<0.2.4": "<0.27", ">=0.2.4,<0.2.5": ">=0.27,<0.30", ">=0.2.5": ">=0.30"}

Call = Callable[..., Any]

# The caches of the model call that is being traced.
_view: ContextVar[LayerCaches | None] = ContextVar("view", default=None)


def call(wrapped: Call, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``MaxTextForCausalLM.__call__`` before 0.2.5: the map is the third of the ignored arguments.

    They are embeddings, positions and the map, as tpu-inference's runner passes them.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    metadata, config = bound.arguments["attention_metadata"], model.maxtext_config
    if isinstance(metadata, Mapping) and config.scan_layers and not config.pure_nnx_decoder:
        raise LayerPlanError(
            "scanned layers of a linen decoder share one attention metadata; found some for "
            f"each of {', '.join(metadata)}. Set scan_layers: false to serve this model"
        )
    ignored = bound.arguments.get("args", ())
    return _serve(wrapped, model, bound, ignored[2] if len(ignored) > 2 else None)


def call_mapped(wrapped: Call, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``MaxTextForCausalLM.__call__`` from 0.2.5: it gets no map, since the view is the map."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    index_map = bound.arguments.get("_layer_name_to_kvcache_index")
    if index_map is not None:
        bound.arguments["_layer_name_to_kvcache_index"] = None
    return _serve(wrapped, model, bound, index_map)


def _serve(
    wrapped: Call, model: Any, bound: inspect.BoundArguments, index_map: IndexMap | None
) -> Any:
    """Caches by layer in, the runner's own order out; without caches it is a dry run."""
    arguments = bound.arguments
    caches, metadata = arguments["kv_caches"], arguments["attention_metadata"]
    if not caches:
        arguments["kv_caches"] = None
        _, *rest = wrapped(*bound.args, **bound.kwargs)
        return caches, *rest
    if metadata is None:
        raise LayerPlanError("no attention metadata with these KV caches: no layer would attend")
    slots = resolve(index_map, len(caches)) or tuple(range(len(caches)))
    if any(isinstance(cache, Pool) for cache in caches):
        view: LayerCaches = PooledCaches(caches, slots, _by_layer(metadata, len(slots)))
    else:
        if isinstance(metadata, Mapping):
            by_slot = _by_slot(metadata, slots)
            arguments["attention_metadata"] = {
                f"layer.{layer}": by_slot[slot] for layer, slot in enumerate(slots)
            }
            caches = [
                scan.Supply(cache, by_slot[slot]) if slot in by_slot else cache
                for slot, cache in enumerate(caches)
            ]
        view = LayerCaches(caches, slots)
    arguments["kv_caches"] = view
    token = _view.set(view)
    try:
        returned, *rest = wrapped(*bound.args, **bound.kwargs)
    finally:
        _view.reset(token)
    missing = view.unwritten()
    if returned is not view or missing:
        config = model.maxtext_config
        raise LayerPlanError(
            f"MaxText's decoder {config.decoder_block.value} (scan_layers: {config.scan_layers}) "
            + (f"updated no KV cache of layers {missing}" if missing else "replaced the list")
            + f"; expected it to update those of its {len(view)} layers in place"
        )
    return [c.cache if isinstance(c, scan.Supply) else c for c in view.by_slot()], *rest


def _by_slot(metadata: Mapping[str, Any], slots: Sequence[int]) -> dict[int, Any]:
    """Each slot's attention metadata, given that of its layers' groups.

    A layer that shares another one's slot is in no group: it takes its target's.
    """
    found = {
        slot: metadata[name]
        for layer, slot in enumerate(slots)
        if (name := f"layer.{layer}") in metadata
    }
    for layer, slot in enumerate(slots):
        if slot not in found:
            raise LayerPlanError(
                f"no attention metadata for layer.{layer} or a layer that shares its slot {slot}; "
                f"found some for {', '.join(metadata)}"
            )
    return found


def _by_layer(metadata: Any, layers: int) -> list[Any]:
    """Each layer's attention metadata, where no layers share a cache."""
    if not isinstance(metadata, Mapping):
        return [metadata] * layers
    return list(_by_slot(metadata, range(layers)).values())


def apply_layers(wrapped: Call, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``NNXDecoder._apply_layers_sequentially``, where it is given the caches layer by layer.

    A decoder that groups them by block itself hands over tuples: those are right as they are, but
    for pools, over which it is scanned for real.
    """
    caches = kwargs.get("kv_caches_stacked")
    view = _view.get()
    if isinstance(view, PooledCaches) and caches is not None:
        return _scan_pools(wrapped, decoder, view, args, kwargs)
    if not isinstance(caches, LayerCaches):
        return wrapped(*args, **kwargs)

    def apply(blocks: list[Any]) -> Any:
        return wrapped(*args, **{**kwargs, "kv_caches_stacked": blocks})

    layers = named(wrapped, args, kwargs)["layers"]
    return scan.apply_layers(
        apply, layers, caches, kwargs["length"], kwargs.get("attention_metadata")
    )


def _scan_pools(
    wrapped: Call, decoder: Any, view: PooledCaches, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """MaxText's loop as the body of a scan, which unrolls but one block at a time."""
    layers, hidden, *others = args
    caches, length = kwargs["kv_caches_stacked"], kwargs["length"]
    if length == 0:
        return wrapped(*args, **kwargs)
    grouped = caches is not view
    cycle = len(caches[0]) if grouped else scan.layers_per_block(len(view), length)

    def loop(block: Any, hidden: Any, given: list[Any]) -> Any:
        each = {**kwargs, "length": 1, "kv_caches_stacked": given}
        return wrapped(block, hidden, *others, **each)[0]

    steps, axis = range(0, length * cycle, cycle), decoder.config.param_scan_axis
    hidden = pool_scan.scan_pools(loop, layers, hidden, view, steps, axis, feed=not grouped)
    if grouped:  # MaxText writes these back, which changes nothing
        now = tuple(scan.Supply(view.pool(slot).cache, None) for slot in view.slots[:cycle])
        caches[:] = [now] * length
    return hidden, layers, None


def get_decoder_layers(
    wrapped: Call, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Decoder.get_decoder_layers``: where they are scanned, classes that know the carry."""
    classes, config = wrapped(*args, **kwargs), decoder.config
    if not config.scan_layers:
        return classes
    blocks = config.num_decoder_layers // config.inhomogeneous_layer_cycle_interval
    return [stacked.block_class(each, blocks) for each in classes]


def scan_decoder_layers(
    wrapped: Call, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``Decoder.scan_decoder_layers``: it stores one cache for each decoder layer, we all."""
    scanned = wrapped(*args, **kwargs)

    def run(inputs: Any, *others: Any, **named: Any) -> Any:
        result, view = scanned(inputs, *others, **named), _view.get()
        if view is not None and stacked.is_carry(inputs):
            view[:] = result[0][1]
        return result

    return run


def attend(wrapped: Call, attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Attention.forward_serve_vllm``: inside a scanned block, on the layer's own cache."""
    arguments = named(wrapped, args, kwargs)
    cache, metadata = arguments.pop("rpa_kv_cache"), arguments.pop("rpa_metadata")
    return scan.attend(partial(wrapped, *arguments.values()), cache, metadata)


def attend_states(wrapped: Call, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``Qwen3NextGatedDeltaNet.__call__``: on the states and the metadata that are the layer's.

    Inside a scanned block MaxText gives it the metadata of all groups, where it finds none.
    """
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    supply = bound.arguments.get("kv_cache")
    if not isinstance(supply, scan.Supply):
        return wrapped(*args, **kwargs)

    def attention(cache: Any, metadata: Any) -> Any:
        bound.arguments |= {"kv_cache": cache, "attention_metadata": metadata}
        return wrapped(*bound.args, **bound.kwargs)

    return supply.attend(attention)


def configure(wrapped: Call, instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``generate_maxtext_config``, called once for each model: say what is in force.

    Raises SeamMismatch for a pair of releases that cannot run the model, naming one that can.
    """
    config = wrapped(*args, **kwargs)
    maxtext, runner = locate("maxtext"), locate("tpu_inference")
    assert maxtext is not None, "it is imported"
    assert runner is not None, "it is imported"
    wanted = next(v for k, v in HYBRID_PAIRS.items() if covers(SpecifierSet(k), maxtext.version))
    block = config.decoder_block.value
    if block in HYBRID and not covers(SpecifierSet(wanted), runner.version):
        raise SeamMismatch(
            f"MaxText {maxtext.version} cannot serve {block} on tpu-inference {runner.version}; "
            f"expected tpu-inference {wanted}, or MaxText 0.2.5 on tpu-inference >=0.30"
        )
    logger.info(
        "kvcached-patch %s active: MaxText %s on tpu-inference %s, seams applied: %s",
        __version__,
        maxtext.version,
        runner.version,
        tally(),
    )
    return config
