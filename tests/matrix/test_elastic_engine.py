"""Whole engines of this release whose memory follows the load: a burst, a few, a burst."""

from __future__ import annotations

import vllm

from tests.parity import Run, assert_same, run

RESIDENT = "tools.probes:kv_resident"
QUIET = "tests.matrix.probes:until_given_back"
FOLDER = f"elastic-{vllm.__version__}"


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


def resident(run: Run) -> list[int]:
    """Resident bytes of the KV cache before the first batch and after each."""
    return [probes[RESIDENT][0]["resident_bytes"] for probes in run.result["probes_each"]]


def test_memory_follows_the_load_with_the_tokens_of_stock() -> None:
    job = {
        "batches": BATCHES,
        "probe": [RESIDENT],
        "probe_each": True,
        "engine": {"enable_prefix_caching": True},
        "env": {"KVCACHED_PATCH_RETAIN": "none"},
    }
    stock = run(FOLDER, "gemma3n", patched=False, **job)
    patched = run(FOLDER, "gemma3n", patched=True, front_probe=[QUIET], **job)
    assert_same(stock, patched)

    start, burst, few, again = resident(patched)
    assert start < burst / 20
    assert few < burst / 20
    assert again > burst / 2
    assert len(set(resident(stock))) == 1, "stock holds what it reserved"

    left = patched.result["front_probes"][QUIET]["left_bytes"]
    assert left < again / 50, "given back though no step came after the last answer"
