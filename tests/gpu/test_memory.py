"""Memory of a real GPU under PyTorch's tensors: pages that come and go below work in flight."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from kvcached_patch.core.extents import Cells
from kvcached_patch.core.pages import Plan
from kvcached_patch.errors import DriverError, PoolExhausted
from kvcached_patch.ledger import Ledger, ledger_path
from kvcached_patch.memory import reserve
from kvcached_patch.pool import ElasticPool
from tests.gpu import measured

DEVICE = torch.device("cuda", 0)
MIB = 1 << 20
SLACK = 64 * MIB  # what the driver may keep for page tables and the like


@contextmanager
def memory(nbytes: int) -> Iterator[Any]:
    """A range of the first GPU."""
    found = reserve("cuda", nbytes, DEVICE)
    try:
        yield found
    finally:
        torch.cuda.synchronize()
        gc.collect()
        found.close()


def refused(kind: type[Exception], words: str, call: Callable[[], object]) -> None:
    """The call raises this error, whose message has these words."""
    try:
        call()
    except kind as error:
        found = str(error)
    else:
        found = "no error"
    assert words in found, found


def free() -> int:
    """Bytes that the driver says are free, PyTorch holding none in store."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


def test_a_range_is_a_tensor_of_zeros_that_costs_next_to_nothing() -> None:
    torch.ones(8, device=DEVICE).any()  # the kernels that are loaded below
    before = free()
    with memory(8 << 30) as range_:
        tensor = range_.tensor
        assert (tensor.dtype, tensor.shape) == (torch.int8, (8 << 30,))
        assert tensor.device == DEVICE
        measured.FOUND["bytes that 8 GiB of addresses take"] = before - free()
        assert before - free() < SLACK + 64 * MIB
        assert not tensor[:: 1 << 16].any()
        assert not tensor[-4096:].any()
        del tensor
    assert before - free() < SLACK


def test_free_memory_before_at_and_after_a_burst() -> None:
    with memory(4 << 30) as range_:
        before = free()
        range_.commit(0, 2 << 30)
        range_.tensor[: 2 << 30] = 7
        at = free()
        range_.fence()
        range_.release(0, 2 << 30)
        range_.backing.keep(0)
        after = free()
        measured.FOUND["free bytes before, at, after a burst of 2 GiB"] = [before, at, after]
        assert abs(before - at - (2 << 30)) < SLACK
        assert abs(before - after) < SLACK


def test_a_page_reads_as_zeros_at_every_commit_and_astray() -> None:
    with memory(64 * MIB) as range_:
        page, tensor = range_.page_bytes, range_.tensor
        for _ in range(3):
            range_.commit(0, 8 * page)
            assert not tensor[: 8 * page].any()
            tensor[: 8 * page] = -1
            range_.fence()
            range_.release(0, 8 * page)
            assert not tensor[: 8 * page].any(), "a stray read"
        tensor[20 * page] = 5  # what warm-up does at blocks it invents
        assert int(tensor[21 * page]) == 5, "one page lies under all"
        range_.fence()
        range_.release(0, 64 * MIB)
        assert not tensor.any()
        del tensor


def test_a_view_keeps_the_range() -> None:
    range_ = reserve("cuda", 64 * MIB, DEVICE)
    view = range_.tensor[1024:2048].view(torch.float16)
    for _ in range(2):
        refused(DriverError, "tensors still view it", range_.close)
        assert not view.any()
        assert not range_.tensor.any()
    del view
    range_.close()


def test_a_range_that_nobody_closes_goes_with_its_last_view() -> None:
    before = free()
    range_ = reserve("cuda", 1 << 30, DEVICE)
    range_.commit(0, 1 << 30)
    view = range_.tensor[:8]
    del range_
    gc.collect()
    assert before - free() > (1 << 30) - SLACK
    assert not view.any()
    del view
    gc.collect()
    assert before - free() < SLACK


@triton.jit
def _fill(target, value, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + offsets, value, mask=offsets < n)


def fill(tensor: torch.Tensor, value: int) -> None:
    """Launch a kernel that fills a flat tensor."""
    n = tensor.numel()
    _fill[(triton.cdiv(n, 4096),)](tensor, value, n, BLOCK=4096)


def test_a_kernel_writes_while_other_pages_go() -> None:
    """By an `ElasticPool`, as a worker does it, two plans in flight and no wait between them.

    On a stream of its own, as vLLM's, kept so busy that pages go while steps are in flight.
    """
    slabs = 32
    with memory(slabs * 8 * MIB) as range_, torch.cuda.stream(torch.cuda.Stream()):
        size = range_.tensor.numel()
        each = size // slabs
        pool = ElasticPool([range_], [size], [Cells(0, 0, each)], slabs, 1, range_.backing)
        parts = [range_.tensor[i * each : (i + 1) * each] for i in range(slabs)]
        committed: set[int] = set()
        content: dict[int, int] = {}
        leaving: set[int] = set()
        for step in range(200):
            commit = {(step * 7 + i) % slabs for i in range(3)} - committed - leaving
            release = {s for s in committed if (s * 13 + step) % 5 == 0}
            pool.supply(len(committed | commit | leaving))
            pool.apply(Plan(step, tuple(commit), tuple(release), keep=slabs), idle=False)
            content |= dict.fromkeys(commit, 0)
            torch.cuda._sleep(2_000_000)  # clock ticks: about a millisecond
            for slab in committed | commit:  # also what this plan releases: its step may use it
                content[slab] = (step + slab) % 100 + 1
                fill(parts[slab], content[slab])
            committed = (committed | commit) - release
            leaving = release
            if step % 20 == 0:
                for slab in committed:
                    assert bool((parts[slab] == content[slab]).all()), f"slab {slab}"
        del parts


def test_a_graph_replays_after_its_pages_were_given_back_and_taken_anew() -> None:
    with memory(64 * MIB) as range_:
        page = range_.page_bytes
        range_.commit(0, 2 * page)
        part = range_.tensor[: 2 * page].view(torch.float32)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            part.add_(1.0)  # warm
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            part.add_(1.0)
        for _ in range(3):
            part.zero_()
            graph.replay()
            graph.replay()
            assert bool((part == 2.0).all())
            range_.fence()
            range_.release(0, 2 * page)
            range_.backing.keep(0)
            range_.fence()
            range_.commit(0, 2 * page)
            assert not part.any()
        del part, graph


def test_out_of_memory_is_told_apart_and_leaves_what_was_there() -> None:
    with memory(256 << 30) as range_:
        range_.commit(0, 4 * range_.page_bytes)
        range_.tensor[:8] = 3
        owned = range_.backing.owned
        have = range_.backing.supply((256 << 30) // range_.page_bytes)
        assert owned < have < (256 << 30) // range_.page_bytes
        rest = 8 * range_.page_bytes, 256 << 30
        refused(PoolExhausted, "pages of", lambda: range_.commit(*rest))
        range_.backing.keep(owned)
        assert range_.tensor[:8].tolist() == [3] * 8
        assert not range_.tensor[8 * range_.page_bytes :: 1 << 26].any()


def _take(path: str, budget_pages: int, rounds: int, found: Any) -> None:
    """One of several processes on one GPU: reserve in the ledger, commit, write, check, release."""
    range_ = reserve("cuda", budget_pages * 2 * MIB, DEVICE)
    page, tensor = range_.page_bytes, range_.tensor
    account = Ledger(Path(path)).join("engine", reserved=tensor.numel())
    most = 0
    for number in range(rounds):
        pages = 0
        while pages < budget_pages and account.reserve(page):
            range_.commit(pages * page, (pages + 1) * page)
            pages += 1
        tensor[: pages * page] = number % 100 + 1
        torch.cuda.synchronize()
        assert bool((tensor[: pages * page] == number % 100 + 1).all())
        most = max(most, sum(engine.committed for engine in Ledger(Path(path)).engines()) // page)
        range_.fence()
        range_.release(0, pages * page)
        range_.backing.keep(0)
        account.release(pages * page)
    account.close()
    found.put(most)


def test_two_processes_on_one_gpu_under_one_budget() -> None:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, memory(2 * MIB) as range_:
        path = ledger_path(Path(folder, "ledgers"), range_.backing.uuid)
        pages = 64
        Ledger(path).set_total(pages * range_.page_bytes)
        found = spawn.Queue()
        both = [spawn.Process(target=_take, args=(str(path), pages, 40, found)) for _ in range(2)]
        for process in both:
            process.start()
        most = [found.get(timeout=120) for _ in both]
        for process in both:
            process.join(30)
            assert process.exitcode == 0
        assert 0 < max(most) <= pages


def test_rates_of_commit_and_release() -> None:
    """One page at a time and many; from spare pages and from none."""
    pages = 256
    with memory(pages * 2 * MIB) as range_:
        page = range_.page_bytes
        for name, spare, run in (
            ("spare pages, one by one", pages, 1),
            ("spare pages, all at once", pages, pages),
            ("no spare pages, all at once", 0, pages),
        ):
            commits, releases = [], []
            for _ in range(5):
                range_.backing.keep(0)
                range_.backing.supply(spare)
                torch.cuda.synchronize()
                start = time.perf_counter()
                for first in range(0, pages, run):
                    range_.commit(first * page, (first + run) * page)
                middle = time.perf_counter()
                range_.fence()
                fenced = time.perf_counter()
                for first in range(0, pages, run):
                    range_.release(first * page, (first + run) * page)
                commits.append(middle - start)
                releases.append(time.perf_counter() - fenced)
                range_.fence()
            measured.times(f"commit, {name}, per page", commits, pages)
            measured.times(f"release, {name}, per page", releases, pages)


def test_p4_an_empty_plan_costs_nothing_to_speak_of() -> None:
    with memory(64 * MIB) as range_:
        cells = [Cells(0, 0, 2 * MIB)]
        pool = ElasticPool([range_], [64 * MIB], cells, 32, 1, range_.backing)
        pool.supply(4)
        pool.apply(Plan(0, (0,), keep=4), idle=False)
        plans = [Plan(sequence, keep=4) for sequence in range(1, 10_001)]
        torch.cuda.synchronize()
        fill(range_.tensor[: 2 * MIB], 1)  # an empty plan waits for nothing
        start = time.perf_counter()
        for plan in plans:
            pool.apply(plan, idle=False)
        measured.times("an empty plan", [time.perf_counter() - start], len(plans))
