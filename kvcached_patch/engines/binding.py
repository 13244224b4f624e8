"""One worker's KV cache: what was allocated for it, and from where."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from kvcached_patch import __version__, config
from kvcached_patch.core.extents import Cells, View, block_cells, slab_blocks
from kvcached_patch.core.layers import LayerPlan, alias_sharing, plan_layers
from kvcached_patch.engines.supply import StorageSupply
from kvcached_patch.engines.vllm_static import static_because
from kvcached_patch.errors import ConfigError, LayerPlanError, SeamMismatch
from kvcached_patch.memory import DEVICE_TYPES, Backing, Memory, reserve
from kvcached_patch.memory.driver import INSTALL, installed
from kvcached_patch.pool import ElasticPool
from kvcached_patch.seams.apply import armed

logger = logging.getLogger("vllm.kvcached_patch")


@dataclass(frozen=True)
class Report:
    """What one worker did: the proof of activity that EngineCore asks each worker for.

    pool: kind of memory, "stock" where vLLM allocated it as it came, "none" without a KV cache.
    pools: owner-only pool count. aliased: sharing layers bound to their target's cache.
    ranges: separate ranges of memory the pools lie in. reserved_bytes: their total length.
    min_slab_blocks: blocks per slab that cover a page in every pool; 0 if the memory cannot be
    given back in parts. block_bytes: of one block, in all pools together. seams: ids in place in
    the worker's process. device: what the memory is of, by a name that means the same in every
    process of the machine `machine`. supplied: pages have to be had before they are promised;
    then cells, range_bytes and page_bytes say which ones a slab needs.
    """

    pid: int
    version: str
    runner: str
    pool: str
    pools: int
    aliased: int
    ranges: int
    reserved_bytes: int
    min_slab_blocks: int
    block_bytes: int
    seams: tuple[str, ...]
    device: str
    machine: str
    supplied: bool
    cells: tuple[Cells, ...]
    range_bytes: tuple[int, ...]
    page_bytes: int


class Binding:
    """One real allocation in progress: opened by the gate, filled by the allocation seams."""

    def __init__(self, worker: Any) -> None:
        """Bind the storage of `worker`, a vLLM ``Worker`` with its model loaded."""
        self.worker = ref(worker)
        self.runner = worker.model_runner
        self.stock = static_because(worker.vllm_config) is not None
        # vLLM's own two classes: v1/worker/gpu_model_runner.py, v1/worker/gpu/model_runner.py.
        is_v2 = any(
            cls.__module__.startswith("vllm.v1.worker.gpu.") for cls in type(self.runner).__mro__
        )
        self.runner_kind = "V2" if is_v2 else "V1"
        self.plan = LayerPlan(owners=(), aliases={})
        self.memories: list[Memory] = []
        self.caches: dict[str, Any] = {}
        self._block_dims: Mapping[str, int] = {}
        self.cells: tuple[Cells, ...] = ()
        self.num_blocks = 0
        self.pool: ElasticPool | None = None

    def allocate(
        self,
        kv_cache_config: Any,
        stored: list[Collection[str]],
        runner_only: Collection[str],
        sharing: Mapping[str, str],
        ranges: int,
        call: Callable[[], Any],
    ) -> Any:
        """Run vLLM's allocation with our memory under it; `ranges` of them must be drawn."""
        plan = plan_layers(
            [group.layer_names for group in kv_cache_config.kv_cache_groups],
            stored,
            runner_only=runner_only,
            sharing=sharing,
        )
        with StorageSupply(_reserve) as supply:
            result = call()
        if len(supply.taken) != ranges:
            raise SeamMismatch(
                f"vLLM's allocation drew {len(supply.taken)} ranges of memory; expected {ranges}: "
                "its code allocates in a way this version of kvcached-patch does not know"
            )
        self.plan, self.memories = plan, supply.taken
        return result

    def shaped(self, caches: dict[str, Any], block_dims: Mapping[str, int]) -> dict[str, Any]:
        """Alias the sharing layers in vLLM's finished layer -> cache map, and remember it.

        block_dims: of each layer's tensors, the dimension that counts blocks; 0 if not named.
        """
        alias_sharing(caches, self.plan.aliases)
        self.caches = dict(caches)
        self._block_dims = block_dims
        return caches

    def measure(self, num_blocks: int) -> None:
        """Read off the finished views which bytes each block covers.

        Where that cannot be told, nothing is ever given back, which is said.
        """
        self.num_blocks = num_blocks
        if not self.page_bytes:
            return
        try:
            self.cells = block_cells(self._views(), num_blocks)
        except LayerPlanError as error:
            logger.warning("kvcached-patch: memory once touched stays committed: %s", error)

    def divide(self, slab_blocks: int) -> None:
        """Become elastic, in slabs of so many blocks."""
        self.pool = ElasticPool(
            self.memories, self._sizes, self.cells, self.num_blocks, slab_blocks, self._backing
        )

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(memory.tensor.numel() for memory in self.memories)

    @property
    def _backing(self) -> Backing | None:
        return self.memories[0].backing if self.memories else None

    @property
    def page_bytes(self) -> int:
        """The memory's page, 0 if it cannot be given back in parts."""
        return self.memories[0].page_bytes if self.memories else 0

    def _views(self) -> Iterator[View]:
        starts = [memory.tensor.data_ptr() for memory in self.memories]
        for name, cache in self.caches.items():
            for tensor in cache if isinstance(cache, list) else [cache]:
                start = tensor.untyped_storage().data_ptr()
                yield View(
                    name,
                    starts.index(start),
                    tensor.data_ptr() - start,
                    tuple(tensor.shape),
                    tensor.stride(),
                    tensor.element_size(),
                    self._block_dims.get(name, 0),
                )

    def report(self) -> Report:
        """State what was bound."""
        return Report(
            pid=os.getpid(),
            version=__version__,
            runner=self.runner_kind,
            pool="stock" if self.stock else self.memories[0].kind if self.memories else "none",
            pools=self.plan.pool_count,
            aliased=len(self.plan.aliases),
            ranges=len(self.memories),
            reserved_bytes=sum(self._sizes),
            min_slab_blocks=slab_blocks(self.cells, self.page_bytes) if self.cells else 0,
            block_bytes=sum(cell.stride for cell in self.cells),
            seams=tuple(entry.seam.id for entry in armed() if entry.applied),
            device=self._backing.uuid if self._backing else "host",
            machine=socket.gethostname(),
            supplied=self._backing is not None,
            cells=self.cells,
            range_bytes=self._sizes,
            page_bytes=self.page_bytes,
        )


def pool_kind(device_type: str) -> str:
    """The kind of memory that this setting gives on devices of this type."""
    kind = config.load().pool
    if kind != "auto":
        return kind
    if device_type == "cuda" and torch.version.cuda and installed():
        return "cuda"
    return "host" if device_type == "cpu" else "static"


def _reserve(nbytes: int, device: torch.device, beside: Memory | None) -> Memory:
    kind = pool_kind(device.type)
    if DEVICE_TYPES.get(kind, device.type) != device.type:
        fitting = (name for name, served in DEVICE_TYPES.items() if served == device.type)
        raise ConfigError(
            f"{config.POOL}={kind!r}: the KV cache is on {device}; "
            f"expected one of: {', '.join(['auto', *fitting, 'static'])}"
        )
    if device.type == "cuda" and torch.version.cuda and not installed():
        logger.warning(
            "kvcached-patch: memory once touched stays committed: cuda-bindings is not installed; "
            "%s",
            INSTALL,
        )
    return reserve(kind, nbytes, device, beside)
