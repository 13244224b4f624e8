# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine from a JSON job, in a process of its own.

Use `run_job` from Python, or `python -m tools.engine_job JOB.json RESULT.json` from the
repository root with the interpreter that has vLLM.

Job keys (only `model` is required):

- `model`: model directory. Without safetensors in it, weights are vLLM's dummy ones.
- `engine`: keyword arguments for `vllm.LLM`, over `ENGINE_DEFAULTS`.
- `prompts`: list of token id lists; or `batches`: list of such lists, generated one after another.
- `method`: `generate` (default) or `embed`, for pooling models.
- `sampling`: keyword arguments for `SamplingParams`, over `SAMPLING_DEFAULTS`.
- `gather`: queue all requests of a generation before the first is scheduled (default true), so
  that batches, and with them log-probabilities, are the same in every run; else `LLM.generate`.
- `rounds`: how many times everything is generated (default 1).
- `probe`: "module:function" strings, called with the worker in every worker after the last
  generation; with `probe_each` also before the first and after each generation.
- `sample`: "module:function" string; called without an argument in the front-end process while a
  generation runs, ten times a second, and after it.
- `front_probe`: the same, called without an argument in the front-end process at the end.
- `call`: a "module:function" string; called with the job instead of all this, its return value is
  the result. It can make engines with `make_engine` and question their workers with `probe`.

Result keys: `tokens` and `logprobs` (of the chosen tokens), or `embeddings`, one list per prompt,
all generations joined in order; `calls` (prompts in each generation); `probes` (per name, a list
with one result per worker); `probes_each` (a list of such mappings); `samples` (of each generation
the largest); `front_probes`; `versions`;
`settings`; `import_s`, `init_s`, `generate_s` (a list); `output_tokens`; `pid`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO_ROOT = Path(__file__).resolve().parent.parent
LOG_TAIL_LINES = 40

# One thread, bound to no core: the same sums in every run, on any machine. With vLLM's own choice
# the processes of an engine, or several engines, which wait busily for each other, take each
# other's cores, and a start takes twice as long on two of them.
ENV_DEFAULTS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
ENGINE_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 256,
    "seed": 0,
    "disable_log_stats": True,
}
SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "max_tokens": 16,
    "ignore_eos": True,
    "detokenize": False,
    "logprobs": 0,
}

Job = dict[str, Any]
Result = dict[str, Any]


def run_job(
    python: Path,
    job: Job,
    *,
    env: dict[str, str] | None = None,
    log: Path | None = None,
    timeout: float = 600,
) -> Result:
    """Run the job in a subprocess of `python`; `env` is added to this process's environment."""
    with tempfile.TemporaryDirectory(prefix="engine_job.") as scratch:
        job_file, result_file = Path(scratch, "job.json"), Path(scratch, "result.json")
        log = log or Path(scratch, "log")
        job_file.write_text(json.dumps(job))
        environment = {**os.environ, **(env or {})}
        paths = [str(REPO_ROOT), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        command = [str(python), "-m", "tools.engine_job", str(job_file), str(result_file)]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                cwd=REPO_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _kill_session(process)
        if code == 0 and result_file.is_file():
            result: Result = json.loads(result_file.read_text())
            return result
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        what = f"exit code {code}" if code is not None else f"no end after {timeout:g} s"
        raise RuntimeError("\n".join([f"engine job: {what}", *tail]))


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End what the job's process group still holds: workers outlive a killed front end."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_engine(job: Job) -> Result:
    """Run the job in this process."""
    for key, value in ENV_DEFAULTS.items():
        os.environ.setdefault(key, value)
    if "call" in job:
        called: Result = _resolve(job["call"])(job)
        return called
    started = time.perf_counter()
    importlib.import_module("vllm")
    imported = time.perf_counter()
    llm = make_engine(job)
    result: Result = {
        "pid": os.getpid(),
        "versions": _versions(),
        "settings": _settings(job),
        "import_s": imported - started,
        "init_s": time.perf_counter() - imported,
    }
    result |= _generate(llm, job)
    result["probes"] = probe(llm, job)
    result["front_probes"] = {name: _resolve(name)() for name in job.get("front_probe", [])}
    return result


def make_engine(job: Job) -> Any:
    """The job's `vllm.LLM`."""
    import vllm

    return vllm.LLM(**_settings(job))


def _settings(job: Job) -> dict[str, Any]:
    settings = {**ENGINE_DEFAULTS, "model": str(job["model"])}
    if not any(Path(job["model"]).glob("*.safetensors")):
        settings["load_format"] = "dummy"
    if job.get("method") == "embed":
        # vLLM builds every pooling task's processor up front, and one of them wants a tokenizer.
        settings |= {"runner": "pooling", "skip_tokenizer_init": False}
    return settings | job.get("engine", {})


def _generate(llm: Any, job: Job) -> Result:
    embed = job.get("method", "generate") == "embed"
    batches = job.get("batches") or [job.get("prompts", [])]
    outputs: list[Any] = []
    calls: list[int] = []
    seconds: list[float] = []
    each: list[Any] = []
    if job.get("probe_each"):
        each.append(probe(llm, job))
    samples: list[Any] = []
    for batch in batches * job.get("rounds", 1):
        prompts = [{"prompt_token_ids": list(ids)} for ids in batch]
        start = time.perf_counter()
        with _sampled(job, samples):
            if embed:
                outputs += llm.embed(prompts, use_tqdm=False)
            elif prompts:
                outputs += _generate_batch(llm, prompts, job)
        seconds.append(time.perf_counter() - start)
        calls.append(len(prompts))
        if job.get("probe_each"):
            each.append(probe(llm, job))
    result: Result = {"calls": calls, "generate_s": seconds, "samples": samples}
    if embed:
        result["embeddings"] = [list(output.outputs.embedding) for output in outputs]
    else:
        result["tokens"] = [list(output.outputs[0].token_ids) for output in outputs]
        result["logprobs"] = [chosen_logprobs(output.outputs[0]) for output in outputs]
    result["output_tokens"] = sum(len(ids) for ids in result.get("tokens", []))
    if each:
        result["probes_each"] = each
    return result


@contextlib.contextmanager
def _sampled(job: Job, samples: list[Any]) -> Iterator[None]:
    """Meanwhile call the job's `sample`; its largest value is added to `samples`."""
    if "sample" not in job:
        yield
        return
    sample, ended, found = _resolve(job["sample"]), threading.Event(), []

    def watch() -> None:
        while not ended.wait(0.1):
            found.append(sample())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    samples.append(max([*found, sample()]))


def _generate_batch(llm: Any, prompts: list[dict[str, list[int]]], job: Job) -> list[Any]:
    params = _sampling_params(job)
    if not job.get("gather", True) or not hasattr(llm, "enqueue"):
        outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
        return outputs
    llm.sleep(level=0)
    llm.enqueue(prompts, params, use_tqdm=False)
    llm.wake_up(tags=["scheduling"])
    outputs = llm.wait_for_completion(use_tqdm=False)
    return outputs


def _sampling_params(job: Job) -> Any:
    """A fresh object for every call: `LLM.generate` changes the one it is given."""
    from vllm import SamplingParams

    return SamplingParams(**{**SAMPLING_DEFAULTS, **job.get("sampling", {})})


def chosen_logprobs(completion: Any) -> list[float] | None:
    """The chosen tokens' log-probabilities, if they were asked for."""
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [float(candidates[token].logprob) for token, candidates in pairs]


def probe(llm: Any, job: Job) -> dict[str, list[Any]]:
    """What each worker answers to the job's probes."""
    return {name: llm.collective_rpc(_resolve(name)) for name in job.get("probe", [])}


def _resolve(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for module in ("vllm", "torch", "transformers"):
        versions[module] = str(importlib.import_module(module).__version__)
    return versions


def main() -> int:
    """Command line: job file and result file."""
    if len(sys.argv) != 3:
        print("usage: python -m tools.engine_job JOB.json RESULT.json", file=sys.stderr)
        return 2
    job_file, result_file = map(Path, sys.argv[1:])
    result = run_engine(json.loads(job_file.read_text()))
    part = result_file.with_name(result_file.name + ".part")
    part.write_text(json.dumps(result))
    part.replace(result_file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
