# SPDX-License-Identifier: Apache-2.0
"""Tiny seeded models that stock vLLM loads and whose greedy output depends on its KV cache.

Every weight comes from its own random stream, seeded by the parameter's name, so the file is the
same whatever writes it. Only the standard library is used: any interpreter can write a model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GENERATOR_VERSION = 3
MODELS_DIR = Path(__file__).resolve().parent / "models"

Config = dict[str, Any]
Shape = tuple[int, ...]
Entries = Iterator[tuple[str, Shape]]


def model_names() -> list[str]:
    """Names that `write_model` knows."""
    return sorted(path.stem for path in MODELS_DIR.glob("*.json"))


def has_weights(name: str) -> bool:
    """Whether `write_model` writes weights for this model."""
    return _config(name)["model_type"] in _SHAPES


def write_model(name: str, out_dir: Path) -> Path:
    """Write `out_dir/name` (config, weights, a word-level tokenizer) and return it.

    A model type without a shape table here gets no model.safetensors: load it with vLLM's
    `load_format="dummy"`. A directory whose stamp matches is left as it is.
    """
    config = _config(name)
    text = json.dumps(config, indent=1) + "\n"
    stamp = hashlib.sha256(f"{GENERATOR_VERSION}\n{text}".encode()).hexdigest() + "\n"
    target = Path(out_dir) / name
    stamp_file = target / "tiny_model.stamp"
    if stamp_file.is_file() and stamp_file.read_text() == stamp:
        return target
    target.mkdir(parents=True, exist_ok=True)
    stamp_file.unlink(missing_ok=True)
    shapes = _SHAPES.get(config["model_type"])
    if shapes is not None:
        _replace(target / "model.safetensors", safetensors(dict(shapes(config)), config))
    _replace(target / "config.json", text.encode())
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if config["model_type"] == "whisper":
        tokenizer_config = {"tokenizer_class": "WhisperTokenizer", **_SPECIAL}
        _replace(target / "preprocessor_config.json", json.dumps(_AUDIO).encode())
    _replace(target / "tokenizer_config.json", json.dumps(tokenizer_config).encode())
    _replace(target / "tokenizer.json", json.dumps(_tokenizer(config["vocab_size"])).encode())
    _replace(stamp_file, stamp.encode())
    return target


def _config(name: str) -> Config:
    path = MODELS_DIR / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"unknown model {name!r}; known: {', '.join(model_names())}")
    config: Config = json.loads(path.read_text())
    return config


_SPECIAL = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "bos", "unk")}
_AUDIO = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "processor_class": "WhisperProcessor",
    "feature_size": 80,
    "sampling_rate": 16000,
}


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    """Words `t4`, `t5`, ... stand for the token of that id."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"t{i}" for i in range(4, vocab_size))]
    vocab = {word: i for i, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"}
    nothing = dict.fromkeys(
        ("truncation", "padding", "normalizer", "post_processor", "decoder"), None
    )
    split = {"type": "WhitespaceSplit"}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": split, "model": model, **nothing}


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(path)


def safetensors(shapes: dict[str, Shape], config: Config) -> bytes:
    """The bytes of a file of seeded weights."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape in shapes.items():
        start = len(body)
        body += _values(name, shape, config).tobytes()
        offsets = [start, len(body)]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": offsets}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return struct.pack("<Q", len(head)) + head + bytes(body)


def _values(name: str, shape: Shape, config: Config) -> array[float]:
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    stream = random.Random(seed)
    count = math.prod(shape)
    if name.endswith((".A_log", ".dt_bias")):
        low, high = (1.0, 4.0) if name.endswith(".A_log") else (0.02, 0.5)
        invert = math.log if name.endswith(".A_log") else _inverse_softplus
        return array("f", (invert(stream.uniform(low, high)) for _ in range(count)))
    mean, std = distribution(name, shape, config)
    return array("f", (mean + std * stream.gauss(0.0, 1.0) for _ in range(count)))


def _inverse_softplus(value: float) -> float:
    return value + math.log(-math.expm1(-value))


def distribution(name: str, shape: Shape, config: Config) -> tuple[float, float]:
    """Mean and standard deviation of one parameter."""
    parts = name.split(".")
    if len(shape) == 1:
        if parts[-1] == "bias":
            return 0.0, 0.1
        if parts[-2] in ("q_norm", "k_norm"):
            return 1.2, 0.1
        if name in ("model.norm.weight", "model.final_layernorm.weight"):
            # Tied embeddings are small, so the last norm has to give the logits their spread.
            return (12.0 if config.get("tie_word_embeddings") else 1.0), 0.1
        return 1.0, (0.0 if parts[-1] in ("layer_scalar", "D") else 0.1)
    if parts[-2].startswith("embed_tokens"):
        return 0.0, 0.02
    return 0.0, _GAINS.get(parts[-2], 1.0) / math.sqrt(shape[-1])


_GAINS = {
    "q_proj": 2.0,
    "qkv_proj": 2.0,
    "k_proj": 2.0,
    "v_proj": 1.5,
    "o_proj": 1.5,
    "lm_head": 2.0,
    "correction_coefs": 0.3,
    "prediction_coefs": 0.3,
}


def _attention(at: str, config: Config, head_dim: int) -> Entries:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head_dim
    yield f"{at}.q_proj.weight", (heads * head_dim, hidden)
    yield f"{at}.k_proj.weight", (keys, hidden)
    yield f"{at}.v_proj.weight", (keys, hidden)
    yield f"{at}.o_proj.weight", (hidden, heads * head_dim)


def _mlp(at: str, hidden: int, inner: int) -> Entries:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _norms(at: str, names: str, width: int) -> Entries:
    for name in names.split():
        yield f"{at}.{name}.weight", (width,)


def _outer(config: Config, norm: str = "norm") -> Entries:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield f"model.{norm}.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _llama(config: Config) -> Entries:
    hidden = config["hidden_size"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from _attention(f"{at}.self_attn", config, config["head_dim"])
        yield from _mlp(f"{at}.mlp", hidden, config["intermediate_size"])
        yield from _norms(at, "input_layernorm post_attention_layernorm", hidden)
    yield from _outer(config)


def _falcon_h1(config: Config) -> Entries:
    hidden, heads, inner = config["hidden_size"], config["mamba_n_heads"], config["mamba_d_ssm"]
    conv = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield from _attention(f"{at}.self_attn", config, config["head_dim"])
        yield from _mlp(f"{at}.feed_forward", hidden, config["intermediate_size"])
        yield from _norms(at, "input_layernorm pre_ff_layernorm", hidden)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{at}.mamba.{name}", (heads,)
        yield f"{at}.mamba.conv1d.weight", (conv, 1, config["mamba_d_conv"])
        yield f"{at}.mamba.conv1d.bias", (conv,)
        yield f"{at}.mamba.in_proj.weight", (inner + conv + heads, hidden)
        yield f"{at}.mamba.out_proj.weight", (hidden, inner)
    yield from _outer(config, "final_layernorm")


def _gemma(config: Config) -> Entries:
    """What Gemma 3n and Gemma 4 have in common.

    Layers that share another layer's KV cache have k, v and k_norm too: vLLM up to 0.28 wants
    them, later versions skip them.
    """
    hidden, width = config["hidden_size"], config["hidden_size_per_layer_input"]
    layers = config["num_hidden_layers"]
    norms = (
        "input_layernorm post_attention_layernorm pre_feedforward_layernorm "
        "post_feedforward_layernorm post_per_layer_input_norm"
    )
    for i, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{i}"
        head_dim = config["head_dim"]
        if kind == "full_attention":
            head_dim = config.get("global_head_dim", head_dim)
        inner = config["intermediate_size"]
        if isinstance(inner, list):
            inner = inner[i]
        if config.get("use_double_wide_mlp") and i >= layers - config["num_kv_shared_layers"]:
            inner *= 2
        yield from _attention(f"{at}.self_attn", config, head_dim)
        yield from _norms(f"{at}.self_attn", "q_norm k_norm", head_dim)
        yield from _mlp(f"{at}.mlp", hidden, inner)
        yield from _norms(at, norms, hidden)
        yield f"{at}.per_layer_input_gate.weight", (width, hidden)
        yield f"{at}.per_layer_projection.weight", (hidden, width)
    vocab = config["vocab_size_per_layer_input"]
    yield "model.embed_tokens_per_layer.weight", (vocab, layers * width)
    yield "model.per_layer_model_projection.weight", (layers * width, hidden)
    yield "model.per_layer_projection_norm.weight", (width,)
    yield from _outer(config)


def _gemma3n(config: Config) -> Entries:
    yield from _gemma(config)
    hidden, rank, inputs = config["hidden_size"], config["laurel_rank"], config["altup_num_inputs"]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield f"{at}.laurel.linear_left.weight", (rank, hidden)
        yield f"{at}.laurel.linear_right.weight", (hidden, rank)
        yield f"{at}.laurel.post_laurel_norm.weight", (hidden,)
        yield f"{at}.altup.correct_output_scale", (hidden,)
        yield f"{at}.altup.correction_coefs.weight", (inputs, inputs)
        yield f"{at}.altup.prediction_coefs.weight", (inputs * inputs, inputs)
        yield f"{at}.altup.modality_router.weight", (inputs, hidden)
        yield f"{at}.altup.router_norm.weight", (hidden,)
    for i in range(inputs - 1):
        yield f"model.altup_projections.{i}.weight", (hidden, hidden)
        yield f"model.altup_unembed_projections.{i}.weight", (hidden, hidden)


def _gemma4(config: Config) -> Entries:
    yield from _gemma(config)
    for i in range(config["num_hidden_layers"]):
        yield f"model.layers.{i}.layer_scalar", (1,)


_SHAPES: dict[str, Callable[[Config], Entries]] = {
    "llama": _llama,
    "falcon_h1": _falcon_h1,
    "gemma3n_text": _gemma3n,
    "gemma4_text": _gemma4,
}


def main() -> None:
    """Command line: model name and output directory."""
    parser = argparse.ArgumentParser(prog="python -m tools.tiny_model", description=__doc__)
    parser.add_argument("name", choices=model_names())
    parser.add_argument("out_dir", type=Path)
    args = parser.parse_args()
    print(write_model(args.name, args.out_dir))


if __name__ == "__main__":
    main()
