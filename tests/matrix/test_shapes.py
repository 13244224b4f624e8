"""Every shape of KV cache on a whole engine: the tokens of stock, from memory that follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import vllm

from tests.matrix.pairs import Pair, pair
from tests.matrix.shapes import ENCODER_ONLY, SHAPES

FOLDER = f"shapes-{vllm.__version__}"


@pytest.fixture(scope="module")
def engines() -> Pair:
    """All engines, stock and patched."""
    runs = {name: shape for name, shape in SHAPES.items() if shape.runs_here}
    return pair(
        FOLDER,
        "tests.matrix.shapes:shapes",
        models={ENCODER_ONLY, *(shape.model for shape in runs.values())},
        job={"shapes": list(runs)},
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_of_cache(
    engines: Pair, name: str, record_property: Callable[[str, object], None]
) -> None:
    shape = SHAPES[name]
    record_property("shape", shape.what)
    if not shape.runs_here:
        pytest.skip(f"stock vLLM {vllm.__version__} does not run it on a CPU: {shape.why}")
    (batch,) = engines.same(name, "prompts")
    assert batch["leaked"] == 0
    (report,) = engines.reports(name)
    assert report["aliased"] == shape.aliased
    if shape.large_blocks:
        assert report["block_bytes"] / report["pools"] > 4096


def test_kvcached_215_sliding_and_full_attention_lie_in_the_same_pools(engines: Pair) -> None:
    """Equal bytes per block are enough: #215, #187 and #396 asked for equal shapes."""
    for name in ("gemma3", "gpt_oss"):
        (report,) = engines.reports(name)
        assert report["pools"] == 2, "as many as the largest group has layers"


def test_vllm_ascend_11791_sharing_layers_write_nothing(engines: Pair) -> None:
    for name in ("gemma3n", "gemma4_uniform"):
        engines.same_contents(name)


def test_an_encoder_only_model_has_no_cache_which_is_said(
    engines: Pair, record_property: Callable[[str, object], None]
) -> None:
    record_property("shape", "encoder only: no cache")
    stock, patched = (run.result["encoder only"] for run in engines)
    assert patched["embeddings"] == stock["embeddings"]
    (report,) = engines.reports("encoder only")
    assert (report["pool"], report["reserved_bytes"]) == ("none", 0)
    assert "V1 runner, no KV cache" in engines.patched.log
