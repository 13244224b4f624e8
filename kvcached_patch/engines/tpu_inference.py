"""The seam of tpu-inference's model loader: each cache keeps its own sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from kvcached_patch.engines.arguments import named

INDEX_MAP, FIRST_RANK, LAST_RANK = 6, 9, 10  # static arguments of a step function
DRAFT_INDEX_MAP = 5


def get_flax_model(
    wrapped: Callable[..., Any], instance: None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``model_loader.get_flax_model`` before 0.30: as 0.30 does, a step function per shardings."""
    arguments = named(wrapped, args, kwargs)
    interface = wrapped(*args, **kwargs)
    from tpu_inference.models.common.compiler_options import get_step_fn_compiler_options

    steps = _StepFunctions(interface, arguments["mesh"], draft=arguments["is_draft_model"])
    options = {} if steps.draft else {"compiler_options": get_step_fn_compiler_options()}
    if hasattr(interface.model, "step_fn_no_options"):  # from 0.28, for continue_decode
        interface.model.step_fn_no_options = steps.model_fn()
    return dataclasses.replace(interface, model_fn=steps.model_fn(**options))


class _StepFunctions:
    """Step functions of one model, whose caches leave a step sharded as they came."""

    def __init__(self, interface: Any, mesh: Any, *, draft: bool) -> None:
        from tpu_inference.layers.common.sharding import ShardingAxisName
        from vllm.utils.func_utils import supports_kw

        self.draft = draft
        self._graphdef = nnx.graphdef(interface.model)
        self._state = jax.tree.structure(interface.state)
        self._hidden = NamedSharding(mesh, PartitionSpec(ShardingAxisName.ATTN_DATA, None))
        self._spec_step = supports_kw(type(interface.model).__call__, "spec_step_idx")

    def model_fn(self, **options: Any) -> Callable[..., Any]:
        """What the runner calls; `options` are passed to jit."""
        jitted: dict[Any, Callable[..., Any]] = {}

        def model_fn(state_leaves: Any, kv_caches: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._spec_step:
                kwargs.pop("spec_step_idx", None)
            kwargs.pop("shared_attention_metadata", None)
            shardings = _shardings(kv_caches)
            key = (jax.tree.structure(shardings), tuple(jax.tree.leaves(shardings)))
            if key not in jitted:
                jitted[key] = self._jit(shardings, **options)
            return jitted[key](state_leaves, kv_caches, *args, **kwargs)

        return model_fn

    def _jit(self, kv_caches: Any, **options: Any) -> Callable[..., Any]:
        static = (DRAFT_INDEX_MAP,) if self.draft else (INDEX_MAP, FIRST_RANK, LAST_RANK)
        return jax.jit(
            self._step,
            out_shardings=(kv_caches, self._hidden, self._hidden, None),
            donate_argnums=1,
            static_argnums=static,
            **options,
        )

    def _step(self, state_leaves: Any, *args: Any) -> Any:
        state = jax.tree.unflatten(self._state, state_leaves)
        return nnx.merge(self._graphdef, state)(*args)


def _shardings(kv_caches: Any) -> Any:
    """The caches' shardings as a pytree; None inside a trace, where they are not known."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(kv_caches)):
        return None
    return jax.tree.map(lambda cache: cache.sharding, kv_caches)
