"""A worker without a model: it keeps, for each KV slot, what it would have been computed from.

A slot holds a signature of its token and of all before it; pages that are given back lose theirs.
So a step that meets a page too early or too late, or another request's block, is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import PLAN, PageCounts
from kvcached_patch.pool import ElasticPool

SLOT_BYTES = 8


@dataclass(frozen=True)
class Setup:
    """Size and kind of an engine; by default the borders of slabs and pages do not agree.

    depth: batches in flight; with the synchronous scheduler as in a pipeline. window: tokens of
    the second KV cache group's sliding window, None for one group. gpu_pages: what each worker's
    device has, where pages must be had before they are promised.
    """

    blocks: int = 61
    block_tokens: int = 4
    slab_blocks: int = 3
    page_bytes: int = 80
    asynchronous: bool = False
    depth: int = 1
    caching: bool = True
    window: int | None = None
    step_tokens: int = 64
    requests: int = 16
    model_tokens: int = 256
    gpu_pages: tuple[int, ...] = ()

    @property
    def slots(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def layout(self) -> tuple[list[Cells], list[int]]:
        """Cells and bytes of a worker's one range."""
        return [Cells(0, 0, self.block_tokens * SLOT_BYTES)], [self.slots * SLOT_BYTES]

    def page_counts(self) -> PageCounts:
        cells, sizes = self.layout
        return PageCounts(cells, sizes, self.blocks, self.slab_blocks, self.page_bytes)


class Text:
    """A prompt and what follows it, which the prompt alone decides, with a signature per token."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt_length = len(prompt)
        self._tokens = list(prompt)
        self._signatures: list[int] = []

    def tokens(self, start: int, end: int) -> list[int]:
        self.signatures(start, end)
        return self._tokens[start:end]

    def signatures(self, start: int, end: int) -> list[int]:
        while (done := len(self._signatures)) < end:
            before = self._signatures[-1] if done else 0
            if done == len(self._tokens):
                self._tokens.append(before % 499 + 3)
            self._signatures.append(hash((before, self._tokens[done])) % (1 << 62) + 1)
        return self._signatures[start:end]


class Pages:
    """A device's pages; only so many of them are this process's to take."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.neighbours: list[Pages] = []  # of other processes on the same device
        self.owned = self.used = self.asked = 0

    def supply(self, pages: int) -> int:
        self.asked += 1
        there = self.capacity - sum(other.owned for other in self.neighbours)
        self.owned = max(self.owned, min(pages, there))
        return self.owned

    def keep(self, pages: int) -> None:
        self.owned = max(self.used, min(self.owned, pages))


class SlotMemory:
    """One range of slots; its pages know whether they are committed.

    backing: where they must have come from before; None if they need not.
    """

    def __init__(self, slots: int, page_bytes: int, backing: Pages | None = None) -> None:
        self.page_bytes = page_bytes
        self.backing = backing
        self.slots = np.zeros(slots, dtype=np.int64)
        self.committed = np.zeros(-(-slots * SLOT_BYTES // page_bytes), dtype=bool)

    def fence(self) -> None:
        """Steps are over when they return."""

    def commit(self, start: int, end: int) -> None:
        pages = self.committed[start // self.page_bytes : -(-end // self.page_bytes)]
        assert not pages.any(), f"bytes {start}-{end} are committed already"
        pages[:] = True
        self._count()

    def release(self, start: int, end: int) -> None:
        self.committed[start // self.page_bytes : -(-end // self.page_bytes)] = False
        self._count()
        self.slots[start // SLOT_BYTES : -(-end // SLOT_BYTES)] = 0

    def _count(self) -> None:
        if self.backing is not None:
            self.backing.used = int(self.committed.sum())
            assert self.backing.used <= self.backing.owned, "a page that was not promised"

    def has(self, slots: np.ndarray) -> bool:
        """Whether the slots lie in committed pages."""
        first = slots * SLOT_BYTES
        ends = np.concatenate([first, first + SLOT_BYTES - 1])
        return bool(self.committed[ends // self.page_bytes].all())


class Worker:
    """Runs steps in the order in which they were scheduled, told by their SchedulerOutputs."""

    def __init__(self, setup: Setup, *, elastic: bool) -> None:
        self._setup, self._elastic = setup, elastic
        self.devices = [Pages(capacity) for capacity in setup.gpu_pages]
        # The first one's steps are run; the others carry out the same plans.
        self.memories = [self._memory(backing) for backing in self.devices or [None]]
        self.memory = self.memories[0]
        self.memory.committed[:] = not elastic
        self._pools = [self._elastic_pool(memory) for memory in self.memories]
        self._texts: dict[str, Text] = {}
        self._tables: dict[str, list[list[int]]] = {}
        self.hits = 0  # tokens of new requests found in the prefix cache

    def _memory(self, backing: Pages | None) -> SlotMemory:
        return SlotMemory(self._setup.slots, self._setup.page_bytes, backing)

    def _elastic_pool(self, memory: SlotMemory) -> ElasticPool:
        setup = self._setup
        cells, sizes = setup.layout
        return ElasticPool([memory], sizes, cells, setup.blocks, setup.slab_blocks, memory.backing)

    def supply(self, slabs: int) -> int:
        """What EngineCore asks of every worker."""
        return min(pool.supply(slabs) for pool in self._pools)

    def run(self, output: Any) -> ModelRunnerOutput:
        """The plan, then the writes of the whole step, then its reads, then sampling."""
        if self._elastic:
            self.apply(vars(output)[PLAN], idle=not output.total_num_scheduled_tokens)
        else:
            assert PLAN not in vars(output)
        steps = self._noticed(output)
        for name, (start, end, _) in steps.items():
            for group in range(len(self._tables[name])):
                slots = self._slots(name, group, start, end)
                self.memory.slots[slots] = self._texts[name].signatures(start, end)
        for name, (start, end, _) in steps.items():
            for group in range(len(self._tables[name])):
                window = self._setup.window if group else None
                first = 0 if window is None else max(start + 1 - window, 0)
                found = self.memory.slots[self._slots(name, group, first, end)]
                assert found.tolist() == self._texts[name].signatures(first, end), "contents lost"
        names = list(steps)
        sampled = [
            self._texts[name].tokens(end, end + 1) if end >= known else []
            for name, (_, end, known) in steps.items()
        ]
        index = {name: i for i, name in enumerate(names)}
        if not names:
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput(names, index, sampled_token_ids=sampled)

    def apply(self, plan: Any, *, idle: bool) -> None:
        for pool in self._pools:
            pool.apply(plan, idle=idle)
        each = self._setup.slab_blocks
        for slab in plan.release:
            blocks = range(slab * each, min((slab + 1) * each, self._setup.blocks))
            assert idle or self.holds(blocks), "given back before the step has run"

    def holds(self, blocks: Sequence[int]) -> bool:
        """Whether these blocks are in committed pages."""
        each = self._setup.block_tokens
        return all(self.memory.has(np.arange(b * each, (b + 1) * each)) for b in blocks)

    def _noticed(self, output: Any) -> dict[str, tuple[int, int, int]]:
        """Per scheduled request: tokens computed before and after the step, tokens known."""
        assert not vars(output).get("kv_cache_block_copies")
        for name in output.finished_req_ids:
            self._texts.pop(name, None)
            self._tables.pop(name, None)
        counts = {}
        for new in output.scheduled_new_reqs:
            self._texts[new.req_id] = Text(new.prompt_token_ids)
            self._tables[new.req_id] = [list(ids) for ids in new.block_ids]
            known = len(new.prefill_token_ids or new.prompt_token_ids)
            counts[new.req_id] = new.num_computed_tokens, known
            self.hits += new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, new_ids, start, outputs in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(ids) for ids in new_ids]
            else:
                for table, ids in zip(self._tables[name], new_ids or (), strict=False):
                    table += ids
            counts[name] = start, self._texts[name].prompt_length + outputs
        scheduled = output.num_scheduled_tokens
        assert counts.keys() == scheduled.keys()
        return {name: (start, start + scheduled[name], n) for name, (start, n) in counts.items()}

    def _slots(self, name: str, group: int, start: int, end: int) -> np.ndarray:
        """Where the KV of these tokens is, which must be in committed pages."""
        size = self._setup.block_tokens
        positions = np.arange(start, end)
        blocks = np.array(self._tables[name][group])[positions // size]
        slots: np.ndarray = blocks * size + positions % size
        assert blocks.all(), "a token of the null block"
        assert self.memory.has(slots), f"{name}: the step touches pages that are not committed"
        return slots
