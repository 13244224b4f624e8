"""Every shape of KV cache that a tiny model gives on a whole engine, by the names of the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import vllm
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvcached_patch.seams.manifest import covers
from tests.matrix.driver import Found, InProcess, Job
from tests.matrix.scenes import SMALL, forked
from tests.parity import prompts
from tools.engine_job import make_engine, probe

ENCODER_ONLY = "bert"
UNCACHED = {"enable_prefix_caching": False}
STATEFUL = {"dtype": "bfloat16", **UNCACHED}
PER_LAYER = {
    "releases": ">=0.28",
    "why": "it asks for one head_dim of all layers (AmbiguousGlobalPerLayerAttributeError)",
}


@dataclass(frozen=True)
class Shape:
    """One engine.

    releases: those whose stock vLLM runs it on a CPU; `why` the others do not. aliased: layers
    that share another one's cache. large_blocks: whether a layer's block is more than a page.
    audio: whether prompts are about sounds.
    """

    what: str
    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    aliased: int = 0
    large_blocks: bool = False
    audio: bool = False
    releases: str = ""
    why: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether this release of vLLM runs it."""
        return covers(SpecifierSet(self.releases), Version(vllm.__version__))


SHAPES = {
    "gqa": Shape("full attention, grouped queries", "llama"),
    "mqa": Shape(
        "full attention, one key/value head", "llama", {"hf_overrides": {"num_key_value_heads": 1}}
    ),
    "large blocks": Shape(
        "blocks larger than a page", "llama", {"block_size": 128}, large_blocks=True
    ),
    "bfloat16": Shape("a cache of 16-bit numbers", "llama", {"dtype": "bfloat16"}),
    "fp8": Shape("a quantized cache", "llama", {"kv_cache_dtype": "fp8"}),
    "gemma3": Shape("sliding and full attention", "gemma3"),
    "gpt_oss": Shape("sliding and full attention, with sinks", "gpt_oss", {"dtype": "bfloat16"}),
    "gemma3n": Shape("layers that share caches", "gemma3n", aliased=5),
    "gemma4_uniform": Shape("layers that share caches (Gemma 4)", "gemma4_uniform", aliased=4),
    "gemma4": Shape(
        "layers that share caches, head sizes by kind", "gemma4", aliased=4, **PER_LAYER
    ),
    "gemma4_31b": Shape(
        "head sizes by kind, keys used as values",
        "gemma4",
        {
            "hf_overrides": {
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 0,
                "use_double_wide_mlp": False,
                "attention_k_eq_v": True,
                "num_key_value_heads": 2,
                "num_global_key_value_heads": 1,
            }
        },
        **PER_LAYER,
    ),
    "mla": Shape(
        "latent attention (MLA)",
        "deepseek_v2",
        {"dtype": "bfloat16"},
        releases=">=0.29",
        why="it has no such backend",
    ),
    "llama4": Shape(
        "chunked local and full attention",
        "llama4",
        {"dtype": "bfloat16", "hf_overrides": {"use_qk_norm": False}},
    ),
    "falcon_h1": Shape(
        "attention and Mamba in every layer",
        "falcon_h1",
        STATEFUL,
        releases=">=0.28",
        why="its Mamba code wants Triton (next_power_of_2)",
    ),
    "nemotron_h": Shape(
        "attention and Mamba layers",
        "nemotron_h",
        STATEFUL,
        releases=">=0.28,!=0.31.*",
        why="its Mamba code wants Triton (next_power_of_2), or its transformers other layer names",
    ),
    "qwen3_next": Shape(
        "attention and gated delta-net layers",
        "qwen3_next",
        {"mamba_ssm_cache_dtype": "float32", **STATEFUL},
        releases=">=0.28",
        why="its process dies in the first step",
    ),
    "whisper": Shape(
        "self and cross attention (encoder and decoder)",
        "whisper",
        # Its encoder takes all 1500 positions in one step.
        {"skip_tokenizer_init": False, "max_num_batched_tokens": 2048, **UNCACHED},
        audio=True,
    ),
}


def shapes(job: Job) -> Found:
    """What came of each of the job's `shapes`, one engine after the other, and of an encoder."""
    engines: dict[str, Callable[[Job], Found]] = {
        name: partial(_engine, shape=SHAPES[name]) for name in job["shapes"]
    }
    if ENCODER_ONLY in job["models"]:
        engines["encoder only"] = _encoder_only
    return forked(job, at_once=1, **engines)


def _engine(job: Job, shape: Shape) -> Found:
    from tests.matrix.seeded import LOAD_FORMAT

    settings = {"num_gpu_blocks_override": 400, **SMALL, **shape.settings}
    engine = InProcess(job, job["models"][shape.model], load_format=LOAD_FORMAT, **settings)
    texts = _about_sounds(prompts()) if shape.audio else prompts()
    found = [engine.run(texts, max_tokens=24)]
    contents = engine.contents() if shape.aliased else {}
    found.append(engine.emptied())
    return {"modes": {"prompts": found}, "contents": contents, "probes": engine.close()}


def _about_sounds(texts: list[list[int]]) -> list[dict[str, Any]]:
    """The texts, each with a second of noise of its own."""
    return [
        {
            "prompt_token_ids": text,
            "multi_modal_data": {"audio": (np.random.default_rng(i).normal(size=16000), 16000)},
        }
        for i, text in enumerate(texts)
    ]


def _encoder_only(job: Job) -> Found:
    model = {"model": job["models"][ENCODER_ONLY], "method": "embed", "engine": UNCACHED}
    llm = make_engine(model)
    inputs = [{"prompt_token_ids": text} for text in prompts()]
    outputs = llm.embed(inputs, use_tqdm=False)
    return {
        "embeddings": [list(output.outputs.embedding) for output in outputs],
        "probes": probe(llm, job),
    }
