# SPDX-License-Identifier: Apache-2.0
"""Draw the figures of all benchmarks whose JSON is there.

    python -m bench.figure [FOLDER]

Needs matplotlib. The same JSON gives the same SVG, byte for byte.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"

OURS, STOCK, TEXT, FAINT = "#0f7b6c", "#9a3b26", "#24292f", "#d0d7de"
ENGINE_COLOURS = ("#0f7b6c", "#e0a526", "#5b6abf")
MIB, GIB = 2**20, 2**30
STYLE = {
    "svg.hashsalt": "kvcached-patch",
    "svg.fonttype": "none",  # text stays text; other fonts than the first are narrower
    "font.sans-serif": ["DejaVu Sans", "Helvetica", "Arial", "sans-serif"],
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "figure.facecolor": "white",
}


def reclaim(result: dict[str, Any]) -> Figure:
    """Resident KV memory over time: the last turn of each engine."""
    turns = {turn["kind"]: turn for turn in result["turns"]}
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    patched, bursts = _line(turns["patched"]), turns["patched"]["bursts"]
    stock = _line(turns["stock"])
    axes.fill_between(*patched, color=OURS, alpha=0.25, linewidth=0)
    axes.plot(*patched, color=OURS, linewidth=2)
    axes.plot(*stock, color=STOCK, linewidth=2)
    top, end = max(stock[1]), patched[0][-1]
    axes.set(xlim=(0, end), ylim=(0, 1.18 * top), xlabel="seconds")
    axes.set_title(
        "KV-cache memory in use by the worker (GiB)", loc="left", fontsize=11, fontweight="bold"
    )
    axes.text(0.3, 1.03 * top, "stock vLLM: all of it, always", color=STOCK, fontweight="bold")
    for name, each in zip(("burst", "burst again"), bursts, strict=True):
        middle, peak = (each["begin"] + each["end"]) / 2, each["peak_bytes"] / GIB
        axes.text(middle, peak + 0.04 * top, name, color=OURS, ha="center")
    quiet = (bursts[0]["end"] + bursts[1]["begin"]) / 2
    left = max(each["left_bytes"] for each in bursts) / MIB
    axes.text(quiet, 0.05 * top, f"quiet:\n{left:.1f} MiB", color=OURS, ha="center")
    axes.text(
        bursts[0]["begin"] + 0.3,
        bursts[0]["peak_bytes"] / GIB + 0.2 * top,
        f"patched, KVCACHED_PATCH_RETAIN={result['retention']}: what the load needs",
        color=OURS,
        fontweight="bold",
        va="center",
    )
    _caption(
        figure,
        f"two bursts of {result['requests']} requests × {result['tokens']} tokens; "
        f"{result['space_gib']} GiB of KV space, prefix-cache retention {result['retention']}; "
        f"vLLM {result['vllm']}, {result['processors']} CPU cores",
    )
    return figure


def colocation(result: dict[str, Any]) -> Figure:
    """Who holds the shared budget over time, and how long first tokens take."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    runs = [run for run in result["runs"] if run["trace"] == "intermittent"]
    _stack(left, [run for run in runs if run["kind"] == "shared"][-1], result["budget_bytes"])
    _distribution(right, runs)
    _caption(
        figure,
        f"{result['engines']} engines, {result['budget_bytes'] / MIB:.0f} MiB for their KV caches, "
        f"peaks one after the other; vLLM {result['vllm']}, {result['processors']} CPU cores",
    )
    return figure


def _stack(axes: Axes, run: dict[str, Any], budget: int) -> None:
    times, *held = zip(*run["committed"], strict=True)
    shares = [[value / budget * 100 for value in each] for each in held]
    axes.stackplot(times, shares, colors=ENGINE_COLOURS[: len(shares)], alpha=0.8, linewidth=0)
    axes.axhline(100, color=TEXT, linewidth=1)
    axes.text(times[-1], 102, "the budget", ha="right", fontsize=9)
    base = [0.0] * len(times)
    for n, share in enumerate(shares):
        peak = max(range(len(times)), key=share.__getitem__)
        middle = base[peak] + share[peak] / 2
        axes.text(times[peak], middle, f"engine {n + 1}", ha="center", va="center", fontsize=9)
        base = [a + b for a, b in zip(base, share, strict=True)]
    axes.set(xlim=(0, times[-1]), ylim=(0, 112), xlabel="seconds")
    axes.set_title("shared: KV memory held (%)", loc="left", fontsize=11, fontweight="bold")


def _distribution(axes: Axes, runs: Sequence[dict[str, Any]]) -> None:
    for kind, colour, label, height in (
        ("shared", OURS, "one shared\nbudget", 65),
        ("static", STOCK, "a static\nthird each", 30),
    ):
        ttft = sorted(value for run in runs if run["kind"] == kind for value in run["ttft"])
        parts = [100 * (n + 1) / len(ttft) for n in range(len(ttft))]
        axes.plot(ttft, parts, color=colour, linewidth=2)
        at = ttft[int(height / 100 * len(ttft))]
        axes.text(1.2 * at, height, label, color=colour, va="center", fontweight="bold")
    axes.set(xscale="log", ylim=(0, 102), xlabel="seconds")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title("first token within (%)", loc="left", fontsize=11, fontweight="bold")


def _line(turn: dict[str, Any]) -> tuple[list[float], list[float]]:
    times, sizes = zip(*turn["samples"], strict=True)
    return list(times), [size / GIB for size in sizes]


def _caption(figure: Figure, text: str) -> None:
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color="#57606a")


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "reclaim": reclaim,
    "colocation": colocation,
}


def main() -> int:
    """Command line: the folder, by default that of the published results."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    for name, draw in FIGURES.items():
        path = folder / f"{name}.json"
        if path.exists():
            with mpl.rc_context(STYLE):
                figure = draw(json.loads(path.read_text()))
                figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Creator": None})
            print(path.with_suffix(".svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
