"""Import vLLM as an engine would, and print what became of the seams."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from kvcached_patch import config
from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.seams.apply import armed


def probe(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Load vLLM's plugins and every seam's module in this process.

    Returns the device type, whether vLLM has Triton, per armed seam whether it is in place; see
    `_pool`, and `_judged` for `arguments`.
    """
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.triton_utils import HAS_TRITON

    load_general_plugins()
    return {
        "device": current_platform.device_type,
        "triton": bool(HAS_TRITON),
        "applied": applied(),
        **_pool(current_platform.device_type),
        **(_judged(arguments) if arguments else {}),
    }


def applied() -> dict[str, bool]:
    """Import every seam's module; per armed seam whether it is in place."""
    for entry in armed():
        importlib.import_module(entry.seam.module)
    return {entry.seam.id: entry.applied for entry in armed()}


def _pool(device: str) -> dict[str, str]:
    """The kind of memory for this type of device, what it lacks, and what a better one needs."""
    import torch

    from kvcached_patch.engines.binding import pool_kind
    from kvcached_patch.memory import DEVICE_TYPES, cuda
    from kvcached_patch.memory.driver import INSTALL, installed

    kind = pool_kind(device)
    faults = []
    if DEVICE_TYPES.get(kind, device) != device:
        faults.append(f"vLLM here runs on device {device!r}, this memory on {DEVICE_TYPES[kind]!r}")
    if kind == "cuda" and (missing := cuda.missing()):
        faults.append(missing)
    text = f"{config.POOL}={config.load().pool!r}: {'; '.join(faults)}" if faults else ""
    better = ""
    if kind == "static" and device == "cuda" and torch.version.cuda:
        better = f"unset {config.POOL}" if installed() else INSTALL
    return {"pool": kind, "missing": text, "better": better}


def _judged(arguments: Sequence[str]) -> dict[str, Any]:
    """What these arguments of ``vllm serve`` mean for the cache; no model is looked at."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from kvcached_patch.engines.vllm_static import arguments_static_because

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> None:
            raise ValueError(message)

    parser = Parser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    try:
        options = parser.parse_args(["serve", *arguments])
        reason = arguments_static_because(AsyncEngineArgs.from_cli_args(options))
    except ValueError as error:
        return {"usage": str(error), "static": None}
    return {"usage": "", "static": reason and asdict(reason)}


def answer(probe: Callable[[], dict[str, Any]]) -> int:
    """Print the result, or the refusal, as the last line of standard output, in JSON."""
    try:
        result = probe()
    except KvcachedPatchError as error:
        result = {"refused": str(error)}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(answer(lambda: probe(sys.argv[1:])))
