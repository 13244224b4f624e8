"""Real vLLM workers, runners and attention layers, without the rest of an engine.

A `Stage` holds a real VllmConfig and real Attention layers registered in its forward context.
`worker()` gives a real Worker whose model runner is vLLM's own V1 or V2 class with only the
state that allocation needs. `plan()` is vLLM's own scheduler-side planning. So
``worker.initialize_from_config(plan)`` runs vLLM's code from the gate to the bound layers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import vllm
from packaging.version import Version
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention, EncoderOnlyAttention
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2Runner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1Runner
from vllm.v1.worker.gpu_worker import Worker

from kvcached_patch.seams.apply import arm, armed, restore

MODELS = Path(__file__).parents[1] / "tools" / "models"
VERSION = Version(Version(vllm.__version__).base_version)
ONE_BACKING = Version("0.29") <= VERSION
CPU = torch.device("cpu")


class BareV1Runner(V1Runner):
    """vLLM's V1 runner with the state of a loaded model and no model."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.cache_config = config.cache_config
        self.compilation_config = config.compilation_config
        self.model_config = config.model_config
        self.parallel_config = config.parallel_config
        self.scheduler_config = config.scheduler_config
        self.speculative_config = None
        self.device = CPU
        self.kv_cache_dtype = torch.float32
        self.shared_kv_cache_layers: dict[str, str] = {}
        self.runner_only_attn_layers: set[str] = set()
        self.kv_sharing_fast_prefill_eligible_layers: set[str] = set()
        self.attn_groups: list[Any] = []
        self.kv_caches: list[Any] = []
        self.cross_layers_kv_cache = None
        self.bound: dict[str, Any] = {}

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **context: Any
    ) -> None:
        """The steps of vLLM's method that decide about storage."""
        from vllm.v1.worker.utils import prepare_kernel_block_sizes

        self.attn_groups.clear()
        self.kv_caches.clear()
        self.kv_cache_config = kv_cache_config = deepcopy(kv_cache_config)
        self.may_add_encoder_only_layers_to_kv_cache_config()
        self.maybe_add_kv_sharing_layers_to_kv_cache_groups(kv_cache_config)
        self.initialize_attn_backend(kv_cache_config)
        sizes = prepare_kernel_block_sizes(kv_cache_config, self.attn_groups)
        self.bound = self.initialize_kv_cache_tensors(kv_cache_config, sizes, **context)

    def _check_and_update_cudagraph_mode(self, *args: Any, **kwargs: Any) -> None:
        """There are no CUDA graphs to choose for."""

    def _init_kv_zero_meta(self) -> None:
        """Nothing runs that would zero blocks."""


class BareV2Runner(V2Runner):
    """vLLM's V2 runner reduced to its allocation: `init_attn_backend`, then `init_kv_cache`."""

    def __init__(self, config: Any) -> None:
        self.vllm_config = config
        self.device = CPU
        self.kv_caches: list[Any] = []
        self.bound: dict[str, Any] = {}

    def get_kv_cache_spec(self) -> dict[str, Any]:
        return attn_utils.get_kv_cache_spec(self.vllm_config)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, **context: Any
    ) -> None:
        self.kv_caches.clear()
        self.kv_cache_config = kv_cache_config = deepcopy(kv_cache_config)
        self.attn_groups, _, sizes = attn_utils.init_attn_backend(
            kv_cache_config, self.vllm_config, CPU
        )
        forward_context = self.vllm_config.compilation_config.static_forward_context
        if ONE_BACKING:
            first = [self.kv_caches] if VERSION.release < (0, 30) else []
            self.bound = attn_utils.init_kv_cache(
                *first, forward_context, kv_cache_config, CPU, sizes, self.vllm_config, **context
            )
        else:
            dtype = self.vllm_config.cache_config.cache_dtype
            self.bound = attn_utils.init_kv_cache(
                self.kv_caches,
                forward_context,
                kv_cache_config,
                self.attn_groups,
                CPU,
                dtype,
                sizes,
                self.vllm_config,
            )

    def _init_kv_zero_meta(self) -> None:
        """Nothing runs that would zero blocks."""


RUNNERS = {"V1": BareV1Runner, "V2": BareV2Runner}


class Stage:
    """A real config with real attention layers in its forward context."""

    def __init__(self, model: str = "llama", **engine: Any) -> None:
        """Of a tiny model; `engine`: further settings of ``EngineArgs``."""
        args = EngineArgs(
            model=model_dir(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            enable_prefix_caching=False,
            block_size=32,
            **engine,
        )
        self.config = args.create_engine_config()
        self.layers = self.config.compilation_config.static_forward_context

    def attention(
        self,
        name: str,
        *,
        heads: int = 2,
        head_size: int = 32,
        window: int | None = None,
        shares: str | None = None,
        layer: type[Attention] = Attention,
    ) -> None:
        """Register one real attention layer."""
        with set_current_vllm_config(self.config):
            layer(
                num_heads=heads,
                head_size=head_size,
                scale=1.0,
                num_kv_heads=heads,
                cache_config=self.config.cache_config,
                per_layer_sliding_window=window,
                prefix=name,
                kv_sharing_target_layer_name=shares,
            )

    def encoder_only(self, name: str) -> None:
        """Register one real attention layer that needs no cache."""
        self.attention(name, layer=EncoderOnlyAttention)

    def runner(self, kind: str) -> Any:
        """A V1 or V2 runner that knows these layers, as after loading the model."""
        return RUNNERS[kind](self.config)

    def plan(
        self, specs: dict[str, Any], nbytes: int = 4 << 20, layout: str = "LBNHC"
    ) -> KVCacheConfig:
        """The scheduler's KV cache config for these layers, by vLLM's own planning."""
        with set_current_vllm_config(self.config):
            resolve_layout(self.config, layout)
            return planned(self.config, specs, nbytes)


def planned(config: Any, specs: dict[str, Any], nbytes: int) -> KVCacheConfig:
    """vLLM's own groups and descriptors for these layers in `nbytes` bytes."""
    if Version("0.33") > VERSION:
        from vllm.v1.core import kv_cache_utils

        groups = kv_cache_utils.get_kv_cache_groups(config, specs)
        return kv_cache_utils.get_kv_cache_config_from_groups(config, groups, nbytes)
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder
    from vllm.v1.core.kv_cache_planning import _pool_bytes_per_block_from_builder

    builder = get_kv_cache_config_builder(config)
    groups = builder.get_kv_cache_groups(config, specs)
    each = _pool_bytes_per_block_from_builder(builder, config, groups) if groups else nbytes
    return builder.get_kv_cache_config_from_groups(config, groups, nbytes // each)


def bind(runner: Any, plan: KVCacheConfig) -> dict[str, Any]:
    """Let a real Worker initialise its cache from `plan`; returns vLLM's layer -> cache map."""
    with set_current_vllm_config(runner.vllm_config):
        worker_of(runner).initialize_from_config(plan)
    return runner.bound


class OneWorker:
    """Goes before one of vLLM's executors: its one worker is there already, in this process."""

    def __init__(self, worker: Any) -> None:
        self.worker, self.vllm_config = worker, worker.vllm_config
        self.parallel_config = self.vllm_config.parallel_config
        self.model_config = self.vllm_config.model_config
        self.up = True

    def collective_rpc(self, method: Any, timeout: Any = None, args: Sequence[Any] = ()) -> Any:
        if callable(method):
            return [method(self.worker, *args)]
        if method == "initialize_from_config":
            return [self.worker.initialize_from_config(args[0][0])]
        assert method == "compile_or_warm_up_model"
        return []

    def shutdown(self) -> None:
        self.up = False

    def __del__(self) -> None:
        """Nothing is to be shut down."""


def worker_of(runner: Any) -> Worker:
    """A real Worker around a runner, made once per runner."""
    if not hasattr(runner, "worker"):
        worker = object.__new__(Worker)
        worker.vllm_config = runner.vllm_config
        worker.cache_config = runner.vllm_config.cache_config
        worker.model_config = runner.vllm_config.model_config
        worker.model_runner = runner
        runner.worker = worker
    return runner.worker


def resolve_layout(config: Any, layout: str) -> None:
    """From 0.29 EngineCore fixes the KV cache layout before planning."""
    if ONE_BACKING:
        from vllm.v1.attention.backends.utils import record_kv_cache_layout

        record_kv_cache_layout(config.cache_config, layout)


def model_dir(name: str) -> str:
    """A directory with one of the tiny configs, without weights."""
    target = Path(tempfile.gettempdir()) / "kvcached-patch-configs" / name
    target.mkdir(parents=True, exist_ok=True)
    part = target / f"{os.getpid()}.part"
    shutil.copy(MODELS / f"{name}.json", part)
    part.replace(target / "config.json")  # at once: other test runs read the same file
    return str(target)


@contextmanager
def stock() -> Iterator[None]:
    """vLLM as it came: every original put back, and patched again afterwards."""
    seams = [entry.seam for entry in armed()]
    restore()
    try:
        yield
    finally:
        arm(seams, VERSION, on_conflict=_raise)


def _raise(error: Exception) -> None:
    raise error


def geometry(caches: dict[str, Any]) -> dict[str, Any]:
    """Shape, strides, byte offset, dtype and storage length of every cache tensor."""

    def of(cache: Any) -> Any:
        if isinstance(cache, torch.Tensor):
            offset = cache.storage_offset() * cache.element_size()
            size = cache.untyped_storage().nbytes()
            return tuple(cache.shape), cache.stride(), offset, cache.dtype, size
        return [of(tensor) for tensor in cache]

    return {name: of(cache) for name, cache in caches.items()}


def tensors(caches: dict[str, Any]) -> list[torch.Tensor]:
    """All cache tensors, state lists flattened."""
    return [
        tensor
        for cache in caches.values()
        for tensor in ([cache] if isinstance(cache, torch.Tensor) else cache)
    ]


def stored_names(plan: KVCacheConfig) -> Iterable[list[str]]:
    """The layers of each storage descriptor, whatever the release calls them."""
    return [t.layers if ONE_BACKING else t.shared_by for t in plan.kv_cache_tensors]
