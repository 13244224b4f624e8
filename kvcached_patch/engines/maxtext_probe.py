"""Import MaxText's vLLM adapter as a worker would, and print what became of the seams."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from kvcached_patch.engines.vllm_probe import answer, applied


def probe() -> dict[str, Any]:
    """Import the adapter, which imports tpu-inference; per armed seam whether it is in place."""
    importlib.import_module("maxtext.integration.vllm.maxtext_vllm_adapter")
    return {"applied": applied()}


if __name__ == "__main__":
    sys.exit(answer(probe))
