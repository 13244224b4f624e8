"""What the engines on an emulated GPU do, in the process that a job runs in."""

from __future__ import annotations

import time

from tests.matrix.driver import PATIENCE_SECONDS, Driver, Found, Job
from tests.matrix.scenes import CROWD, SHARED, SMALL

BLOCKS = 512
# A slab of four blocks of four layers, and the page of zeros.
LEAST_BYTES = 4 * (8 << 10) + (4 << 10)


def emulated(job: Job) -> Found:
    """Batches with quiet between them; of a patched engine also the device's bytes after each.

    Keys of the job: `elastic`, whether the engine is patched.
    """
    engine = Driver(
        job, job["models"]["gemma3n"], num_gpu_blocks_override=BLOCKS, gpu_memory_utilization=0.5,
        **SMALL,
    )  # fmt: skip
    batches, memory = [], []
    for prompts in (SHARED[:1], CROWD, SHARED):
        batches.append(engine.run(prompts, max_tokens=100))
        after = _held(engine) if job["elastic"] else 0
        engine.llm.reset_prefix_cache()
        if job["elastic"]:
            memory.append({"after": after, "quiet": _settled(engine)})
    return {"batches": batches, "memory": memory, "probes": engine.close()}


def _settled(engine: Driver) -> int:
    """The bytes once no more than the null block's slab is held, or after all patience."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (held := _held(engine)) > LEAST_BYTES and time.monotonic() < end:
        time.sleep(0.1)
    return held


def _held(engine: Driver) -> int:
    from cuda_emulated import owned

    (worker,) = engine.llm.collective_rpc(owned)
    return int(worker["used"])
