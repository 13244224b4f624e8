"""Two whole engines of this release on one budget: memory goes to the one that has work."""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import vllm

from tests.fresh import python
from tests.parity import OUT, run
from tools.engine_serve import Answer, Served
from tools.ledger_watch import LedgerWatch
from tools.tiny_model import write_model

FOLDER = OUT / f"two-engines-{vllm.__version__}"
BLOCKS, BLOCK_BYTES = 120, 32 * 2048  # a token of the tiny llama takes 2 KiB
BUDGET = BLOCKS * BLOCK_BYTES
ENGINE = {"num_gpu_blocks_override": BLOCKS, "max_num_seqs": 64, "enable_prefix_caching": True}
OUTPUT_TOKENS = 90
BURST = 30  # requests; the whole budget holds twenty
PATIENCE_SECONDS = 120.0


@dataclass
class Story:
    """What was seen; parts of the budget that the engines a and b held, by the ledger.

    kept: a, idle after its burst. alone: b at work while a is idle. woken: a at work while b is.
    preempted: requests of b then. lost: b when it was killed. after: a after that. most: both.
    sent: prompts by request, but for `dropped` requests that were open when b was killed.
    """

    kept: float = 0.0
    alone: float = 0.0
    woken: float = 0.0
    preempted: int = 0
    lost: float = 0.0
    after: float = 0.0
    most: float = 0.0
    sent: dict[str, list[int]] = field(default_factory=dict)
    dropped: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    top: Any = None

    def send(self, engine: Served, requests: int = BURST) -> None:
        """Requests of which no two are alike; with its answer each takes six blocks."""
        for _ in range(requests):
            n = len(self.sent)
            prompt = random.Random(n).choices(range(5, 500), k=100)
            self.sent[f"r{n}"] = prompt
            engine.submit(f"r{n}", prompt, OUTPUT_TOKENS)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Both engines at work and idle in turn, until one is killed."""
    runtime = tmp_path_factory.mktemp("runtime")
    FOLDER.mkdir(parents=True, exist_ok=True)
    job = {"model": str(write_model("llama", OUT / "models")), "engine": ENGINE}
    env = {
        "KVCACHED_PATCH": "1",
        "KVCACHED_PATCH_BUDGET": str(BUDGET),
        "XDG_RUNTIME_DIR": str(runtime),
    }
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(
                Served(Path(sys.executable), job, env=env, log=FOLDER / f"{name}.log")
            )
            for name in "ab"
        )
        a.ready()
        b.ready()
        watch = stack.enter_context(LedgerWatch(runtime, [a, b]))
        seen = Story()

        def held(engine: Served) -> float:
            return watch.held()[[a, b].index(engine)] / BUDGET

        def grown(engine: Served, enough: float, *busy: Served) -> float:
            """What the engine holds, once that is enough; meanwhile none of `busy` runs dry.

            An engine gives way with its next step, for which it may wait seconds on few cores.
            """
            end = time.monotonic() + PATIENCE_SECONDS
            while (found := held(engine)) <= enough and time.monotonic() < end:
                for each in busy:
                    if len(each.unanswered) < BURST:
                        seen.send(each, 1)
                threading.Event().wait(0.005)
            return found

        seen.send(a)
        a.wait()
        seen.kept = held(a)
        seen.send(b)
        seen.alone = grown(b, 0.8, b)
        seen.send(a)
        seen.woken = grown(a, 0.4, a, b)
        a.wait()
        b.wait()
        seen.preempted = sum(step.preempted for step in b.steps)

        seen.send(b)
        seen.lost = grown(b, 0.4, b)
        b.kill()
        seen.send(a)
        seen.after = grown(a, 0.8, a)
        a.wait()
        seen.dropped = len(b.unanswered)
        seen.answers = a.answers | b.answers
        seen.most = max(sum(each) for _, each in watch.samples) / BUDGET
        top = python("-m", "kvcached_patch", "top", "--json", XDG_RUNTIME_DIR=str(runtime))
        (seen.top,) = json.loads(top.stdout)["devices"]
        return seen


def test_while_one_is_idle_the_other_uses_nearly_all(story: Story) -> None:
    assert story.kept > 0.3, "the idle engine had a prefix cache to give"
    assert story.alone > 0.8


def test_the_one_that_wakes_gets_its_share_from_the_busy_one(story: Story) -> None:
    assert story.woken > 0.4
    assert story.preempted > 0


def test_no_request_fails_and_the_tokens_are_those_of_stock(story: Story) -> None:
    assert len(story.answers) + story.dropped == len(story.sent)
    stock = run(
        FOLDER.name,
        "llama",
        patched=False,
        prompts=list(story.sent.values()),
        sampling={"max_tokens": OUTPUT_TOKENS},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    )
    expected = dict(zip(story.sent, stock.result["tokens"], strict=True))
    for name, answer in story.answers.items():
        assert list(answer.tokens) == expected[name]
    varied = [name for name, tokens in expected.items() if len(set(tokens)) > 8]
    assert len(varied) > 0.9 * len(expected), "outputs hardly vary"


def test_the_budget_is_never_exceeded(story: Story) -> None:
    assert 0.8 < story.most <= 1


def test_the_bytes_of_a_killed_engine_are_the_others_to_use(story: Story) -> None:
    assert story.lost > 0.4
    assert story.after > 0.8
    dead, alive = sorted(story.top["engines"], key=lambda engine: engine["alive"])
    assert (dead["alive"], dead["committed_bytes"]) == (False, 0)
    assert alive["committed_bytes"] == story.top["committed_bytes"] > 0
