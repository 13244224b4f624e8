"""Configurations whose KV cache stays in place: which, why, and that vLLM then runs as it came."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import vllm
from torch.overrides import TorchFunctionMode
from vllm.config import KVEventsConfig, KVTransferConfig, attention
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.worker import gpu_worker

from kvcached_patch.engines import vllm_scheduler
from kvcached_patch.engines.vllm_static import (
    ELASTIC_CONNECTORS,
    STATIC_CONNECTORS,
    arguments_static_because,
    static_because,
)
from kvcached_patch.errors import ConfigError
from tests.bare import OneWorker, Stage, model_dir, worker_of
from tests.matrix.pairs import Pair, pair
from tests.matrix.test_allocation import name, report_of

FOLDER = f"static-{vllm.__version__}"
LINE = "memory once touched stays committed: "


def connector(kv_connector: str, **settings: Any) -> dict[str, Any]:
    return {"kv_connector": kv_connector, "kv_role": "kv_both", **settings}


def joined(*names: str) -> dict[str, Any]:
    several = [connector(each) for each in names]
    return connector("MultiConnector", kv_connector_extra_config={"connectors": several})


def transfers(settings: dict[str, Any]) -> Callable[[Any], None]:
    def configure(config: Any) -> None:
        config.kv_transfer_config = KVTransferConfig(**settings)

    return configure


def sleeps(config: Any) -> None:
    config.model_config.enable_sleep_mode = True


def allocates_by_cumem(config: Any) -> None:
    config.model_config.enable_cumem_allocator = True


def is_launched(config: Any) -> None:
    config.parallel_config.distributed_executor_backend = "external_launcher"


def scales(config: Any) -> None:
    config.parallel_config.enable_elastic_ep = True


def splits(config: Any) -> None:
    config.attention_config.hisparse_config = attention.HiSparseConfig()


# On a CPU vLLM itself accepts few of these: they are set in a configuration that it has checked.
STATIC: dict[str, tuple[Callable[[Any], None], str]] = {
    "sleep": (sleeps, "sleep mode: .*; unset --enable-sleep-mode"),
    "cumem": (allocates_by_cumem, "cumem allocator: .*; unset --enable-cumem-allocator"),
    "launcher": (is_launched, "external_launcher: .*; set another --distributed-executor-backend"),
    "elastic-ep": (scales, "elastic expert parallelism: .*; unset --enable-elastic-ep"),
    "nixl": (
        transfers(connector("NixlConnector")),
        "KV connector NixlConnector: it registers .*; unset --kv-transfer-config",
    ),
    "one-of-two": (
        transfers(joined("ExampleConnector", "MooncakeConnector")),
        "KV connector MooncakeConnector: it registers .*",
    ),
    "elsewhere": (
        transfers(connector("ExampleConnector", kv_connector_module_path="some.module")),
        "KV connector ExampleConnector: it is none of vLLM's own; .*",
    ),
    "unheard-of": (transfers(connector("Newcomer")), "KV connector Newcomer: nothing is known .*"),
    **(
        {"hisparse": (splits, "HiSparse: .*; unset hisparse_config")}
        if hasattr(attention, "HiSparseConfig")  # from 0.30
        else {}
    ),
}
ELASTIC: dict[str, Callable[[Any], None]] = {
    "example": transfers(connector("ExampleConnector")),
    "two-examples": transfers(joined("ExampleConnector", "ExampleConnector")),
    "no-connector": transfers({}),
}


class OneProcess(OneWorker, UniProcExecutor):
    """vLLM's executor of one process."""


class RawAllocations(TorchFunctionMode):
    """Counts what vLLM allocates as raw bytes while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += func is torch.zeros and kwargs.get("dtype") is torch.int8
        return func(*args, **kwargs)


class Scene:
    """An executor whose one worker has all but its KV cache, and the plan for that."""

    def __init__(self, configure: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
        stage = Stage()
        stage.attention(name(0))
        self.runner = stage.runner("V1")
        plan = stage.plan(self.runner.get_kv_cache_spec())
        configure(stage.config)
        worker = worker_of(self.runner)
        self.pool = RawAllocations()  # where vLLM has sleep mode's pool
        pools = {"kv_cache": self.pool}
        monkeypatch.setattr(
            worker, "_maybe_get_memory_pool_context", lambda tag: pools.get(tag, nullcontext())
        )
        # The libraries of most connectors are not there.
        monkeypatch.setattr(gpu_worker, "ensure_kv_transfer_initialized", lambda *_: None)
        self.executor = OneProcess(worker)
        vllm_scheduler.agree(None)
        self.start = lambda: self.executor.initialize_from_config([plan])


@pytest.fixture(params=STATIC)
def static(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Scene, str]:
    configure, line = STATIC[request.param]
    return Scene(configure, monkeypatch), line


def test_what_must_stay_in_place_is_vllms_own_which_is_said_once(
    static: tuple[Scene, str], caplog: pytest.LogCaptureFixture
) -> None:
    scene, expected = static
    with caplog.at_level(logging.WARNING):
        scene.start()
    (line,) = (each for each in caplog.messages if LINE in each)
    assert re.fullmatch(f"kvcached-patch: {LINE}{expected}", line)
    report = report_of(scene.runner)
    assert (report["pool"], report["ranges"], report["min_slab_blocks"]) == ("stock", 0, 0)
    assert scene.pool.count == 1, "allocated where vLLM has its pool"
    assert vllm_scheduler._agreed is None
    assert scene.executor.up


@pytest.mark.parametrize("configure", ELASTIC.values(), ids=ELASTIC)
def test_other_configurations_are_elastic(
    configure: Callable[[Any], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    scene = Scene(configure, monkeypatch)
    with caplog.at_level(logging.WARNING):
        scene.start()
    assert LINE not in caplog.text
    assert report_of(scene.runner)["pool"] == "host"
    assert vllm_scheduler._agreed is not None
    vllm_scheduler._agreed.budget.close()


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("POOL", "host", "one of: auto, static"),
        ("POOL", "cuda", "one of: auto, static"),
        ("LIMIT", "1GiB", "no bound"),
        ("BUDGET", "1GiB", "no bound"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_allocated(
    variable: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(transfers(connector("NixlConnector")), monkeypatch)
    monkeypatch.setenv(f"KVCACHED_PATCH_{variable}", value)
    message = (
        f"KVCACHED_PATCH_{variable}='{value}': this engine's memory cannot be given back in parts "
        f"(KV connector NixlConnector: {STATIC_CONNECTORS['NixlConnector']}); "
        f"expected {expected}; or unset --kv-transfer-config"
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        scene.start()
    assert scene.pool.count == 0
    assert not scene.executor.up, "shut down before it is raised"


def test_who_asked_for_static_memory_is_told_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scene = Scene(is_launched, monkeypatch)
    monkeypatch.setenv("KVCACHED_PATCH_POOL", "static")
    with caplog.at_level(logging.WARNING):
        scene.start()
    assert LINE not in caplog.text
    assert report_of(scene.runner)["pool"] == "stock"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"distributed_executor_backend": "external_launcher"}, "external_launcher"),
        ({"kv_transfer_config": KVTransferConfig(**connector("NixlConnector"))}, "NixlConnector"),
        ({"kv_offloading_size": 1}, "OffloadingConnector: .*; unset --kv-offloading-size"),
        ({"kv_transfer_config": KVTransferConfig(**connector("ExampleConnector"))}, ""),
        ({"kv_events_config": KVEventsConfig(enable_kv_cache_events=True)}, ""),
        ({"kv_sharing_fast_prefill": True}, ""),
    ],
    ids=["launcher", "nixl", "offloading", "example", "events", "fast-prefill"],
)
def test_of_configurations_that_vllm_makes_of_arguments(
    settings: dict[str, Any], expected: str
) -> None:
    args = EngineArgs(model_dir("llama"), load_format="dummy", skip_tokenizer_init=True, **settings)
    reason = static_because(args.create_engine_config())
    assert bool(reason) == bool(expected)
    assert re.search(expected, str(reason))
    foretold = arguments_static_because(args)
    assert bool(foretold) == bool(expected)
    if foretold and foretold.feature != "KV offloading (1 GiB)":  # vLLM then chooses a connector
        assert foretold == reason


def test_every_connector_that_vllm_registers_is_judged() -> None:
    """A connector that a release adds is to be read, then listed: until then it is static."""
    judged = {*ELASTIC_CONNECTORS, *STATIC_CONNECTORS, "MultiConnector"}
    assert set(KVConnectorFactory._registry) - judged == set()
    assert not ELASTIC_CONNECTORS & STATIC_CONNECTORS.keys()


@pytest.fixture(scope="module")
def engines() -> Pair:
    """Engines that generate twice, with their prefix cache emptied in between."""
    return pair(FOLDER, "tests.matrix.scenes:connected", VLLM_ENABLE_V1_MULTIPROCESSING="0")


def test_elastic_memory_with_a_connector_that_needs_no_more(engines: Pair) -> None:
    """Every prompt is stored, its pages are given back, and it is loaded into others."""
    first, again = engines.same("example", "twice")
    assert first["cached"] == [0, 0]
    assert again["cached"] == [96, 64], "whole blocks of 32 tokens, from files"
    assert "connector ExampleConnector" not in engines.patched.log


def test_kvcached_311_a_connector_that_needs_all_memory_gets_vllms_own(engines: Pair) -> None:
    """Also kvcached 391 and 329: connectors crashed there, then garbled."""
    stock, patched = (each.result["bench"]["modes"]["twice"] for each in engines)
    assert patched == stock
    assert engines.reports("bench")[0]["pool"] == "stock"
    first, emptied, _ = stock
    assert first["cached"] == [99, 69], "dummy values for all tokens but the last"
    assert emptied["resident_bytes"] == emptied["reserved_bytes"]
    why = STATIC_CONNECTORS["DecodeBenchConnector"]
    assert engines.patched.log.count(f"{LINE}KV connector DecodeBenchConnector: {why}; unset") == 1
