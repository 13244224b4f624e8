"""Memory limits on whole engines: misses and preemption, never a lost request."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fresh import python
from tests.parity import run

BURST = [[(11 * i + 17 * k) % 490 + 5 for i in range(40 + k)] for k in range(24)]
JOB = {"batches": [BURST, BURST[:2]], "sampling": {"max_tokens": 60}, "probe_each": True}
RESIDENT = "tools.probes:kv_resident"
LIMIT_BYTES = 1 << 20


def test_a_limit_is_obeyed_and_no_request_is_lost(tmp_path: Path) -> None:
    """The burst needs three times the limit: requests wait, tokens stay those of stock vLLM."""
    stock = run("limits", "gemma3n", patched=False, **JOB)
    patched = run(
        "limits",
        "gemma3n",
        patched=True,
        probe=[RESIDENT],
        env={
            "KVCACHED_PATCH_LIMIT": "1MiB",
            "KVCACHED_PATCH_RETAIN": "none",
            "XDG_RUNTIME_DIR": str(tmp_path),
        },
        **JOB,
    )
    assert patched.result["tokens"] == stock.result["tokens"]
    held = [state[RESIDENT][0]["resident_bytes"] for state in patched.result["probes_each"]]
    assert 0 < max(held) <= LIMIT_BYTES

    end = time.monotonic() + 30  # EngineCore ends after the front end
    while any(engine["alive"] for engine in shown(tmp_path)):
        assert time.monotonic() < end, shown(tmp_path)
    assert not any(engine["committed_bytes"] for engine in shown(tmp_path))


def shown(runtime: Path) -> list[dict[str, Any]]:
    """The engines that `top` shows."""
    done = python("-m", "kvcached_patch", "top", "--json", XDG_RUNTIME_DIR=str(runtime))
    assert done.returncode == 0, done.stderr
    (host,) = json.loads(done.stdout)["devices"]
    assert host["device"] == "host"
    return list(host["engines"])


def test_a_limit_below_one_request_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="exit code") as caught:
        run(
            "limit-too-small",
            "gemma3n",
            patched=True,
            env={"KVCACHED_PATCH_LIMIT": "64KiB", "XDG_RUNTIME_DIR": str(tmp_path)},
        )
    log = Path(__file__).parents[2] / "out" / "parity" / "limit-too-small" / "patched.log"
    assert "KVCACHED_PATCH_LIMIT='64KiB': 64KiB is too small for one request of max_model_len" in (
        log.read_text()
    ), str(caught.value)
