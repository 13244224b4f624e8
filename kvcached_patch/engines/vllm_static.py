"""Configurations of vLLM whose KV cache must stay in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

# Below, paths are relative to vllm/distributed/kv_transfer/kv_connector/v1 of 0.22.1 to 0.33.0.

# Connectors that read and write blocks only inside the step for which their request holds them,
# by torch operations on vLLM's own views.
ELASTIC_CONNECTORS = frozenset(
    {
        "ExampleConnector",  # start_load_kv, save_kv_layer: blocks of scheduled requests, indexed
    }
)

_REGISTERS = "it registers the whole cache, by address, when it starts"
_OUTSIDE = "code outside vLLM keeps the cache's tensors"
_LATER = "it copies blocks by address, on streams of its own, after the step"

# All others that vLLM registers, and why: a new one is a decision, not an accident.
STATIC_CONNECTORS: Mapping[str, str] = {
    # nixl/: register_memory of every region (base_worker.py, up to 0.23 worker.py).
    "NixlConnector": _REGISTERS,
    "NixlPullConnector": _REGISTERS,
    "NixlPushConnector": _REGISTERS,
    # mooncake/: batch_register_memory, in the store connector by way of Mooncake's store.
    "MooncakeConnector": _REGISTERS,
    "MooncakeStoreConnector": _REGISTERS,
    # moriio/: registers the backing of every layer.
    "MoRIIOConnector": _REGISTERS,
    # lmcache_integration/vllm_v1_adapter.py hands the tensors to LMCache's engine.
    "LMCacheConnectorV1": _OUTSIDE,
    # lmcache_integration/multi_process_adapter.py: a CudaIPCWrapper of every tensor.
    "LMCacheMPConnector": "another process maps the cache (CUDA IPC)",
    # flexkv_connector.py hands the tensors to FlexKV.
    "FlexKVConnectorV1": _OUTSIDE,
    # hf3fs/: data_ptr() of every tensor, two threads, two streams.
    "HF3FSKVConnector": _LATER,
    # p2p/p2p_nccl_connector.py, up to 0.23: blocks are copied first, but by a guess at the layout.
    "P2pNcclConnector": "it takes the cache's layout from its shape",
    # offloading/scheduler.py: a block being stored may be freed; only its next owner waits.
    "OffloadingConnector": "it still reads blocks that vLLM has freed",
    # v1/simple_kv_offload: holds the blocks it copies, but finds them in vLLM's free list.
    "SimpleCPUOffloadConnector": _LATER,
    # example_hidden_states_connector.py: a copy stream; from 0.24 after the request has finished.
    "ExampleHiddenStatesConnector": _LATER,
    # decode_bench_connector.py: all of a Mamba layer's states (>= 0.24); `startup_fill` (>= 0.31).
    "DecodeBenchConnector": "it fills memory of blocks that no request holds",
    # hisparse/: see `static_because`.
    "HiSparseConnector": "it moves rows between the cache and the host by address",
}


@dataclass(frozen=True)
class Reason:
    """What keeps the KV cache in place, why, and what to set so that it need not stay there."""

    feature: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.feature}: {self.why}; {self.remedy}"


def static_because(vllm_config: Any) -> Reason | None:
    """What of this configuration keeps the KV cache in place; None if it may be given back.

    Workers and EngineCore ask the same question of the same configuration.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    # From 0.30; set by hand, or by vLLM for HiSparseConnector.
    if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
        return Reason(
            "HiSparse",
            "part of its cache lies on the host, in a pool of its own",
            "unset hisparse_config",
        )
    if model.enable_sleep_mode:
        return Reason(
            "sleep mode",
            "vLLM unmaps and maps the cache itself",
            "unset --enable-sleep-mode",
        )
    if model.enable_cumem_allocator:
        return Reason(
            "cumem allocator",
            "the cache lies in its pool",
            "unset --enable-cumem-allocator",
        )
    if parallel.distributed_executor_backend == "external_launcher":
        # v1/executor/uniproc_executor.py, ExecutorWithExternalLauncher.
        return Reason(
            "external_launcher",
            "each rank schedules for itself and must decide alike, without clock or budget",
            "set another --distributed-executor-backend",
        )
    if parallel.enable_elastic_ep:
        # distributed/elastic_ep/elastic_execute.py, warm_and_capture: steps without a plan.
        return Reason(
            "elastic expert parallelism",
            "its workers warm up again while the engine runs, unknown to the scheduler",
            "unset --enable-elastic-ep",
        )
    return _connector_because(vllm_config)


def arguments_static_because(arguments: Any) -> Reason | None:
    """The same of vLLM's ``EngineArgs``, of which no configuration has been made yet.

    They hold the fields of the single configurations, under the same names.
    """
    offloading = arguments.kv_offloading_size
    if offloading is not None:
        # config/vllm.py, _post_init_kv_transfer_config: put in the place of any other connector.
        return Reason(
            f"KV offloading ({offloading} GiB)",
            "the connectors that vLLM chooses for it keep the cache in place",
            "unset --kv-offloading-size",
        )
    return static_because(
        SimpleNamespace(
            parallel_config=arguments,
            model_config=arguments,
            cache_config=arguments,
            attention_config=arguments.attention_config,
            kv_transfer_config=arguments.kv_transfer_config,
        )
    )


def _connector_because(vllm_config: Any) -> Reason | None:
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return None
    # With --kv-offloading-size it is vLLM that chose the connector.
    chosen = vllm_config.cache_config.kv_offloading_size is not None
    remedy = "unset --kv-offloading-size" if chosen else "unset --kv-transfer-config"
    for name, why in _rigid_connectors(vars(transfer)):
        return Reason(f"KV connector {name}", why, remedy)
    return None


def _rigid_connectors(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of these settings' connectors those that keep the cache in place, and why."""
    name = settings["kv_connector"]
    if settings.get("kv_connector_module_path"):  # goes before vLLM's own of that name
        yield name, "it is none of vLLM's own"
    elif name == "MultiConnector":
        for each in settings["kv_connector_extra_config"].get("connectors", []):
            yield from _rigid_connectors(each)
    elif name not in ELASTIC_CONNECTORS:
        yield name, STATIC_CONNECTORS.get(name, "nothing is known of it")
