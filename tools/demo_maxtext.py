# SPDX-License-Identifier: Apache-2.0
"""Stock MaxText against patched MaxText on tpu-inference: which cache each layer uses.

    python -m tools.demo_maxtext        (or: make demo-maxtext)

A hybrid and a KV-sharing model are decoded step by step and compared with one prefill of the
same tokens, on CPU JAX with stand-ins for the TPU kernels. Ends with 1 if patched MaxText differs.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

MODELS = ("qwen3-next", "gemma4-e2b", "olmo3-scanned")
LIMIT = 1e-4


@dataclass(frozen=True)
class Outcome:
    """One model: its map, and the largest difference between decoding and prefilling."""

    model: str
    index_map: dict[str, int]
    delta: float
    scale: float


def main() -> int:
    """Run both, print maps and differences."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    outcomes = {}
    for title, toggle in (("stock", "0"), ("patched", "1")):
        console.print(f"{title} MaxText: {', '.join(MODELS)} …")
        outcomes[title] = _run(toggle)
    for outcome in outcomes["patched"]:
        slots = max(outcome.index_map.values()) + 1
        held: list[list[str]] = [[] for _ in range(slots)]
        for name, slot in outcome.index_map.items():
            held[slot].append(name.removeprefix("layer."))
        order = " | ".join("+".join(names) for names in held)
        console.print(f"{outcome.model}: layers in the runner's slots: {order}")
    table = Table(title="decode against a full prefill: max |Δ hidden state|")
    for column in ("model", "hidden states up to", "stock", "patched"):
        table.add_column(column, justify="right")
    for stock, patched in zip(outcomes["stock"], outcomes["patched"], strict=True):
        row = (patched.model, f"{patched.scale:.0f}", f"{stock.delta:.1e}", f"{patched.delta:.1e}")
        table.add_row(*row)
    console.print(table)
    right = all(outcome.delta <= LIMIT for outcome in outcomes["patched"])
    console.print(f"patched MaxText decodes what it prefills: {'yes' if right else 'NO'}")
    return 0 if right else 1


def _run(toggle: str) -> list[Outcome]:
    command = [sys.executable, "-m", "tools.demo_maxtext", "--child", toggle]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return [Outcome(**each) for each in json.loads(done.stdout.splitlines()[-1])]


def _child(toggle: str) -> list[dict[str, Any]]:
    from tools.maxtext import environment

    environment.prepare(toggle)
    from tools.maxtext import kernels
    from tools.maxtext.decoding import decode
    from tools.maxtext.models import MODELS as MADE
    from tools.maxtext.served import Served

    kernels.install()
    outcomes = []
    for name in MODELS:
        served = Served(MADE[name])
        decoded = decode(served)
        outcomes.append(asdict(Outcome(name, served.index_map, decoded.delta, decoded.scale)))
    return outcomes


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        with contextlib.redirect_stdout(sys.stderr):
            result = _child(sys.argv[2])
        print(json.dumps(result))
        sys.exit(0)
    sys.exit(main())
