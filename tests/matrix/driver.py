"""An engine stepped from the front end, so that every run of a job schedules the same."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.matrix.probes import contents
from tools.engine_job import SAMPLING_DEFAULTS, chosen_logprobs, make_engine, probe
from tools.probes import kv_resident

QUIET_SECONDS = 0.5
PATIENCE_SECONDS = 60.0

Job = dict[str, Any]
Found = dict[str, Any]
Prompt = Sequence[int] | dict[str, Any]


class Driver:
    """Runs batches, each from its first request to its last answer, and says what came of them."""

    def __init__(self, job: Job, model: str, **engine: Any) -> None:
        """Start an engine of the model directory; `engine`: settings of ``vllm.LLM``."""
        self._job = job
        self.llm = make_engine({"model": model, "engine": engine})
        self.engine = self.llm.llm_engine

    def run(
        self,
        prompts: Sequence[Prompt],
        *,
        adapters: Sequence[Any] = (),
        abort: Sequence[int] = (),
        after_steps: int = 0,
        **sampling: Any,
    ) -> Found:
        """Run one batch of token ids, or of vLLM's own kind of prompt.

        adapters: a LoRA request or None for each prompt. abort: prompts given up after so many
        steps. Found, of every sequence that got a token, in order: `tokens`, `logprobs`; of every
        prompt: `cached`, its tokens found in the prefix cache. `extra`: tokens that came together
        with another one of their sequence, thanks to speculation. `steps`: how many.
        """
        from vllm import SamplingParams

        self.llm.sleep(level=0)  # no step before all are there
        for i, prompt in enumerate(prompts):
            self.engine.add_request(
                str(i),
                prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)},
                SamplingParams(**{**SAMPLING_DEFAULTS, **sampling}),
                lora_request=adapters[i] if adapters else None,
            )
        self.added()
        self.llm.wake_up(tags=["scheduling"])
        completions: dict[tuple[int, int], Any] = {}
        lengths: Counter[tuple[int, int]] = Counter()
        cached: dict[int, int] = {}
        steps = extra = 0
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                number = int(output.request_id)
                cached[number] = output.num_cached_tokens
                for completion in output.outputs:
                    key = number, completion.index
                    extra += max(len(completion.token_ids) - lengths[key] - 1, 0)
                    lengths[key] = len(completion.token_ids)
                    completions[key] = completion
            steps += 1
            if steps == after_steps:
                self.engine.abort_request([str(number) for number in abort])
        ordered = [completions[key] for key in sorted(completions)]
        return {
            "tokens": [list(completion.token_ids) for completion in ordered],
            "logprobs": [chosen_logprobs(completion) for completion in ordered],
            "cached": [cached[number] for number in sorted(cached)],
            "extra": extra,
            "steps": steps,
        }

    def added(self) -> None:
        """All requests of a batch are there, none has been scheduled."""

    def emptied(self) -> Found:
        """Empty the prefix cache and let the engine be quiet: what memory is left.

        `reset`: whether vLLM found all blocks free. `resident_bytes`, `reserved_bytes`: of all
        workers together.
        """
        reset = self.llm.reset_prefix_cache()
        self.rest()
        return {"reset": reset, **self.memory()}

    def rest(self) -> None:
        """Be quiet, if elastic until memory is given back: in processes of its own by itself."""
        end = time.monotonic() + PATIENCE_SECONDS
        while self._job["elastic"] and time.monotonic() < end:
            memory = self.memory()
            if memory["resident_bytes"] <= memory["reserved_bytes"] / 4:
                return
            time.sleep(0.1)

    def memory(self) -> dict[str, int]:
        """Resident and reserved bytes of the KV caches of all workers."""
        workers = self.llm.collective_rpc(kv_resident)
        sizes = ("resident_bytes", "reserved_bytes")
        return {size: sum(found[size] for found in workers) for size in sizes}

    def close(self) -> Found:
        """What each worker answers to the job's probes; then the engine is shut down."""
        found = probe(self.llm, self._job)
        self.engine.engine_core.shutdown()
        return found


class InProcess(Driver):
    """A driver whose scheduler is in this very process, and so can be asked."""

    def __init__(self, job: Job, model: str, **engine: Any) -> None:
        """Start an engine that publishes its KV events to `events`, one list for each batch."""
        from vllm.distributed.kv_events import NullEventPublisher

        super().__init__(job, model, **engine)
        self._scheduler = self.engine.engine_core.engine_core.scheduler
        self._requests: list[Any] = []
        self.events: list[list[str]] = []
        events = self.events

        class Recorder(NullEventPublisher):
            def publish(self, batch: Any) -> None:
                events.append([repr(event) for event in batch.events])

        self._scheduler.kv_event_publisher = Recorder()

    def added(self) -> None:
        self._requests = list(self._scheduler.requests.values())

    def contents(self) -> dict[str, str]:
        """What the prefix cache's blocks hold, by their hashes."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        blocks = self._scheduler.kv_cache_manager.block_pool.blocks
        cached = [block for block in blocks if block.block_hash is not None]
        where = [(get_group_id(block.block_hash), block.block_id) for block in cached]
        (held,) = self.llm.collective_rpc(contents, args=(where,))
        return {repr(block.block_hash): digest for block, digest in zip(cached, held, strict=True)}

    def rest(self) -> None:
        """In vLLM's in-process mode only the steps of a request bring plans to the worker."""
        time.sleep(QUIET_SECONDS)
        self.run([[5, 6, 7]], max_tokens=3)

    def run(self, prompts: Sequence[Prompt], **options: Any) -> Found:
        """Found besides: `preemptions`, how many; `leaked`, blocks that are not free afterwards."""
        found = super().run(prompts, **options)
        pool = self._scheduler.kv_cache_manager.block_pool
        found["preemptions"] = sum(request.num_preemptions for request in self._requests)
        found["leaked"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one: null block
        return found
