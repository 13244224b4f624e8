"""Questions asked inside vLLM's processes (by `collective_rpc`), about the process itself."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

# The library's own names, apart from the manifest, so that a wrong manifest cannot hide here.
PATCHED = {
    "vllm.v1.worker.gpu_worker": ["Worker.initialize_from_config"],
    "vllm.v1.worker.utils": ["allocate_kv_cache"],
    "vllm.v1.worker.gpu_model_runner": ["allocate_kv_cache"],
    "vllm.v1.executor.abstract": ["Executor.initialize_from_config"],
    "vllm.v1.engine.core_client": ["MPClient.__init__"],
}


def state(worker: Any = None) -> dict[str, Any]:
    """Where the code of each function comes from, and which of our modules are imported."""
    found = {}
    for module, names in PATCHED.items():
        for name in names:
            value: Any = importlib.import_module(module)
            for part in name.split("."):
                value = vars(value)[part]
            found[f"{module}.{name}"] = f"{type(value).__module__}.{type(value).__name__}"
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("kvcached_patch", "wrapt"))
    return {"types": found, "modules": ours}


def scramble(worker: Any) -> str:
    """Give one sharing layer a cache of its own, as if it were not aliased; returns its name."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    name = next(n for n in layers if layers[n].kv_sharing_target_layer_name)
    layers[name].kv_cache = torch.zeros_like(layers[name].kv_cache)
    return name
