"""Import vLLM as an engine would, and print what became of the seams."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.seams.apply import armed


def probe() -> dict[str, Any]:
    """Load vLLM's plugins and every seam's module in this process.

    Returns the device type, whether vLLM has Triton, and per armed seam whether it is in place.
    """
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.triton_utils import HAS_TRITON

    load_general_plugins()
    return {
        "device": current_platform.device_type,
        "triton": bool(HAS_TRITON),
        "applied": applied(),
    }


def applied() -> dict[str, bool]:
    """Import every seam's module; per armed seam whether it is in place."""
    for entry in armed():
        importlib.import_module(entry.seam.module)
    return {entry.seam.id: entry.applied for entry in armed()}


def answer(probe: Callable[[], dict[str, Any]]) -> int:
    """Print the result, or the refusal, as the last line of standard output, in JSON."""
    try:
        result = probe()
    except KvcachedPatchError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(answer(probe))
