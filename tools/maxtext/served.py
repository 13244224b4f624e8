"""A tiny MaxText model as tpu-inference serves it: its loader, its caches, its step function."""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tools.maxtext.models import Model

PAGE, PAGES = 8, 3  # tokens in a block, blocks of a request
REQUESTS, TOKENS = 4, 48  # of a batch, padded
MIB = 2**20
Cache = Any  # an array, or a tuple of arrays

Runner = tuple[Any, ...]


class Served:
    """One model, with caches as the real KVCacheManager lays them out for the installed vLLM."""

    def __init__(
        self, model: Model, devices: int = 1, *, axis: str = "model", draft: bool = False
    ) -> None:
        """`devices` along an axis of the runner's mesh. draft: a draft layer has a cache too."""
        from tpu_inference.models.common.model_loader import get_model
        from tpu_inference.runner.kv_cache_manager import KVCacheManager
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        register()
        self.model = model
        config = vllm_config(model, devices if axis == "model" else 1)
        self.mesh = mesh(devices, axis)
        with set_current_vllm_config(config):
            self.interface = get_model(config, jax.random.key(0, impl="unsafe_rbg"), self.mesh)
            self._runner = _runner(config, self.mesh, self.interface.model)
            self.manager = KVCacheManager(self._runner)
            specs = self.manager.get_kv_cache_spec()
            if draft:
                specs |= {"draft_layer.0": specs["layer.0"]}
            resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
            self._kv_cache_config = get_kv_cache_configs(config, [specs], [8 * MIB])[0]
        self.allocate()

    def allocate(self) -> None:
        """Have the manager make the caches; if it made some before, in their place."""
        from vllm.config import set_current_vllm_config

        if self._stored:
            self.manager.delete_kv_cache()
        with set_current_vllm_config(self._runner.vllm_config):
            self.manager.initialize_kv_cache(self._kv_cache_config)

    @property
    def index_map(self) -> dict[str, int]:
        """Layer name to slot, as the manager made it."""
        return dict(self._runner.layer_name_to_kvcache_index)

    def caches(self) -> list[Cache]:
        """Empty caches in the manager's order."""
        empty = jax.tree.map(lambda a: jax.device_put(jnp.zeros_like(a), a.sharding), self._stored)
        return list(empty)

    @property
    def _stored(self) -> list[Cache]:
        return list(self._runner.kv_caches)

    def step(self, caches: list[Cache], batch: Sequence[tuple[int, range]], **given: Any) -> Runner:
        """One call of the runner's step function; the caches are donated.

        batch: for each request its number and the positions whose tokens it runs.
        given: ids, index_map, metadata, state_leaves: others than the usual ones.
        """
        positions = [p for _, span in batch for p in span]
        ids = given.get("ids", [token(request, p) for request, span in batch for p in span])
        pad = [0] * (TOKENS - len(ids))
        metadata = given.get("metadata", self.metadata(batch))
        index_map = given.get("index_map", tuple(self.index_map.items()))
        return self.interface.model_fn(
            given.get("state_leaves", self.interface.state_leaves),
            caches,
            jnp.array(ids + pad, jnp.int32),
            metadata,
            None,
            jnp.array(positions + pad, jnp.int32),
            index_map,
            None,
            None,
            True,
            True,
            shared_attention_metadata=None,
        )

    def metadata(self, batch: Sequence[tuple[int, range]]) -> Any:
        """Attention metadata as the runner builds it: one, or one for each group of layers."""
        groups = self._kv_cache_config.kv_cache_groups
        each = tuple(self._metadata(batch, group) for group in range(len(groups)))
        if len(groups) == 1:
            return each[0]
        names = tuple(tuple(group.layer_names) for group in groups)
        try:
            from tpu_inference.layers.common.attention_metadata import GroupedAttentionMetadata
        except ImportError:  # tpu-inference 0.27
            return {name: each[g] for g, group in enumerate(names) for name in group}
        return GroupedAttentionMetadata(each, names)

    def _metadata(self, batch: Sequence[tuple[int, range]], group: int) -> Any:
        from tpu_inference.layers.common.attention_metadata import AttentionMetadata

        positions = [p for _, span in batch for p in span]
        spare = REQUESTS - len(batch)
        ends = np.cumsum([0, *(len(span) for _, span in batch)]).tolist()
        # The blocks of requests lie between each other; no two groups use the same.
        tables = [
            1 + group * REQUESTS * PAGES + block * REQUESTS + request
            for request, _ in [*batch, *[(0, range(0))] * spare]
            for block in range(PAGES)
        ]
        slots = [1 + request for request, _ in batch] + [0] * spare
        decode = len(batch) if all(len(span) == 1 for _, span in batch) else 0
        arrays = {
            "input_positions": positions + [0] * (TOKENS - len(positions)),
            "block_tables": tables,
            "seq_lens": [span.stop for _, span in batch] + [0] * spare,
            "query_start_loc": ends + [ends[-1]] * spare,
            "request_distribution": [decode, decode, len(batch)],
            "mamba_state_indices": slots,
        }
        return AttentionMetadata(
            **{name: jnp.array(value, jnp.int32) for name, value in arrays.items()},
            padded_num_reqs=REQUESTS,
        )


def lowered(served: Served) -> Any:
    """The step of a batch as a program of caches, which are donated, and weights."""

    def step(caches: Any, leaves: Any) -> Any:
        return served.step(caches, [(0, range(9)), (1, range(12))], state_leaves=leaves)

    return jax.jit(step, donate_argnums=0).lower(served.caches(), served.interface.state_leaves)


def copied_bytes(compiled: Any, caches: Sequence[jax.Array]) -> int:
    """What an optimized program copies of arrays with the shapes of these caches."""
    sizes = {",".join(map(str, cache.shape)): cache.nbytes for cache in caches}
    copies = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", compiled.as_text())
    return sum(sizes.get(shape, 0) for shape in copies)


def token(request: int, position: int) -> int:
    return (17 * request + 29 * position + position * position) % 61 + 1


def permuted(index_map: dict[str, int], slots: int, seed: int) -> tuple[dict[str, int], list[int]]:
    """The map after its slots were shuffled, and the new place of each slot."""
    order = list(range(slots))
    random.Random(seed).shuffle(order)
    return {name: order[slot] for name, slot in index_map.items()}, order


def in_layer_order(index_map: dict[str, int], slots: int) -> tuple[dict[str, int], list[int]]:
    """The map after its slots were sorted by layer (tpu-inference#3512), and their new places."""
    by_layer = sorted(index_map, key=lambda name: int(name.rpartition(".")[2]))
    places = {slot: i for i, slot in enumerate(dict.fromkeys(index_map[n] for n in by_layer))}
    order = [places[slot] for slot in range(slots)]
    return {name: order[slot] for name, slot in index_map.items()}, order


def mesh(devices: int = 1, axis: str = "model") -> Mesh:
    """The runner's mesh, with so many devices along one of its axes."""
    from tpu_inference.layers.common.sharding import MESH_AXIS_NAMES

    shape = [devices if name == axis else 1 for name in MESH_AXIS_NAMES]
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), MESH_AXIS_NAMES)


@cache
def register() -> None:
    """Make MaxText known to vLLM and tpu-inference; MaxText's own function, to be called once."""
    from maxtext.integration.vllm import maxtext_vllm_adapter

    maxtext_vllm_adapter.register()


def vllm_config(model: Model, devices: int) -> Any:
    """A real VllmConfig for this model."""
    from vllm.engine.arg_utils import EngineArgs

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model.hf_config()))
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32",
            enforce_eager=True,
            max_model_len=PAGE * PAGES,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=TOKENS,
            block_size=PAGE,
            tensor_parallel_size=devices,
            enable_prefix_caching=False,
            additional_config={"maxtext_config": model.maxtext_config()},
        ).create_engine_config()


def _runner(config: Any, mesh: Mesh, model: Any) -> Any:
    """What KVCacheManager reads of TPUModelRunner and fills in."""
    import torch

    return SimpleNamespace(
        vllm_config=config,
        model_config=config.model_config,
        cache_config=config.cache_config,
        parallel_config=config.parallel_config,
        speculative_config=None,
        model=model,
        mesh=mesh,
        kv_cache_dtype=torch.float32,
        attention_backend=None,
        max_num_reqs=REQUESTS,
        max_model_len=PAGE * PAGES,
        max_num_tokens=TOKENS,
        dp_size=1,
        kv_caches=[],
        layer_name_to_kvcache_index={},
        persistent_batch_manager=SimpleNamespace(),
    )
