"""Two jobs that call the same scene, stock and patched, and what they found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import vllm
from packaging.version import Version

from tests.parity import OUT, REPORT, Run, run
from tools.tiny_model import write_model

# Before 0.24 vLLM hands out cached blocks before freed ones without a hash; ours does as later
# releases do. What is found in the cache differs then, and with it how sums are rounded.
SAME_EVICTIONS = Version("0.24") <= Version(vllm.__version__)

ENVIRONMENT = {
    "NUMBA_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # which seeds the hashes of blocks
}


class Pair(NamedTuple):
    """A stock and a patched run of a scene."""

    stock: Run
    patched: Run

    def same(self, engine: str, mode: str, *, timed: bool = False) -> list[dict[str, Any]]:
        """Stock's batches of this mode, after proof that the patched ones are the same.

        Also that the patched engine was elastic, and was given all of its memory back in between.
        timed: what is scheduled together depends on the clock, and with it how sums are rounded.
        """
        stock, patched = (each.result[engine]["modes"][mode] for each in self)
        assert len(patched) == len(stock)
        batches = []
        for ours, theirs in zip(patched, stock, strict=True):
            if "tokens" not in theirs:
                self._emptied(ours, theirs)
            elif timed or not SAME_EVICTIONS:
                assert ours["tokens"] == theirs["tokens"]
                batches.append(theirs)
            else:
                assert ours == theirs
                assert not theirs.get("leaked")
                batches.append(theirs)
        for report in self.reports(engine):
            assert report["pool"] == "host"
            assert report["min_slab_blocks"] >= 1, "not elastic"
        distinct = [len(set(tokens)) for batch in batches for tokens in batch["tokens"]]
        assert min(distinct) > 5, "outputs hardly vary"
        return batches

    def same_contents(self, engine: str) -> None:
        """Every cached block holds what it holds in stock vLLM: nobody else wrote there."""
        stock, patched = (run.result[engine]["contents"] for run in self)
        assert len(stock) > 10
        assert {key: patched[key] for key in stock} == stock

    def reports(self, engine: str) -> list[dict[str, Any]]:
        """What each worker of the patched engine says it bound."""
        found: list[dict[str, Any]] = self.patched.result[engine]["probes"][REPORT]
        return found

    @staticmethod
    def _emptied(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
        assert ours["reset"]
        assert theirs["reset"]
        assert ours["reserved_bytes"] == theirs["reserved_bytes"] == theirs["resident_bytes"]
        assert ours["resident_bytes"] <= ours["reserved_bytes"] / 4, "memory was not given back"


def pair(
    case: str,
    scene: str,
    models: Collection[str] = ("llama", "llama_draft", "gemma3n"),
    job: Mapping[str, Any] | None = None,
    **env: str,
) -> Pair:
    """Run a scene on stock and on patched vLLM at the same time; `job`: more keys of its job."""
    paths = {name: write_model(name, OUT / "models") for name in models}
    both = {
        "call": scene,
        "models": {name: str(path) for name, path in paths.items()},
        "env": {**ENVIRONMENT, **env},
        **(job or {}),
    }
    with ThreadPoolExecutor(2) as threads:
        jobs = [{**both, "patched": on, "elastic": on} for on in (False, True)]
        return Pair(*threads.map(lambda job: run(case, "llama", **job), jobs))
