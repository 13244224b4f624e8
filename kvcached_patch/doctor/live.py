"""What a child process finds that imports the library as an engine would."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from packaging.version import Version

from kvcached_patch import config
from kvcached_patch.doctor.environment import bounds_asked
from kvcached_patch.doctor.report import Diagnosis
from kvcached_patch.seams.check import Verdict


def vllm(result: Diagnosis, verdict: Verdict, arguments: Sequence[str]) -> None:
    """Import vLLM; ask it for the device, and for what ``vllm serve`` would make of `arguments`."""
    found = _probed(result, "vllm_probe", "vLLM", [verdict], arguments)
    if found is None:
        return
    result.add("runner", _runner(verdict.installed.version, found["triton"]))
    _pool(result, found)
    _arguments(result, found, arguments)


def _pool(result: Diagnosis, found: dict[str, Any]) -> None:
    pool, bounds = found["pool"], bounds_asked()
    text = f"{pool} memory for device {found['device']}"
    if found["missing"]:
        other = "static" if config.load().pool == "auto" else "auto"
        result.problem("pool", found["missing"], f"set {config.POOL}={other}")
    elif pool == "static" and bounds:
        text += f" cannot be given back in parts: {bounds} is refused"
        result.problem(
            "pool", text, " or ".join(filter(None, ("unset the bound", found["better"])))
        )
    elif found["better"]:
        result.note("pool", f"{text}: memory once touched stays committed", found["better"])
    else:
        result.add("pool", text)


def _arguments(result: Diagnosis, found: dict[str, Any], arguments: Sequence[str]) -> None:
    """Say what the arguments mean, without repeating them: there may be keys among them."""
    name = "configuration"
    if not arguments:
        result.add(name, "not judged; `doctor -- ARGUMENTS` does, with those of `vllm serve`")
        return
    reason = found["static"]
    if found["usage"]:
        result.problem(name, f"vllm serve: {found['usage']}", "see `vllm serve --help=all`")
    elif reason is None:
        result.add(name, "nothing in these arguments keeps the KV cache in place")
    else:
        text = f"{reason['feature']}: {reason['why']}; memory once touched stays committed"
        pool = config.load().pool
        asked = [bounds_asked()] if bounds_asked() else []
        asked += [f"{config.POOL}={config.raw(config.POOL)!r}"] * (pool not in ("auto", "static"))
        if asked:
            text = f"{reason['feature']}: {reason['why']}; vLLM does not start, since "
            text += f"{' and '.join(asked)} cannot be kept"
            result.problem(name, text, f"{reason['remedy']}, or these variables")
        else:
            result.note(name, text, reason["remedy"])


def maxtext(result: Diagnosis, verdicts: Sequence[Verdict]) -> None:
    """Import MaxText and what it runs on."""
    if any(verdict.installed.package == "maxtext" for verdict in verdicts):
        _probed(result, "maxtext_probe", "MaxText", verdicts)


def _probed(
    result: Diagnosis,
    probe: str,
    label: str,
    verdicts: Sequence[Verdict],
    arguments: Sequence[str] = (),
) -> dict[str, Any] | None:
    """What a child process reports that imported the library; None if it could not."""
    name = f"import of {label}"
    command = [sys.executable, "-m", f"kvcached_patch.engines.{probe}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    unpatched = f"or unset {config.TOGGLE} to run {label} unpatched"
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        text = f"failed with exit code {done.returncode}: {last}"
        result.problem(name, text, f"see `{shlex.join(command[:3])}`")
        return None
    if "refused" in found:
        result.problem(name, found["refused"], f"do what it says, {unpatched}")
        return None
    seams = [status.seam.id for verdict in verdicts for status in verdict.statuses]
    missing = [seam for seam in seams if not found["applied"].get(seam)]
    if missing:
        result.problem(
            name,
            f"seams not in place: {', '.join(missing)}",
            f"find out what else patches them, {unpatched}",
        )
    else:
        result.add(name, f"all {len(seams)} seams in place")
    return found


def _runner(version: Version, triton: bool) -> str:
    """VLLM's own rule (``VllmConfig.use_v2_model_runner``), as far as no model is known."""
    forced = config.raw("VLLM_USE_V2_MODEL_RUNNER")
    if forced:
        return f"{'V1' if forced == '0' else 'V2'} (VLLM_USE_V2_MODEL_RUNNER={forced})"
    if version < Version("0.29"):
        return "V1; V2 for the architectures that this vLLM lists"
    if not triton:
        return "V1 (this vLLM has no Triton, which V2 needs)"
    return "V2; V1 for what V2 does not support"
