"""Layers of any spec and backend of vLLM, and which bytes their blocks may be."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder

from kvcached_patch.core.pages import Plan
from kvcached_patch.engines import vllm_worker
from tests.bare import Stage, worker_of

Backend = type[AttentionBackend]


class NoMetadata(AttentionMetadataBuilder[Any]):
    """No step is run, so no backend has to prepare one; most could not without their GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what vLLM passes to every builder."""

    def build(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def idle(backend: Backend) -> Backend:
    """A backend of vLLM, its shapes and strides as they are, that prepares no steps."""
    return type(backend.__name__, (backend,), {"get_builder_cls": staticmethod(lambda: NoMetadata)})


class SpecLayer(AttentionLayerBase):
    """A layer of vLLM's own base class that asks for a given spec under a given backend."""

    def __init__(self, spec: Any, backend: Backend) -> None:
        self._spec, self._backend = spec, idle(backend)

    def get_attn_backend(self) -> Backend:
        return self._backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self._spec


def register(stage: Stage, specs: dict[str, Any], backend: Backend) -> None:
    """Put layers with these specs into a stage's forward context."""
    stage.layers.update({name: SpecLayer(spec, backend) for name, spec in specs.items()})


def use_backend(stage: Stage, backend: Backend) -> None:
    """Let all real attention layers of a stage be of this backend."""
    quiet = idle(backend)
    for layer in stage.layers.values():
        layer.attn_backend = quiet


def binding_of(runner: Any) -> vllm_worker.Binding:
    return vllm_worker._bound(worker_of(runner))


def check_blocks(runner: Any, *, keys_first: Collection[str] = ()) -> None:
    """Write every block through every view; whose bytes they are must be what the pool thinks.

    keys_first: layers whose views are ``[keys or values, block, …]`` instead of ``[block, …]``.
    What the views of a block can write is (i) inside the block's extents and (ii) no other
    block's, and (iii) it stays while everything else is given back.
    """
    binding = binding_of(runner)
    count = binding.num_blocks
    assert 1 < count < 256, "one byte must tell the blocks apart"
    raw = [memory.tensor.view(torch.uint8) for memory in binding.memories]
    owners = [torch.zeros_like(part) for part in raw]
    assert binding.cells, "the blocks could not be told apart"
    for cell in binding.cells:
        for block in range(count):
            start = cell.base + block * cell.stride
            extent = owners[cell.range_index][start : start + cell.stride]
            assert not extent.any(), f"two extents share bytes at {start}"
            extent.fill_(block + 1)
    blocks = [
        tensor.view(torch.uint8).movedim(int(name in keys_first), 0).unflatten(0, (count, -1))
        for name, cache in binding.caches.items()
        for tensor in (cache if isinstance(cache, list) else [cache])
    ]

    write_all(blocks)
    for part, owner in zip(raw, owners, strict=True):
        assert ((part == 0) | (part == owner)).all(), "a view writes outside its block's extents"
    assert_whole(blocks, range(count))

    slab = vllm_worker.report(worker_of(runner))["min_slab_blocks"]
    binding.divide(slab)
    slabs = [tuple(range(i, min(i + slab, count))) for i in range(0, count, slab)]
    apply = plans(binding)
    apply(commit=tuple(range(len(slabs))))
    write_all(blocks)
    for kept in {0, len(slabs) // 2, len(slabs) - 1}:
        others = tuple(i for i in range(len(slabs)) if i != kept)
        apply(release=others)
        assert_whole(blocks, slabs[kept])
        if len(slabs) > 2:
            assert any(not group[b].any() for group in blocks for i in others for b in slabs[i]), (
                "nothing was given back"
            )
        apply(commit=others)
        assert_whole(blocks, slabs[kept])
        write_all(blocks)
    apply(release=tuple(range(len(slabs))))
    assert not any(part.any() for part in raw), "bytes that belong to no slab"


def plans(binding: vllm_worker.Binding) -> Callable[..., None]:
    """A scheduler's side of the pool: numbered plans, each of a quiet step."""
    sequence = iter(range(1 << 20))

    def apply(**changes: tuple[int, ...]) -> None:
        assert binding.pool is not None
        binding.pool.apply(Plan(next(sequence), **changes), idle=True)

    return apply


def write_all(blocks: list[torch.Tensor]) -> None:
    """Fill every element that the views have of block b with b + 1."""
    for views in blocks:
        for block in range(len(views)):
            views[block].fill_(block + 1)


def assert_whole(blocks: list[torch.Tensor], of: Collection[int]) -> None:
    for views in blocks:
        for block in of:
            assert (views[block] == block + 1).all(), f"block {block} lost what was written to it"
