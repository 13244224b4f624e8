"""Tiny MaxText models, one per way in which a decoder hands out its caches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.resources import files
from typing import Any

DIMS = {
    "base_emb_dim": 32,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 32,
    "head_dim": 16,
    "vocab_size": 64,
}
MOE = {"base_moe_mlp_dim": 32, "num_experts": 4, "num_experts_per_tok": 2}
GLOBAL_HEAD = 144  # caches are padded to heads of 128 or 256: these differ


@dataclass(frozen=True)
class Model:
    """name: MaxText's. layers: attention layers, as vLLM counts them. per_layer: those in one of
    MaxText's decoder layers. hf: what vLLM and tpu-inference are told beyond the dimensions.
    refused: releases of MaxText that cannot serve it whatever is patched, so that we say so.
    """

    name: str
    layers: int
    scan: bool = False
    per_layer: int = 1
    maxtext: dict[str, Any] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)
    refused: tuple[str, ...] = ()

    def maxtext_config(self) -> dict[str, Any]:
        return {
            "model_name": self.name,
            "override_model_config": True,
            "scan_layers": self.scan,
            "base_num_decoder_layers": self.layers // self.per_layer,
            "remat_policy": "none",
            "dtype": "float32",
            "weight_dtype": "float32",
            "matmul_precision": "highest",
            "max_target_length": 64,
            "per_device_batch_size": 1,
            "skip_jax_distributed_system": True,
            "log_config": False,
            **DIMS,
            **self.maxtext,
            **_old_settings(),
        }

    def hf_config(self) -> dict[str, Any]:
        return {
            "architectures": ["MaxTextForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": self.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            **self.hf,
        }


def deep(model: Model, layers: int) -> Model:
    """The same model with so many layers."""
    kinds = model.hf.get("layer_types")
    hf = model.hf | ({"layer_types": (kinds * layers)[:layers]} if kinds else {})
    return replace(model, layers=layers, hf=hf)


def _old_settings() -> dict[str, Any]:
    """What MaxText 0.2.3 needs told: it takes "none" for no value, and its rules lack axes."""
    if version("maxtext") != "0.2.3":
        return {}
    import yaml

    text = files("maxtext").joinpath("configs/inference/vllm.yml").read_text()
    rules = yaml.safe_load(text)["logical_axis_rules"]
    lacking = ("layers", "local_layers", "dense_layers", "moe_layers")
    return {
        "remat_policy": "full",
        "logical_axis_rules": rules + [[axis, []] for axis in lacking],
    }


def _gemma4(name: str, layers: int, period: int, sharing: int = 0, **given: Any) -> Model:
    kinds = ["full" if i % period == period - 1 else "sliding" for i in range(layers)]
    return Model(
        name,
        layers,
        maxtext={"global_head_dim": GLOBAL_HEAD, "sliding_window_size": 8} | given.pop("maxtext"),
        hf={
            "model_type": "gemma4_text",
            "global_head_dim": GLOBAL_HEAD,
            "layer_types": [f"{kind}_attention" for kind in kinds],
            "num_kv_shared_layers": sharing,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
        **given,
    )


def _small(sharing: int) -> dict[str, Any]:
    return {
        "num_kv_shared_layers": sharing,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
    }


GDN = {
    "gdn_key_head_dim": 8,
    "gdn_value_head_dim": 8,
    "gdn_num_key_heads": 2,
    "gdn_num_value_heads": 4,
}
LINEAR = {
    "model_type": "qwen3_next",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}
WINDOW = {"sliding_window_size": 8}
# With biases MaxText maps one axis of the mesh to two of an expert's, and fails.
NO_BIAS = {"mlp_bias": False, "routed_bias": False}

MODELS = {
    "qwen3": Model("qwen3-0.6b", 4),
    "qwen3-scanned": Model("qwen3-0.6b", 4, scan=True),
    "llama": Model("llama3.1-8b", 3),
    "llama-scanned": Model("llama3.1-8b", 3, scan=True, maxtext={"remat_policy": "full"}),
    "llama-scanned-first": Model("llama3.1-8b", 3, scan=True, maxtext={"param_scan_axis": 0}),
    "llama-scanned-int8": Model("llama3.1-8b", 3, scan=True, maxtext={"quantization": "int8"}),
    "gemma2-scanned": Model("gemma2-2b", 4, scan=True, per_layer=2, maxtext=WINDOW),
    "mistral-scanned": Model("mistral-7b", 3, scan=True),
    "gemma3-scanned": Model("gemma3-4b", 7, scan=True, maxtext=WINDOW, refused=("0.2.3",)),
    "gemma4-31b": _gemma4(
        "gemma4-31b", 7, 6, scan=True, maxtext={"global_num_kv_heads": 2}, refused=("0.2.3",)
    ),
    "gemma4-e2b": _gemma4("gemma4-e2b", 12, 5, 5, maxtext=_small(5)),
    "gemma4-e4b": _gemma4("gemma4-e4b", 14, 6, 6, maxtext=_small(6)),
    "qwen3-next": Model(
        "qwen3-next-80b-a3b", 8, maxtext=MOE | GDN, hf=LINEAR, refused=("0.2.3", "0.2.4")
    ),
    "gemma4-31b-even": _gemma4(
        "gemma4-31b", 12, 6, scan=True, maxtext={"global_num_kv_heads": 2}, refused=("0.2.3",)
    ),
    "qwen3-next-scanned": Model(
        "qwen3-next-80b-a3b", 8, scan=True, maxtext=MOE | GDN, hf=LINEAR, refused=("0.2.3", "0.2.4")
    ),
    "qwen3.5-scanned": Model(
        "qwen3.5-35b-a3b",
        8,
        scan=True,
        maxtext=MOE | GDN | {"mrope_section": [1, 1, 0]},
        hf=LINEAR,
        refused=("0.2.3", "0.2.4"),
    ),
    "olmo3-scanned": Model("olmo3-7b", 8, scan=True, maxtext=WINDOW),
    "gpt-oss-scanned": Model("gpt-oss-20b", 4, scan=True, maxtext=MOE | WINDOW | NO_BIAS),
    "llama4-scanned": Model(
        "llama4-17b-16e", 4, scan=True, maxtext=MOE | {"num_experts_per_tok": 1}
    ),
}
