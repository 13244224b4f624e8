"""The memories that storage comes from."""

from __future__ import annotations

import mmap

import pytest
import torch

from kvcached_patch.errors import DriverError
from kvcached_patch.memory import Memory, reserve
from tools.probes import resident_bytes

CPU = torch.device("cpu")
KINDS = ["host", "static"]
ODD = 3 * mmap.PAGESIZE + 5


def resident(memory: Memory) -> int:
    """Bytes of the range that are in memory."""
    return resident_bytes(memory.tensor.data_ptr(), memory.tensor.numel())


@pytest.mark.parametrize("kind", KINDS)
def test_length_is_exact_and_bytes_read_as_zeros(kind: str) -> None:
    memory = reserve(kind, ODD, CPU)
    assert memory.kind == kind
    assert memory.tensor.dtype == torch.int8
    assert memory.tensor.shape == (ODD,)
    assert memory.tensor.untyped_storage().nbytes() == ODD
    assert not memory.tensor.any()
    memory.tensor.fill_(3)
    assert memory.tensor.sum() == 3 * ODD
    memory.close()


def test_host_memory_is_committed_by_first_touch() -> None:
    memory = reserve("host", 64 << 20, CPU)
    assert resident(memory) == 0
    memory.tensor[10 * mmap.PAGESIZE] = 1
    memory.tensor[20 * mmap.PAGESIZE] = 1
    assert resident(memory) == 2 * mmap.PAGESIZE
    memory.close()


def test_host_memory_can_be_larger_than_the_machine() -> None:
    memory = reserve("host", 1 << 42, CPU)
    memory.tensor[-1] = 1
    assert resident(memory) == mmap.PAGESIZE
    memory.close()


def test_static_memory_is_committed_at_once() -> None:
    memory = reserve("static", 8 << 20, CPU)
    assert resident(memory) == 8 << 20
    memory.close()


def test_host_memory_refuses_to_close_under_a_view() -> None:
    memory = reserve("host", ODD, CPU)
    view = memory.tensor[4:8]
    with pytest.raises(DriverError, match="tensors still view"):
        memory.close()
    view.fill_(2)
    assert memory.tensor[:10].tolist() == [0, 0, 0, 0, 2, 2, 2, 2, 0, 0]
    del view
    memory.close()


def test_memory_outlives_its_owner_while_viewed() -> None:
    def view() -> torch.Tensor:
        return reserve("host", ODD, CPU).tensor[1:]

    kept = view()
    kept.fill_(1)
    assert kept.sum() == ODD - 1


@pytest.mark.parametrize(
    ("kind", "nbytes", "device", "error", "message"),
    [
        ("host", 4096, "meta", DriverError, "cannot serve device meta; expected cpu"),
        ("host", 0, "cpu", DriverError, "mmap of 0 bytes"),
        ("host", -1, "cpu", DriverError, "mmap of -1 bytes"),
        ("host", 1 << 62, "cpu", DriverError, f"mmap of {1 << 62} bytes"),
        ("static", 1 << 62, "cpu", DriverError, f"allocating {1 << 62} bytes on cpu"),
        ("disk", 1, "cpu", ValueError, "'disk': expected cuda, host or static"),
    ],
)
def test_what_cannot_be_had_is_refused(
    kind: str, nbytes: int, device: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        reserve(kind, nbytes, torch.device(device))
    memory: Memory = reserve("host", 4096, CPU)
    memory.close()
