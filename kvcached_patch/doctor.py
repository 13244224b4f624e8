"""Whether the plugin would be active and right in an environment, and why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.version import Version

from kvcached_patch import __version__, _startup, config
from kvcached_patch.errors import KvcachedPatchError
from kvcached_patch.seams.check import Verdict

PTH = "kvcached_patch.pth"
PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_GROUPS = (PLUGIN_GROUP, "vllm.platform_plugins")


@dataclass
class Finding:
    """One line of the report; state is ok, note or problem."""

    name: str
    state: str
    text: str


@dataclass
class Diagnosis:
    """All findings; `active` is the answer."""

    findings: list[Finding] = field(default_factory=list)
    seams: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, text: str, state: str = "ok") -> None:
        """Add a finding."""
        self.findings.append(Finding(name, state, text))

    @property
    def active(self) -> bool:
        """Whether vLLM started here would be patched, completely."""
        return not any(finding.state == "problem" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return {
            "version": __version__,
            "active": self.active,
            "findings": [asdict(finding) for finding in self.findings],
            "seams": self.seams,
        }


def diagnose(*, live: bool = True) -> Diagnosis:
    """Examine this interpreter's environment; `live` also imports vLLM in a child process."""
    result = Diagnosis()
    result.add("python", f"{sys.version.split()[0]} ({sys.executable})")
    result.add("kvcached-patch", f"{__version__} ({Path(_startup.__file__).parent})")
    mode = _toggle(result)
    _doors(result)
    verdicts = [
        verdict
        for package, label in _startup.TARGETS.items()
        if (verdict := _target(result, package, label))
    ]
    for verdict in verdicts:
        for text in _other_plugins(verdict):
            result.add("other plugin", text, "note" if live else "problem")
    if mode is not config.Mode.OFF and live and result.active:
        on_vllm = [v for v in verdicts if v.statuses and v.installed.package == "vllm"]
        if on_vllm:
            _live_vllm(result, on_vllm[0])
        else:
            _live_maxtext(result, verdicts)
    return result


def _toggle(result: Diagnosis) -> config.Mode:
    value = config.raw(config.TOGGLE)
    shown = f"{config.TOGGLE}={value!r} (from the environment)"
    try:
        settings = config.load()
    except KvcachedPatchError as error:
        result.add("toggle", str(error), "problem")
        return config.Mode.OFF
    if value is None:
        result.add("toggle", f"{config.TOGGLE} is not set: vLLM runs unpatched", "problem")
    elif settings.mode is config.Mode.OFF:
        result.add("toggle", f"{shown}: vLLM runs unpatched", "problem")
    else:
        strict = "on, strict" if settings.mode is config.Mode.ON else "on where every seam matches"
        result.add("toggle", f"{shown}: {strict}; {config.POOL}={settings.pool}")
    return settings.mode


def _doors(result: Diagnosis) -> None:
    pth = next((path for entry in sys.path if (path := Path(entry) / PTH).is_file()), None)
    plugin = any(
        entry.value.startswith("kvcached_patch.")
        for found in distributions()
        for entry in found.entry_points.select(group=PLUGIN_GROUP)
    )
    allowed = config.raw("VLLM_PLUGINS")
    listed = allowed is None or "kvcached_patch" in allowed.split(",")
    result.add("door: .pth", str(pth) if pth else f"no {PTH} on sys.path", "ok" if pth else "note")
    if not plugin:
        result.add("door: plugin", f"no entry point in {PLUGIN_GROUP}", "note")
    elif not listed:
        result.add("door: plugin", f"VLLM_PLUGINS={allowed!r} leaves kvcached_patch out", "note")
    else:
        result.add("door: plugin", f"entry point kvcached_patch in {PLUGIN_GROUP}")
    if not pth and not (plugin and listed):
        result.add("doors", "none is open: vLLM would run unpatched. Reinstall", "problem")


def _target(result: Diagnosis, package: str, label: str) -> Verdict | None:
    try:
        verdict = _startup.examine(package)
    except KvcachedPatchError as error:
        result.add(label, str(error), "problem")
        return None
    if verdict is None:
        if package == "vllm":
            result.add(label, "not installed in this environment", "problem")
        return None
    where = f"{verdict.installed.version} ({verdict.installed.root})"
    if verdict.aside:
        result.add(label, f"{where}; left as it is: {verdict.aside}")
        return verdict
    tested = "" if verdict.tested else "; this release is untested"
    result.add(label, where + tested, "ok" if verdict.tested else "note")
    result.seams += [status.as_json() for status in verdict.statuses]
    name = "seams" if package == "vllm" else f"seams {label}"
    if verdict.problem:
        result.add(name, verdict.problem, "problem")
    else:
        result.add(name, f"all {len(verdict.statuses)} match")
    return verdict


def _other_plugins(verdict: Verdict) -> Iterator[str]:
    """Distributions that hook into vLLM or into start-up and whose code names one of our seams."""
    for found in distributions():
        name = found.metadata["Name"]
        own = ("kvcached-patch", verdict.installed.package.replace("_", "-"))
        if name in own or name.startswith("vllm"):
            continue
        hooks = any(entry.group in PLUGIN_GROUPS for entry in found.entry_points)
        files = found.files or []
        hooks = hooks or any(str(file).endswith(".pth") and "/" not in str(file) for file in files)
        if hooks and (seams := _seams_named_in(found, verdict)):
            yield f"{name} {found.version} names seam {', '.join(seams)}"


def _seams_named_in(found: Distribution, verdict: Verdict) -> list[str]:
    text = "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for file in found.files or []
        if file.suffix == ".py" and (path := Path(str(found.locate_file(file)))).is_file()
    )
    names = {seam.id: seam.qualname.split(".")[-1] for seam in verdict.seams}
    modules = {seam.id: seam.module.split(".")[-1] for seam in verdict.seams}
    return [
        id
        for id, name in names.items()
        if not name.startswith("__")
        and re.search(rf"\b{name}\b", text)
        and re.search(rf"\b{modules[id]}\b", text)
    ]


def _live_vllm(result: Diagnosis, verdict: Verdict) -> None:
    found = _probed(result, "vllm_probe", "vLLM", [verdict])
    if found is None:
        return
    result.add("runner", _runner(verdict.installed.version, found["triton"]))
    pool = config.load().pool
    if pool == "auto":
        pool = "host" if found["device"] == "cpu" else "static"
    wrong = pool == "host" and found["device"] != "cpu"
    result.add(
        "pool",
        f"{pool} memory for device {found['device']}" + (": expected auto or static" * wrong),
        "problem" if wrong else "ok",
    )


def _live_maxtext(result: Diagnosis, verdicts: list[Verdict]) -> None:
    if any(verdict.installed.package == "maxtext" for verdict in verdicts):
        _probed(result, "maxtext_probe", "MaxText", verdicts)


def _probed(
    result: Diagnosis, probe: str, label: str, verdicts: list[Verdict]
) -> dict[str, Any] | None:
    """What a child process reports that imported the library; None if it could not."""
    name = f"import of {label}"
    command = [sys.executable, "-m", f"kvcached_patch.engines.{probe}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        result.add(name, f"failed with exit code {done.returncode}: {last}", "problem")
        return None
    if "refused" in found:
        result.add(name, found["refused"], "problem")
        return None
    seams = [status.seam.id for verdict in verdicts for status in verdict.statuses]
    missing = [seam for seam in seams if not found["applied"].get(seam)]
    if missing:
        result.add(name, f"seams not in place: {', '.join(missing)}", "problem")
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


def text(diagnosis: Diagnosis) -> str:
    """The report for people."""
    marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
    lines = [
        f"{marks[f.state]}  {f.name:<15} {f.text.replace(chr(10), chr(10) + ' ' * 25)}"
        for f in diagnosis.findings
    ]
    for seam in diagnosis.seams:
        lines.append(f"{marks['ok' if seam['ok'] else 'problem']}  seam {seam['id']}")
        lines.append(f"{'':9}target    {seam['target']} ({seam['process']})")
        lines.append(f"{'':9}expected  {seam['expected']}")
        lines.append(f"{'':9}found     {seam['found']}")
    lines.append(f"active: {'yes' if diagnosis.active else 'no'}")
    return "\n".join(lines)
