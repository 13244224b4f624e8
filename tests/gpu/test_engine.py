"""One whole engine on the GPU, if this environment has a vLLM for it."""

from __future__ import annotations

import unittest
from importlib.util import find_spec
from typing import Any

from tests.gpu import measured

LEFT = "tests.gpu.probes:left"


def test_an_engine_end_to_end() -> None:
    """The same tokens as stock's, from memory that is committed as it is needed."""
    if find_spec("vllm") is None:
        raise unittest.SkipTest("no vLLM in this environment")
    from tests.parity import prompts, run

    job: dict[str, Any] = {
        "engine": {"dtype": "bfloat16", "gpu_memory_utilization": 0.3, "enforce_eager": False},
        "batches": [prompts(), prompts()],
    }
    # Graphs are wanted here, and vLLM compiles what it captures.
    env = {"TORCHDYNAMO_DISABLE": "0", "KVCACHED_PATCH_RETAIN": "none"}
    watched = {"sample": "tests.gpu.probes:committed", "front_probe": [LEFT]}
    stock = run("gpu", "llama", patched=False, env=env, **job)
    patched = run("gpu", "llama", patched=True, env=env, **job, **watched)
    assert patched.result["tokens"] == stock.result["tokens"]
    report = patched.report()
    assert report["pool"] == "cuda"
    most, left = max(patched.result["samples"]), patched.result["front_probes"][LEFT]
    assert 0 < left <= most < report["reserved_bytes"]
    measured.FOUND["engine"] = {key: report[key] for key in ("runner", "device", "page_bytes")}
    measured.FOUND["engine"] |= {"most bytes": most, "left": left}
