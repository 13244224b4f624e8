"""What the engines of the modes' tests do, in the process that a job runs in.

Keys of their jobs: `models`, directories by name; `elastic`, whether memory is to be given back.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from tempfile import TemporaryDirectory
from typing import Any

import vllm
from packaging.version import Version

from tests.matrix.driver import Driver, Found, InProcess, Job

SMALL = {"max_num_batched_tokens": 256, "max_num_seqs": 16, "enable_prefix_caching": True}


def prompt(length: int, seed: int) -> list[int]:
    """A prompt unlike those of other seeds."""
    return [(11 * i + 17 * seed + i * i * seed) % 490 + 5 for i in range(length)]


CROWD = [prompt(60, seed) for seed in range(3, 9)]  # more than the small pools hold to their end
SHARED = [prompt(100, 1), prompt(70, 2)]
LONGER = [[*text, 9, k] for k, text in enumerate(SHARED * 2, start=20)]


def no_speculation() -> str:
    """Why this vLLM does not start with speculation on a CPU, where it raises TypeError; or ''."""
    from vllm.utils import cpu_triton_utils

    if "USE_FP64_GUMBEL" not in inspect.getsource(cpu_triton_utils):  # up to 0.24
        return "its sampler passes USE_FP64_GUMBEL to a kernel whose CPU version has no such thing"
    if Version(vllm.__version__).release[:2] == (0, 30):
        return "it inspects the parameters of a kernel, for which it needs Triton"
    return ""


def modes(job: Job) -> Found:
    """The findings of several engines by their names, each a list of them for every mode."""
    speculative = {} if no_speculation() else {"draft": _draft}
    return forked(job, llama=_llama, gemma3n=_gemma3n, **speculative)


def parallel(job: Job) -> Found:
    """The same of engines whose two workers have a part of every layer, or half of the layers.

    Of one engine without any parallelism too, which is what each data-parallel rank is.
    """
    return forked(
        job,
        tensor=partial(_in_process, tensor_parallel_size=2),
        pipeline=partial(_parallel, pipeline_parallel_size=2),
        alone=_in_process,
    )


def connected(job: Job) -> Found:
    """The same of engines with KV connectors, which may load what they have stored."""
    return forked(
        job,
        example=partial(_connected, kv_connector="ExampleConnector"),
        bench=partial(_connected, kv_connector="DecodeBenchConnector"),
    )


def forked(job: Job, at_once: int = 3, **engines: Callable[[Job], Found]) -> Found:
    """Run engines, so many at a time, each in a fork of this process, which imports vLLM once.

    One after another in one process is beyond vLLM 0.32 in its in-process mode: AttributeError
    in `triton_utils.dispatcher.register_kernels`.
    """
    for module in ("entrypoints.llm", "v1.worker.cpu_worker", "v1.worker.cpu_model_runner"):
        importlib.import_module(f"vllm.{module}")
    # vLLM looks at a model's class in a process of its own, lest CUDA be initialized in this one.
    registry = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()

    def run(engine: Callable[[Job], Found]) -> Found:
        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as process:
            return process.submit(engine, job).result()

    with ThreadPoolExecutor(at_once) as threads:
        return dict(zip(engines, threads.map(run, engines.values()), strict=True))


def _llama(job: Job) -> Found:
    from vllm.config import KVEventsConfig
    from vllm.lora.request import LoRARequest

    engine = InProcess(
        job,
        job["models"]["llama"],
        num_gpu_blocks_override=20,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,  # with one, vLLM on CPUs adapts the whole batch
        **SMALL,
    )
    adapter = LoRARequest("tiny", 1, job["adapter"])
    given_up = {"max_tokens": 30, "abort": [0, 2], "after_steps": 7}
    mixed = {"adapters": [None, adapter, None]}
    found: Found = {
        "preemption": [engine.run(CROWD, max_tokens=100), engine.emptied()],
        "prefix": [engine.run(SHARED), engine.run(LONGER), engine.emptied(), engine.run(LONGER)],
        "n": [engine.run(SHARED, n=3, seed=7, temperature=0.9, max_tokens=32), engine.emptied()],
        "abort": [engine.run(CROWD[:5], **given_up), engine.emptied()],
        "lora": [engine.run([SHARED[0]] * 3, **mixed) for _ in range(2)] + [engine.emptied()],
    }
    return {"modes": found, "events": engine.events, "probes": engine.close()}


def _gemma3n(job: Job) -> Found:
    """A model whose layers share caches, with n-gram speculation where that starts."""
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    engine = InProcess(
        job,
        job["models"]["gemma3n"],
        num_gpu_blocks_override=80,
        speculative_config={**ngram, "num_speculative_tokens": 3} if not no_speculation() else None,
        **SMALL,
    )
    found = {"crowd": [engine.run(CROWD, max_tokens=100), engine.emptied()]}
    return {"modes": found, "probes": engine.close()}


def _draft(job: Job) -> Found:
    """The draft is the model's first three layers of four, so that it is right now and then."""
    engine = InProcess(
        job,
        job["models"]["llama"],
        num_gpu_blocks_override=20,
        speculative_config={"model": job["models"]["llama_draft"], "num_speculative_tokens": 3},
        **SMALL,
    )
    found = {"crowd": [engine.run(CROWD, max_tokens=60), engine.emptied()]}
    return {"modes": found, "probes": engine.close()}


def _parallel(job: Job, driver: type[Driver] = Driver, **settings: Any) -> Found:
    engine = driver(job, job["models"]["llama"], num_gpu_blocks_override=20, **settings, **SMALL)
    # vLLM on CPUs makes a stage's buffers in a warm-up run only, which `enforce_eager` leaves out.
    engine.llm.collective_rpc("execute_dummy_batch")
    found = [engine.run(CROWD, max_tokens=60), engine.emptied(), engine.run(SHARED)]
    return {"modes": {"crowd, prefix": [*found, engine.run(LONGER)]}, "probes": engine.close()}


def _in_process(job: Job, **settings: Any) -> Found:
    """The same with the scheduler in this fork: it starts faster and can be asked."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return _parallel(job, InProcess, **settings)


def _connected(job: Job, kv_connector: str) -> Found:
    with TemporaryDirectory() as folder:
        extra = {"shared_storage_path": folder}
        engine = InProcess(
            job,
            job["models"]["llama"],
            num_gpu_blocks_override=80,
            kv_transfer_config={
                "kv_connector": kv_connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
            **SMALL,
        )
        found = [engine.run(SHARED), engine.emptied(), engine.run(SHARED)]
        return {"modes": {"twice": found}, "probes": engine.close()}
