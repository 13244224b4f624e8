"""Token and log-probability parity of whole engines, stock against patched."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import Run, assert_same, run

# vLLM imports every plugin's entry point; switched off, ours goes no further than its settings.
OFF_MODULES = {
    "kvcached_patch",
    "kvcached_patch._startup",
    "kvcached_patch.config",
    "kvcached_patch.core",
    "kvcached_patch.core.retention",
    "kvcached_patch.core.sizes",
    "kvcached_patch.errors",
}
STATE = "tests.engine.probes:state"
CHUNKED = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "enable_chunked_prefill": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "prefix caching, chunked prefill": ("gemma3n", {"enable_prefix_caching": True, **CHUNKED}),
    "no prefix caching": ("gemma3n", {"enable_prefix_caching": False}),
    "head sizes per type": ("gemma4", {}),
    "attention and Mamba": ("falcon_h1", {"enable_prefix_caching": False}),
}


@pytest.fixture(scope="module")
def stock() -> dict[str, Run]:
    """Stock runs, made when first asked for."""
    return {}


def pair(case: str, stock: dict[str, Run], env: dict[str, str] | None = None) -> tuple[Run, Run]:
    model, engine = CASES[case]
    folder = case.replace(" ", "-").replace(",", "")
    common: dict[str, Any] = {
        "engine": engine,
        "rounds": 2,
        "probe": [STATE],
        "front_probe": [STATE],
        "env": env,
    }
    if case not in stock:
        stock[case] = run(folder, model, patched=False, **common)
    return stock[case], run(folder, model, patched=True, **common)


# One process instead of three: half the start-up time, where processes are not the question.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.mark.parametrize("case", ["prefix caching, chunked prefill", "no prefix caching"])
def test_kv_sharing_model_in_all_processes(case: str, stock: dict[str, Run]) -> None:
    unpatched, patched = pair(case, stock)
    assert_same(unpatched, patched)
    assert (patched.report()["pool"], patched.report()["aliased"]) == ("host", 5)

    # Every process is patched, and says so once.
    lines = patched.active_lines()
    assert [line.split(",")[0] for line in lines] == ["front end", "worker", "EngineCore"]
    assert all(seams_complete(line) for line in lines)
    worker = patched.result["probes"][STATE][0]
    assert {kind.split(".")[-1] for kind in worker["types"].values()} == {"FunctionWrapper"}

    # Off, nothing of ours is there, in no process; vLLM's functions are its own.
    assert unpatched.active_lines() == []
    for state in (unpatched.result["probes"][STATE][0], unpatched.result["front_probes"][STATE]):
        assert set(state["types"].values()) == {"builtins.function"}
        assert {name for name in state["modules"] if "kvcached_patch" in name} <= OFF_MODULES


@pytest.mark.parametrize("case", ["head sizes per type", "attention and Mamba"])
def test_other_cache_shapes(case: str, stock: dict[str, Run]) -> None:
    unpatched, patched = pair(case, stock, env=ONE_PROCESS)
    assert_same(unpatched, patched)
    assert patched.report()["pool"] == "host"
    assert patched.report()["min_slab_blocks"] >= 1, "elastic"
    said = [line.split(",")[0] for line in patched.active_lines()]
    assert "worker" in said
    assert len(said) == len(set(said))
    assert all(seams_complete(line) for line in patched.active_lines())


def seams_complete(line: str) -> bool:
    applied, loaded = line.split("seams applied: ")[1].split(",")[0].split("/")
    return int(applied) == int(loaded) > 0


def test_parity_is_sensitive_to_one_wrong_binding(stock: dict[str, Run]) -> None:
    case = "no prefix caching"
    model, engine = CASES[case]
    folder = case.replace(" ", "-")
    if case not in stock:
        stock[case] = run(folder, model, patched=False, engine=engine, rounds=2)
    scrambled = run(
        "scrambled",
        model,
        patched=True,
        engine=engine,
        rounds=2,
        probe=["tests.engine.probes:scramble"],
        probe_each=True,
    )
    with pytest.raises(AssertionError):
        assert_same(stock[case], scrambled)


def test_model_without_kv_cache_runs() -> None:
    engine = {"enable_prefix_caching": False}
    common: dict[str, Any] = {"method": "embed", "engine": engine, "env": ONE_PROCESS}
    unpatched = run("bert", "bert", patched=False, **common)
    patched = run("bert", "bert", patched=True, **common)
    assert patched.result["embeddings"] == unpatched.result["embeddings"]
    assert patched.report()["reserved_bytes"] == 0
    assert patched.report()["pool"] == "none"
