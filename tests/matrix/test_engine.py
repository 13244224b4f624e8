"""Whole engines of this release with the KV-sharing model: parity, pools, residency."""

from __future__ import annotations

import vllm

from tests.parity import Run, assert_same, run

RESIDENT = "tools.probes:kv_resident"
FOLDER = f"matrix-{vllm.__version__}"


def resident(run: Run) -> dict[str, int]:
    return run.result["probes"][RESIDENT][0]


def test_kv_sharing_model_runs_from_our_pools() -> None:
    stock = run(FOLDER, "gemma3n", patched=False, rounds=2, probe=[RESIDENT])
    patched = run(FOLDER, "gemma3n", patched=True, rounds=2, probe=[RESIDENT])
    assert_same(stock, patched)

    report = patched.report()
    assert (report["runner"], report["pool"]) == ("V1", "host")
    assert (report["pools"], report["aliased"]) == (1, 5)
    assert resident(patched)["reserved_bytes"] == resident(stock)["reserved_bytes"]
    assert report["reserved_bytes"] == resident(patched)["reserved_bytes"]
    assert resident(stock)["resident_bytes"] == resident(stock)["reserved_bytes"]
    assert resident(patched)["resident_bytes"] < resident(patched)["reserved_bytes"] / 10
    assert len(patched.active_lines()) == len(
        {line.split(",")[0] for line in patched.active_lines()}
    )
