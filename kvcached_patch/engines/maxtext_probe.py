"""Import MaxText's vLLM adapter as a worker would, and print what became of the seams."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.seams.apply import armed


def probe() -> dict[str, Any]:
    """Import the adapter, which imports tpu-inference; per armed seam whether it is in place."""
    importlib.import_module("maxtext.integration.vllm.maxtext_vllm_adapter")
    for entry in armed():
        importlib.import_module(entry.seam.module)
    return {"applied": {entry.seam.id: entry.applied for entry in armed()}}


def main() -> int:
    """Print the result, or the refusal, as the last line of standard output, in JSON."""
    try:
        result = probe()
    except KvcachedPatchError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
