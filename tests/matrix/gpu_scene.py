"""What the engines on an emulated GPU do, in the process that a job runs in."""

from __future__ import annotations

import time
from pathlib import Path

from tests.lanes import ROOT
from tests.matrix.driver import PATIENCE_SECONDS, Driver, Found, Job
from tests.matrix.scenes import CROWD, SHARED, SMALL

BLOCKS = 512
# A slab of four blocks of four layers, and the page of zeros.
LEAST_BYTES = 4 * (8 << 10) + (4 << 10)


def environment(folder: Path, capacity_bytes: int) -> dict[str, str]:
    """What makes an engine's GPU one of tests/emulated that no other engine sees.

    folder: of this engine alone, for the device and its ledger: one ledger would tell others what
    this device refused, since all emulated devices have the same UUID.
    """
    return {
        "PYTHONPATH": str(ROOT / "tests" / "emulated"),
        "CUDA_EMULATED_USED": str(folder / "used"),
        "CUDA_EMULATED_CAPACITY": str(capacity_bytes),
        "XDG_RUNTIME_DIR": str(folder),
    }


def emulated(job: Job) -> Found:
    """Batches with quiet between them; of a patched engine also the device's bytes at each.

    Keys of the job: `elastic`, whether the engine is patched.
    """
    engine = Driver(
        job, job["models"]["gemma3n"], num_gpu_blocks_override=BLOCKS, gpu_memory_utilization=0.5,
        **SMALL,
    )  # fmt: skip
    batches, memory = [], []
    for prompts in (SHARED[:1], CROWD, SHARED):
        if job["elastic"]:
            _device(engine)  # the next peak counts from here
        batches.append(engine.run(prompts, max_tokens=100))
        peak = _device(engine)["peak"] if job["elastic"] else 0
        engine.llm.reset_prefix_cache()
        if job["elastic"]:
            memory.append({"peak": peak, "quiet": _settled(engine)})
    return {"batches": batches, "memory": memory, "probes": engine.close()}


def _settled(engine: Driver) -> int:
    """The bytes once no more than the null block's slab is held, or after all patience."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (held := _device(engine)["used"]) > LEAST_BYTES and time.monotonic() < end:
        time.sleep(0.1)
    return held


def _device(engine: Driver) -> dict[str, int]:
    from cuda_emulated import device

    (found,) = engine.llm.collective_rpc(device)
    return dict(found)
