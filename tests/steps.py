"""vLLM's real schedulers, driven as EngineCore drives them, with a worker but without a model."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from vllm import SamplingParams
from vllm.config import KVEventsConfig, VllmConfig
from vllm.distributed.kv_events import NullEventPublisher
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcached_patch import config as settings
from kvcached_patch.core.footprint import Footprint
from kvcached_patch.engines import elastic as elastic_side
from kvcached_patch.engines.allowance import Agreement
from kvcached_patch.engines.budget import Geometry, join
from kvcached_patch.engines.page_supply import PageSupply
from kvcached_patch.engines.vllm_scheduler import agree, elastic_of
from kvcached_patch.ledger import Ledger, ledger_path
from tests.bare import VERSION, model_dir
from tests.slots import SLOT_BYTES, Setup, Text, Worker

STEP_SECONDS = 0.02

init_none_hash(sha256)  # once: up to 0.28 each call draws another seed


class Clock:
    """Stands in for the ``time`` module where the scheduler's side reads it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def vllm_config(setup: Setup) -> VllmConfig:
    """A real config of a tiny model; what the CPU platform would refuse is set afterwards."""
    config = EngineArgs(
        model=model_dir("llama"),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=setup.model_tokens,
        max_num_batched_tokens=setup.step_tokens,
        max_num_seqs=setup.requests,
        enable_prefix_caching=setup.caching,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    ).create_engine_config()
    config.cache_config.block_size = setup.block_tokens
    config.cache_config.num_gpu_blocks = setup.blocks
    config.scheduler_config.async_scheduling = setup.asynchronous
    if not setup.asynchronous:
        config.parallel_config.pipeline_parallel_size = setup.depth
    return config


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    """Full attention and, if there is a window, a group of sliding-window attention."""
    size: dict[str, Any] = {
        "block_size": setup.block_tokens,
        "num_kv_heads": 1,
        "head_size": 1,
        "dtype": torch.float32,
    }
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**size))]
    if setup.window is not None:
        spec = SlidingWindowSpec(**size, sliding_window=setup.window)
        groups.append(KVCacheGroupSpec(["sliding"], spec))
    return KVCacheConfig(setup.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_scheduler(setup: Setup) -> Scheduler:
    """vLLM's scheduler; elastic if a geometry was agreed on before."""
    config = vllm_config(setup)
    return (AsyncScheduler if setup.asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=kv_cache_config(setup),
        structured_output_manager=StructuredOutputManager(config),
        block_size=setup.block_tokens,
    )


def make_request(setup: Setup, name: str, prompt: Sequence[int], tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(setup.block_tokens, sha256),
    )


def geometry(setup: Setup) -> Geometry:
    """What the workers would have agreed on."""
    most_blocks = -(-setup.model_tokens // setup.block_tokens)
    return Geometry(
        slab_blocks=setup.slab_blocks,
        block_bytes=setup.block_tokens * SLOT_BYTES,
        least_slabs=1 + -(-most_blocks // setup.slab_blocks),
        in_flight=setup.depth + 1,
        page_bytes=setup.page_counts().price * setup.page_bytes if setup.gpu_pages else 0,
    )


def agreement(setup: Setup, ask: Callable[[int], int] | None = None) -> Agreement:
    """The same, with the engine's entry in the ledger; `ask`: see `PageSupply`."""
    agreed = geometry(setup)
    if ask is None:
        return Agreement(agreed, join(agreed))
    pages = setup.page_counts()
    footprint = Footprint(agreed.in_flight, [] if pages.exact else [pages])
    return Agreement(agreed, join(agreed), footprint, PageSupply(ask, agreed.in_flight))


class _Events(NullEventPublisher):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def publish(self, events: Any) -> None:
        self.seen += events.events


class Engine:
    """EngineCore's loop (``step`` and ``step_with_batch_queue``) around a scheduler and a worker.

    The worker runs a step at the latest when the loop waits for it; with a seed, often earlier.
    """

    def __init__(
        self, setup: Setup, clock: Clock, *, elastic: bool = True, seed: int | None = None
    ) -> None:
        self.setup, self.clock = setup, clock
        self.worker = Worker(setup, elastic=elastic)
        self._flight: deque[list[Any]] = deque()  # [output, result or None]
        agree(agreement(setup, self._ask if setup.gpu_pages else None) if elastic else None)
        self.scheduler = make_scheduler(setup)
        self.elastic = elastic_of(self.scheduler)
        assert (self.elastic is not None) is elastic
        self.events = self.scheduler.kv_event_publisher = _Events()
        self.requests: dict[str, Request] = {}
        self.trace: list[dict[str, int]] = []  # scheduled tokens of each step
        self._early = None if seed is None else random.Random(seed)

    def add(self, prompt: Sequence[int], tokens: int) -> str:
        name = f"r{len(self.requests)}"
        request = make_request(self.setup, name, prompt, tokens)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, *names: str) -> None:
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.clock.now += STEP_SECONDS
            self.trace.append(dict(output.num_scheduled_tokens))
            self._flight.append([output, None])
            if self._early and self._early.random() < 0.5:
                self._work(self._early.randrange(len(self._flight)))
            if len(self._flight) < self.setup.depth and self.scheduler.has_requests():
                return True
        elif not self._flight:
            return False
        self._work(0)
        self.scheduler.update_from_output(*self._flight.popleft())
        return True

    def drain(self, most: int = 2000) -> None:
        """Step until there is nothing to do."""
        for _ in range(most):
            if not self.step():
                return
        raise AssertionError(f"not idle after {most} steps: {self.unfinished()}")

    def quiet(self, seconds: float) -> None:
        """No request comes for so long: plans are made when they are due."""
        assert not self._flight
        end = self.clock.now + seconds
        for _ in range(100):
            due = self.elastic.due() if self.elastic else None
            if due is None or due > end:
                break
            self.clock.now = max(due, self.clock.now) + 1e-6
            self.plan_idle()
        else:
            raise AssertionError("plans that change nothing are due again and again")
        self.clock.now = end

    @property
    def in_flight(self) -> int:
        """Steps scheduled whose results the scheduler has not seen."""
        return len(self._flight)

    def plan_idle(self) -> None:
        """What EngineCore does when it is woken while quiet."""
        assert self.elastic is not None
        self.worker.apply(self.elastic.plan(quiet=True), idle=True)
        self.elastic.applied()

    def unfinished(self) -> list[str]:
        return [name for name, request in self.requests.items() if not request.is_finished()]

    def check_answers(self) -> None:
        """Every request is finished, with what follows its prompt unless it was aborted.

        Stock 0.24, in a pipeline, samples a token twice that was in flight at a preemption.
        """
        assert not self.unfinished()
        twice = Version("0.28") > VERSION and not self.setup.asynchronous and self.setup.depth > 1
        for name, request in self.requests.items():
            if twice and request.num_preemptions:
                continue
            length, outputs = request.num_prompt_tokens, list(request.output_token_ids)
            wanted = Text(request.prompt_token_ids).tokens(length, length + request.max_tokens)
            if request.status == RequestStatus.FINISHED_ABORTED:
                wanted = wanted[: len(outputs)]
            assert outputs == wanted, name

    def _ask(self, slabs: int) -> int:
        """As executors do: a call reaches workers after the steps that were sent before."""
        self._work(len(self._flight) - 1)
        return self.worker.supply(slabs)

    def _work(self, last: int) -> None:
        for step in list(self._flight)[: last + 1]:
            if step[1] is None:
                step[1] = self.worker.run(step[0])


Make = Callable[..., Engine]


def engine_apart(
    monkeypatch: pytest.MonkeyPatch, runtime: Path, setup: Setup, retain: str = "none", **more: Any
) -> Engine:
    """An engine whose time is its steps', with ledgers in `runtime`."""
    clock = Clock()
    monkeypatch.setenv("KVCACHED_PATCH_RETAIN", retain)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(elastic_side, "time", clock)
    return Engine(setup, clock, **more)


def ledger() -> Ledger:
    """The one of host memory, where `engine_apart` has it."""
    return Ledger(ledger_path(settings.ledger_dir(), "host"))


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 500) for _ in range(length)]


def pool_of(engine: Engine) -> Any:
    """vLLM's block pool."""
    return engine.scheduler.kv_cache_manager.block_pool


def committed(engine: Engine) -> int:
    """Pages that the worker holds."""
    return int(engine.worker.memory.committed.sum())


def assert_drained(engine: Engine) -> None:
    """After a second nothing is committed but the null block's slab."""
    engine.quiet(1.0)
    setup = engine.setup
    slab_bytes = setup.slab_blocks * setup.block_tokens * SLOT_BYTES
    assert committed(engine) == -(-slab_bytes // setup.page_bytes)
    assert pool_of(engine).get_num_free_blocks() == setup.blocks - 1


def random_load(
    engine: Engine,
    seed: int,
    requests: int = 40,
    between: Callable[[random.Random], None] | None = None,
) -> None:
    """Requests that come and go; many share a beginning, some go on where another ended."""
    rng = random.Random(seed)
    starts = [prompt(rng, 30) for _ in range(3)]
    while len(engine.requests) < requests or engine.unfinished():
        if len(engine.requests) < requests and rng.random() < 0.4:
            for _ in range(rng.choice([1, 1, 2, 6])):
                start = rng.choice(starts)[: rng.randrange(31)]
                engine.add(start + prompt(rng, rng.randrange(1, 40)), rng.randrange(1, 40))
            ended = [r for r in engine.requests.values() if r.is_finished()]
            if ended and rng.random() < 0.5:
                earlier = rng.choice(ended)
                engine.add([*earlier.all_token_ids, 7, 8][-90:], rng.randrange(1, 20))
        if rng.random() < 0.05 and engine.unfinished():
            engine.abort(rng.choice(engine.unfinished()))
        if between:
            between(rng)
        if not engine.step():
            engine.quiet(rng.choice([0.1, 0.5, 3.0]))
        elif rng.random() < 0.05:
            engine.clock.now += rng.choice([0.3, 3.0])
    engine.drain()
