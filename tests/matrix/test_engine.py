"""Whole engines of this release, in processes of their own, with the KV-sharing model."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import vllm

from tests.parity import Run, assert_same, run

RESIDENT = "tools.probes:kv_resident"
ANYWHERE = "tests.matrix.probes:kv_resident_anywhere"
QUIET = "tests.matrix.probes:until_given_back"
FOLDER = f"matrix-{vllm.__version__}"


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Different prompts of which each pair shares its first half."""
    return [
        [
            (7 * i + 13 * (k // 2 if i < length // 2 else k + count) + seed) % 490 + 5
            for i in range(length)
        ]
        for k in range(count)
    ]


BATCHES = [prompts(24, 190, 1), prompts(2, 12, 2), prompts(24, 190, 3)]


class Engines(NamedTuple):
    """A stock and a patched run of a burst, a few prompts, and a burst."""

    stock: Run
    patched: Run


@pytest.fixture(scope="module")
def engines() -> Engines:
    job = {
        "batches": BATCHES,
        "probe": [RESIDENT],
        "probe_each": True,
        "engine": {"enable_prefix_caching": True},
        "env": {"KVCACHED_PATCH_RETAIN": "none"},
    }
    stock = run(FOLDER, "gemma3n", patched=False, **job)
    watched = {"front_probe": [QUIET], "sample": ANYWHERE}
    return Engines(stock, run(FOLDER, "gemma3n", patched=True, **watched, **job))


def memory(run: Run, key: str) -> list[int]:
    """Bytes of the KV cache before the first batch and after each."""
    return [probes[RESIDENT][0][key] for probes in run.result["probes_each"]]


def test_tokens_are_those_of_stock(engines: Engines) -> None:
    assert_same(*engines)


def test_sharing_layers_are_aliased_and_every_process_says_so_once(engines: Engines) -> None:
    report = engines.patched.report()
    assert (report["runner"], report["pool"]) == ("V1", "host")
    assert (report["pools"], report["aliased"]) == (1, 5)
    said = [line.split(",")[0] for line in engines.patched.active_lines()]
    assert sorted(said) == ["EngineCore", "front end", "worker"]


def test_memory_follows_the_load(engines: Engines) -> None:
    stock, patched = engines
    reserved = memory(stock, "reserved_bytes")
    assert memory(patched, "reserved_bytes") == reserved
    assert memory(stock, "resident_bytes") == reserved, "stock holds what it reserved"
    assert patched.report()["reserved_bytes"] == reserved[0]

    start, _, few, _ = memory(patched, "resident_bytes")
    burst, _, again = patched.result["samples"]  # afterwards it is soon given back
    assert start < burst / 20
    assert few < burst / 20
    assert again > burst / 2
    assert burst < reserved[0] / 10

    left = patched.result["front_probes"][QUIET]["left_bytes"]
    assert left < again / 50, "given back though no step came after the last answer"
