"""A load format of vLLM: every weight from a random stream of its own, seeded by its name."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from tools.tiny_model import distribution

LOAD_FORMAT = "seeded"


@register_model_loader(LOAD_FORMAT)
class SeededLoader(DummyModelLoader):
    """Serves models of any architecture, so that greedy output depends on their KV cache."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Fill all weights; scales of quantization, which are scalars, stay as they are."""
        config = model_config.hf_text_config.to_dict()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim():
                    seed = hashlib.sha256(name.encode()).digest()[:7]
                    stream = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
                    weight.copy_(_values(name, tuple(weight.shape), config, stream))


def _values(
    name: str, shape: tuple[int, ...], config: dict[str, Any], stream: torch.Generator
) -> torch.Tensor:
    """Weights that neither blow up nor die out; a Mamba layer's decay is between 1 and 4."""
    kind = name.rpartition(".")[2]
    if kind in ("A", "A_log"):
        decay = 1 + 3 * torch.rand(shape, generator=stream)
        return -decay if kind == "A" else decay.log()
    if kind == "dt_bias":
        return (0.02 + 0.48 * torch.rand(shape, generator=stream)).expm1().log()
    mean, std = distribution(name, shape, config)
    return mean + std * torch.randn(shape, generator=stream)
