# SPDX-License-Identifier: Apache-2.0
"""Run one vLLM engine, with processes of its own, that takes requests while it runs.

    with Served(python, job, env=…, log=…) as engine:
        engine.ready()
        engine.submit("r1", prompt=[5, 6, 7], max_tokens=10)
        engine.wait()
        engine.answers["r1"].tokens

The job is that of `tools.engine_job`; of its keys, `model`, `engine` and `sampling` count. All
times are seconds by ``time.monotonic()``, which on Linux is the same clock in every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from tools.engine_job import (
    ENGINE_DEFAULTS,
    ENV_DEFAULTS,
    LOG_TAIL_LINES,
    REPO_ROOT,
    SAMPLING_DEFAULTS,
)


@dataclass(frozen=True)
class Answer:
    """A finished request: when it was due, when its first and its last token came."""

    tokens: tuple[int, ...]
    due: float
    first: float
    done: float


@dataclass(frozen=True)
class Step:
    """What the scheduler said after a step; kv: the part of its blocks that is in use."""

    time: float
    running: int
    waiting: int
    kv: float
    preempted: int


def session_of(pid: int) -> int | None:
    """The session of a process, which for an engine's is the pid of its `Served`."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


class Served:
    """An engine in a session of its own; as a context manager, all of it is killed at the end."""

    def __init__(
        self, python: Path, job: dict[str, Any], *, env: dict[str, str], log: Path
    ) -> None:
        """Start it; `env` is added to this process's environment."""
        self.log = log
        self.answers: dict[str, Answer] = {}
        self.steps: list[Step] = []
        self.unanswered: set[str] = set()
        self._ready = self._ended = self._killed = False
        self._news = threading.Condition()
        paths = [str(REPO_ROOT), os.environ.get("PYTHONPATH", "")]
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [str(python), "-m", "tools.engine_serve", json.dumps(job)],
                cwd=REPO_ROOT,
                env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the engine."""
        if self._killed:
            return
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ready(self, timeout: float = 300) -> None:
        """Wait until it takes requests."""
        self._wait(lambda: self._ready, timeout, "not ready")

    def submit(
        self, name: str, prompt: list[int], max_tokens: int, due: float | None = None
    ) -> None:
        """Send a request; `due`: when it ought to be sent, which times count from."""
        assert self.process.stdin is not None
        self.unanswered.add(name)
        request = {"name": name, "prompt": prompt, "max_tokens": max_tokens}
        self.process.stdin.write(json.dumps({**request, "due": due or time.monotonic()}) + "\n")
        self.process.stdin.flush()

    def wait(self, timeout: float = 300) -> None:
        """Wait until all requests are answered."""
        self._wait(lambda: not self.unanswered, timeout, "requests without an answer")

    def _wait(self, done: Any, timeout: float, what: str) -> None:
        with self._news:
            self._news.wait_for(lambda: done() or self._ended, timeout)
            if done():
                return
        tail = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        state = "it ended" if self._ended else f"after {timeout:g} s"
        raise RuntimeError("\n".join([f"engine: {what}, {state}", *tail]))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = json.loads(line)
            with self._news:
                if "step" in found:
                    self.steps.append(Step(**found["step"]))
                elif "name" in found:
                    name, tokens = found.pop("name"), tuple(found.pop("tokens"))
                    self.answers[name] = Answer(tokens, **found)
                    self.unanswered.discard(name)
                else:
                    self._ready = True
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()


class _Front:
    """The engine's front end: requests in, answers out, one JSON object a line."""

    def __init__(self, job: dict[str, Any], answers: TextIO) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._sampling = {**SAMPLING_DEFAULTS, "logprobs": None, **job.get("sampling", {})}
        self._answers = answers
        settings = {**ENGINE_DEFAULTS, "model": job["model"], **job.get("engine", {})}
        arguments = AsyncEngineArgs(**settings)
        self._engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[self._stat_logger()])

    async def run(self) -> None:
        """Serve until standard input ends."""
        self._say({"ready": os.getpid()})
        reader = asyncio.StreamReader(limit=2**20)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        tasks = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        self._engine.shutdown()

    async def _answer(self, request: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        given = {**self._sampling, "max_tokens": request["max_tokens"]}
        params = SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": request["prompt"]}
        name = request["name"]
        tokens: list[int] = []
        first = 0.0
        async for output in self._engine.generate(prompt, params, name):
            first = first or time.monotonic()
            tokens += output.outputs[0].token_ids
        times = {"due": request["due"], "first": first, "done": time.monotonic()}
        self._say({"name": name, "tokens": tokens, **times})

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        say = self._say

        class Steps(StatLoggerBase):
            """Passes each step's figures on."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Nothing to set up."""

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                """Called by the front end after each step."""
                if scheduler_stats is not None and iteration_stats is not None:
                    step = Step(
                        time.monotonic(),
                        scheduler_stats.num_running_reqs,
                        scheduler_stats.num_waiting_reqs,
                        round(scheduler_stats.kv_cache_usage, 4),
                        iteration_stats.num_preempted_reqs,
                    )
                    say({"step": vars(step)})

            def log_engine_initialized(self) -> None:
                """Nothing to log."""

        return Steps

    def _say(self, found: dict[str, Any]) -> None:
        self._answers.write(json.dumps(found) + "\n")
        self._answers.flush()


def main() -> int:
    """Command line: the job."""
    for key, value in ENV_DEFAULTS.items():
        os.environ.setdefault(key, value)
    # What vLLM prints goes to the log.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        asyncio.run(_serve(json.loads(sys.argv[1]), answers))
    return 0


async def _serve(job: dict[str, Any], answers: TextIO) -> None:
    await _Front(job, answers).run()


if __name__ == "__main__":
    sys.exit(main())
