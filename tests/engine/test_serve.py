"""``vllm serve`` with OpenAI's client: the same answers, our numbers on /metrics, a clean end."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllm.version import __version__ as vllm_version

from kvcached_patch import __version__, config
from kvcached_patch.ledger import EngineRecord, Ledger, ledger_path
from tests.parity import OUT, PRELOADED, prompts
from tests.server import Server

BLOCK_BYTES = 64 << 10  # 4 layers, keys and values of 2 heads, 32 floats, 32 tokens
SLAB_BYTES = 4 * BLOCK_BYTES
RESERVED_BYTES, BUDGET_BYTES = 1 << 30, 512 << 20
# One request of 256 tokens fits, two of more than 224 do not. At rest one block is kept.
LIMIT_BYTES, KEPT_BYTES = 4 * SLAB_BYTES, BLOCK_BYTES
CLIENTS, PATIENCE_S = 8, 120.0
BURST = [[(11 * i + 17 * k) % 490 + 5 for i in range(100 + k)] for k in range(2 * CLIENTS)]
# A message of ours, or a frame of a traceback.
OURS = re.compile(r"\] (kvcached-patch|ledger)\b|/kvcached_patch/")


class Answer(NamedTuple):
    """What a client got."""

    text: str
    tokens: tuple[int, ...]
    finish: str | None


@dataclass
class Life:
    """What one server answered, said and left behind."""

    plain: list[Answer] = field(default_factory=list)
    streamed: list[Answer] = field(default_factory=list)
    together: list[Answer] = field(default_factory=list)
    busy: dict[str, float] = field(default_factory=dict)
    quiet: dict[str, float] = field(default_factory=dict)
    processes: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    code: int | None = None
    log: str = ""


def words(tokens: list[int]) -> str:
    """The text that the tiny models' tokenizer makes these tokens of."""
    return " ".join(f"t{token}" for token in tokens)


class Client:
    """OpenAI's client, for greedy completions."""

    def __init__(self, server: Server) -> None:
        self._model = server.model
        self._openai = openai.OpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
        )

    def _create(self, prompt: list[int], max_tokens: int, **settings: Any) -> Any:
        return self._openai.completions.create(
            model=self._model,
            prompt=words(prompt),
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True, "return_token_ids": True},
            **{"temperature": 0.0, **settings},
        )

    def complete(self, prompt: list[int], max_tokens: int = 24) -> Answer:
        answer = self._create(prompt, max_tokens)
        (choice,) = answer.choices
        assert choice.prompt_token_ids == prompt
        assert answer.usage.completion_tokens == max_tokens
        return Answer(choice.text, tuple(choice.token_ids), choice.finish_reason)

    def stream(self, prompt: list[int], max_tokens: int = 24) -> Answer:
        chunks = list(self._create(prompt, max_tokens, stream=True))
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert len(choices) > 1
        tokens = tuple(token for choice in choices for token in choice.token_ids)
        text = "".join(choice.text for choice in choices)
        return Answer(text, tokens, choices[-1].finish_reason)

    def stream_until(self, end: Callable[[], object]) -> None:
        """Call `end` when a stream has begun that takes longer than a busy machine may hide."""
        settings = {"n": 128, "temperature": 1.0}
        with self._create(prompts()[0], 250, stream=True, **settings) as chunks:
            next(chunks)
            end()


def numbers(server: Server) -> dict[str, float]:
    """Our samples on /metrics, each under its name and labels."""
    found = {}
    for family in text_string_to_metric_families(server.ask("/metrics")):
        for sample in family.samples:
            if sample.name.startswith("kvcached_patch_"):
                labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
                found[f"{sample.name}{{{labels}}}".removeprefix("kvcached_patch_")] = sample.value
    return found


ENGINE = "{device=host,engine=llama}"


def at_rest(found: dict[str, float]) -> bool:
    """Whether all is given back but the slabs of the null block and of the block kept."""
    taken, given_back, held = (
        found.get(name + ENGINE, 0)
        for name in ("pages_committed_total", "pages_released_total", "committed_bytes")
    )
    return (taken - given_back) * mmap.PAGESIZE == held <= 2 * SLAB_BYTES


def session(pid: int) -> set[int]:
    """The processes of a server's session, but for Python's own."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == pid:
                command = (entry / "cmdline").read_bytes()
                if command and b"multiprocessing.resource_tracker" not in command:
                    found.add(int(entry.name))
        except (ProcessLookupError, FileNotFoundError):
            continue
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until it holds, or for so long that something is wrong; the assertions tell what."""
    end = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def server(kind: str, runtime: Path, port: int = 0) -> Server:
    env = {
        "XDG_RUNTIME_DIR": str(runtime),
        "TORCHDYNAMO_DISABLE": "1",
        "LD_PRELOAD": PRELOADED,
        "KVCACHED_PATCH": "0",
    }
    if kind != "stock":
        env |= {
            "KVCACHED_PATCH": "1",
            "KVCACHED_PATCH_LIMIT": str(LIMIT_BYTES),
            "KVCACHED_PATCH_BUDGET": str(BUDGET_BYTES),
            "KVCACHED_PATCH_RETAIN": str(KEPT_BYTES),
        }
    log = OUT / "serve" / f"{kind}.log"
    return Server("llama", log, port=port, **env)


def live(kind: str, runtime: Path, port: int = 0) -> tuple[Life, int]:
    """Serve, and end by SIGTERM in the middle of a stream; also returns the port."""
    life = Life()
    with server(kind, runtime, port) as served:
        client = Client(served)
        life.plain = [client.complete(prompt) for prompt in prompts()]
        life.streamed = [client.stream(prompt) for prompt in prompts()]
        clients = [Client(served) for _ in range(CLIENTS)] * 2
        with ThreadPoolExecutor(CLIENTS) as pool:
            life.together = list(pool.map(Client.complete, clients, BURST, [130] * len(BURST)))
        life.busy = numbers(served)

        def look() -> bool:
            life.quiet = numbers(served)
            return at_rest(life.quiet)

        wait_for(look)
        life.processes = session(served.process.pid)

        def terminate() -> None:
            """vLLM's front end waits, once the engine is gone, for its clients to hang up."""
            served.process.terminate()
            wait_for(lambda: len(session(served.process.pid)) == 1)

        client.stream_until(terminate)
        life.code = served.process.wait(PATIENCE_S)
        wait_for(lambda: not session(served.process.pid))
        life.left = session(served.process.pid)
        life.log = served.log()
        return life, served.port


@dataclass(frozen=True)
class Served:
    """Lives of a stock and a patched server, and of one started where the patched one was."""

    stock: Life
    patched: Life
    again: list[Answer]
    ledger: list[EngineRecord]
    fresh: dict[str, float]


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Served:
    runtime = tmp_path_factory.mktemp("runtime")
    stock, _ = live("stock", runtime)
    patched, port = live("patched", runtime)
    directory = config.ledger_dir({"XDG_RUNTIME_DIR": str(runtime)})
    ledger = Ledger(ledger_path(directory, "host")).engines()
    with server("again", runtime, port) as served:
        fresh = numbers(served)
        again = [Client(served).complete(prompt) for prompt in prompts()]
    return Served(stock, patched, again, ledger, fresh)


def test_answers_are_those_of_stock_vllm(lives: Served) -> None:
    assert lives.patched.plain == lives.stock.plain
    assert lives.patched.streamed == lives.stock.streamed
    assert lives.patched.together == lives.stock.together
    assert min(len(set(answer.tokens)) for answer in lives.stock.together) > 8


def test_a_stream_says_what_a_plain_answer_says(lives: Served) -> None:
    streamed = lives.patched.streamed
    assert streamed == lives.patched.plain
    assert {answer.finish for answer in streamed} == {"length"}
    assert all(answer.text.split() == [f"t{i}" for i in answer.tokens] for answer in streamed)


def test_metrics_say_what_is_held(lives: Served) -> None:
    for found in (lives.patched.busy, lives.patched.quiet):
        assert found["reserved_bytes" + ENGINE] == RESERVED_BYTES
        assert found["limit_bytes" + ENGINE] == LIMIT_BYTES
        assert found["budget_bytes{device=host}"] == BUDGET_BYTES
        assert SLAB_BYTES <= found["committed_bytes" + ENGINE] <= LIMIT_BYTES
        (info,) = (name for name in found if name.startswith("info{"))
        versions = rf"version={__version__},vllm={vllm_version}"
        assert re.fullmatch(rf"info{{seams=(\d+)/\1,{versions}}}", info)
    assert lives.patched.quiet["cached_bytes" + ENGINE] == KEPT_BYTES


def test_metrics_say_what_was_done(lives: Served) -> None:
    found = lives.patched.quiet
    assert at_rest(found), found
    assert found["pages_released_total" + ENGINE] > 0
    assert found["scheduling_misses_total" + ENGINE] > 0
    assert 0 < found["release_seconds_sum" + ENGINE] < PATIENCE_S
    releases = found["release_seconds_bucket{device=host,engine=llama,le=+Inf}"]
    assert releases == found["release_seconds_count" + ENGINE]
    assert lives.fresh["pages_released_total" + ENGINE] == 0


def test_stock_vllm_has_no_metrics_of_ours(lives: Served) -> None:
    assert lives.stock.busy == {}
    assert not OURS.search(lives.stock.log)


def test_each_process_says_one_line(lives: Served) -> None:
    said = [line for line in lives.patched.log.splitlines() if OURS.search(line)]
    active = "active: (front end|worker|EngineCore),"
    found = [re.match(rf"\(\w+ pid=(\d+)\) INFO .*{active}", line) for line in said]
    assert all(found), said
    assert len(lives.patched.processes) == 3
    assert sorted(int(each[1]) for each in found if each) == sorted(lives.patched.processes)


def test_sigterm_in_mid_stream_ends_it_as_it_ends_stock_vllm(lives: Served) -> None:
    assert (lives.stock.left, lives.patched.left) == (set(), set())
    assert lives.patched.code == lives.stock.code
    assert [(each.alive, each.committed) for each in lives.ledger] in ([], [(False, 0)])


def test_a_server_starts_where_one_was_terminated(lives: Served) -> None:
    assert lives.again == lives.patched.plain
