"""The modes that vLLM is run in, on whole engines: what comes of each is what comes of stock."""

from __future__ import annotations

import pytest
import vllm

from tests.matrix.pairs import SAME_EVICTIONS, Pair, pair
from tests.matrix.scenes import no_speculation
from tests.parity import OUT
from tools.tiny_lora import write_adapter
from tools.tiny_model import write_model

FOLDER = f"modes-{vllm.__version__}"
SPECULATIVE = pytest.mark.skipif(
    bool(no_speculation()),
    reason=f"vLLM {vllm.__version__} does not start with speculation on a CPU: {no_speculation()}",
)


@pytest.fixture(scope="module")
def engines() -> Pair:
    """All engines, stock and patched, retaining all: then also evictions must be those of stock."""
    adapter = write_adapter(write_model("llama", OUT / "models"), OUT / "models" / "llama_lora")
    return pair(
        FOLDER,
        "tests.matrix.scenes:modes",
        job={"adapter": str(adapter)},
        KVCACHED_PATCH_RETAIN="all",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )


def test_preemption(engines: Pair) -> None:
    (batch,) = engines.same("llama", "preemption")
    assert batch["preemptions"] >= 3


def test_prefix_caching_with_resets(engines: Pair) -> None:
    first, longer, again = engines.same("llama", "prefix")
    assert first["cached"] == [0, 0]
    assert longer["cached"] == [96, 64, 96, 64], "whole blocks of 32 tokens"
    assert again["cached"] == [0, 0, 96, 64], "after the reset only of one another"


def test_several_samples_with_a_seed(engines: Pair) -> None:
    (batch,) = engines.same("llama", "n")
    assert len({tuple(tokens) for tokens in batch["tokens"]}) == 6, "three of each prompt"


def test_abort_in_mid_flight(engines: Pair) -> None:
    (batch,) = engines.same("llama", "abort")
    assert [len(tokens) for tokens in batch["tokens"]] == [7, 30, 7, 30, 30]


def test_lora(engines: Pair) -> None:
    first, again = engines.same("llama", "lora")
    base, adapted, also_base = first["tokens"]
    assert base == also_base != adapted
    assert first["cached"] == [0, 0, 96], "the adapter's cache is not the model's"
    assert again["cached"] == [96, 96, 96]
    assert again["tokens"] == first["tokens"]


def test_kv_events(engines: Pair) -> None:
    """With hashes, tokens, parents and adapters, in vLLM's order and after the same steps."""
    stock, patched = (run.result["llama"]["events"] for run in engines)
    for events in (stock, patched):
        kinds = {event.split("(")[0] for batch in events for event in batch}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert patched == stock or not SAME_EVICTIONS


def test_preemption_of_a_model_whose_layers_share_caches(engines: Pair) -> None:
    (batch,) = engines.same("gemma3n", "crowd")
    assert batch["preemptions"] > 0
    (report,) = engines.reports("gemma3n")
    assert report["aliased"] == 5


@SPECULATIVE
@pytest.mark.shape("layers that share caches, speculation by n-grams")
def test_ngram_speculation_with_preemption(engines: Pair) -> None:
    (batch,) = engines.same("gemma3n", "crowd")
    assert batch["preemptions"] > 0
    assert batch["extra"] > 0, "no draft was accepted"


@SPECULATIVE
@pytest.mark.shape("full attention, speculation by a draft model")
def test_speculation_by_a_draft_model_with_preemption(engines: Pair) -> None:
    (batch,) = engines.same("draft", "crowd")
    assert batch["preemptions"] > 0
    assert batch["extra"] > 0, "no draft was accepted"
    (report,) = engines.reports("draft")
    assert report["pools"] == 4 + 3, "of the model and of the draft"
