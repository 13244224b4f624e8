# SPDX-License-Identifier: Apache-2.0
"""A tiny seeded LoRA adapter that changes what a tiny model says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.tiny_model import Shape, safetensors

RANK = 8


def write_adapter(model: Path, target: Path) -> Path:
    """Write an adapter for the attention of `model`, which `write_model` wrote, and return it."""
    config = json.loads((model / "config.json").read_text())
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    target.mkdir(parents=True, exist_ok=True)
    weights = safetensors(dict(_shapes(config)), config)
    (target / "adapter_model.safetensors").write_bytes(weights)
    (target / "adapter_config.json").write_text(json.dumps(adapter, indent=1) + "\n")
    return target


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = (head_dim * config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
    sizes = {"q_proj": (hidden, queries), "v_proj": (hidden, keys), "o_proj": (queries, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, (width, height) in sizes.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            yield f"{at}.lora_A.weight", (RANK, width)
            yield f"{at}.lora_B.weight", (height, RANK)
