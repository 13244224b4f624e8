"""Executors that pass no plans on to their workers: memory stays as it is, which is said."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvcached_patch.engines import vllm_scheduler
from kvcached_patch.errors import ConfigError
from tests.bare import OneWorker, Stage, worker_of

ray_executor = pytest.importorskip(
    "vllm.v1.executor.ray_executor", reason="vLLM has no such executor any more from 0.33"
)


class OlderRay(OneWorker, ray_executor.RayDistributedExecutor):
    """Ray's older executor: Ray itself is not needed."""


@pytest.fixture
def ray() -> tuple[OlderRay, Any]:
    stage = Stage()
    stage.attention("model.layers.0.self_attn.attn")
    runner = stage.runner("V1")
    plan = stage.plan(runner.get_kv_cache_spec())
    return OlderRay(worker_of(runner)), plan


def test_memory_under_rays_older_executor_is_not_elastic(
    ray: tuple[OlderRay, Any], caplog: pytest.LogCaptureFixture
) -> None:
    executor, plan = ray
    vllm_scheduler.agree(None)
    with caplog.at_level(logging.WARNING):
        executor.initialize_from_config([plan])
    assert "Ray's older executor passes no plans on" in caplog.text
    assert vllm_scheduler._agreed is None
    assert executor.up


def test_bounds_under_rays_older_executor_are_refused(
    ray: tuple[OlderRay, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, plan = ray
    monkeypatch.setenv("KVCACHED_PATCH_LIMIT", "1GiB")
    with pytest.raises(ConfigError, match=r"KVCACHED_PATCH_LIMIT='1GiB'.*Ray's older executor"):
        executor.initialize_from_config([plan])
    assert not executor.up, "shut down before it is raised"
