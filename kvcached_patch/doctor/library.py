"""What the installed libraries' sources say, and which other plugins are about."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from kvcached_patch import _startup, config
from kvcached_patch.doctor.environment import PLUGIN_GROUP
from kvcached_patch.doctor.report import Diagnosis
from kvcached_patch.errors import ConfigError, KvcachedPatchError
from kvcached_patch.seams.check import Verdict
from kvcached_patch.seams.manifest import load_manifest

_PLUGIN_GROUPS = (PLUGIN_GROUP, "vllm.platform_plugins")


def target(result: Diagnosis, package: str, label: str) -> Verdict | None:
    """Compare a library's sources with its manifest; None if that cannot be done."""
    releases = ", ".join(load_manifest(package).tested)
    other = f"install a tested release ({releases}); {config.TOGGLE}=auto runs this one unpatched"
    try:
        verdict = _startup.examine(package, _settings())
    except KvcachedPatchError as error:
        result.problem(label, str(error), other)
        return None
    if verdict is None:
        if package == "vllm":
            result.problem(
                label,
                f"not installed in this environment ({sys.prefix})",
                "run doctor with the Python of the environment that has vLLM, "
                f"or `{sys.executable} -m pip install vllm`",
            )
        return None
    where = f"{verdict.installed.version} ({verdict.installed.root})"
    if verdict.aside:
        result.add(label, f"{where}; left as it is: {verdict.aside}")
        return verdict
    if verdict.tested:
        result.add(label, where)
    else:
        result.note(label, f"{where}; this release is untested", f"to be sure, {other}")
    result.seams += [status.as_json() for status in verdict.statuses]
    name = "seams" if package == "vllm" else f"seams {label}"
    if verdict.problem:
        result.problem(name, verdict.problem, other)
    else:
        result.add(name, f"all {len(verdict.statuses)} match")
    return verdict


def _settings() -> config.Config:
    try:
        return config.load()
    except ConfigError:  # told of the toggle
        return config.Config()


def other_plugins(result: Diagnosis, verdict: Verdict, *, told_live: bool) -> None:
    """Name the distributions that may wrap our seams; told_live: an import will show who does."""
    for found, seams in _rivals(verdict):
        name = found.metadata["Name"]
        text = f"{name} {found.version} names seam {', '.join(seams)}"
        remedy = f"switch {name} off or uninstall it, or unset {config.TOGGLE}"
        (result.note if told_live else result.problem)("other plugin", text, remedy)


def _rivals(verdict: Verdict) -> Iterator[tuple[Distribution, list[str]]]:
    """Distributions that hook into vLLM or into start-up and whose code names one of our seams."""
    for found in distributions():
        name = found.metadata["Name"]
        own = ("kvcached-patch", verdict.installed.package.replace("_", "-"))
        if name in own or name.startswith("vllm"):
            continue
        hooks = any(entry.group in _PLUGIN_GROUPS for entry in found.entry_points)
        files = found.files or []
        hooks = hooks or any(str(file).endswith(".pth") and "/" not in str(file) for file in files)
        if hooks and (seams := _seams_named_in(found, verdict)):
            yield found, seams


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
