"""What the environment says, before any library is looked at."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path

from packaging.version import Version

from kvcached_patch import _startup, config
from kvcached_patch.doctor.report import Diagnosis
from kvcached_patch.errors import KvcachedPatchError, LedgerError
from kvcached_patch.ledger import Ledger, devices, ledger_path

PTH = "kvcached_patch.pth"
PLUGIN_GROUP = "vllm.general_plugins"
_REINSTALL = f"reinstall: `{sys.executable} -m pip install --force-reinstall kvcached-patch`"


def toggle(result: Diagnosis) -> config.Mode:
    """Whether the variables ask for the plugin; Mode.OFF also if they are wrong."""
    value = config.raw(config.TOGGLE)
    shown = f"{config.TOGGLE}={value!r} (from the environment)"
    switch_on = f"set {config.TOGGLE}=1"
    try:
        settings = config.load()
    except KvcachedPatchError as error:
        result.problem("toggle", str(error), "correct this variable, or unset it")
        return config.Mode.OFF
    if value is None:
        result.problem("toggle", f"{config.TOGGLE} is not set: vLLM runs unpatched", switch_on)
    elif settings.mode is config.Mode.OFF:
        result.problem("toggle", f"{shown}: vLLM runs unpatched", switch_on)
    else:
        strict = "on, strict" if settings.mode is config.Mode.ON else "on where every seam matches"
        result.add("toggle", f"{shown}: {strict}; {config.POOL}={settings.pool}")
    return settings.mode


def doors(result: Diagnosis, *, asked: bool) -> None:
    """Whether ``.pth`` file and entry point are in place; asked: the first has run, if it can."""
    pth = next((path for entry in sys.path if (path := Path(entry) / PTH).is_file()), None)
    runs = pth is not None and (_startup.watching() or not asked)
    if runs:
        result.add("door: .pth", str(pth))
    elif pth:
        result.note("door: .pth", f"{pth} is not run: Python runs those of site-packages only")
    else:
        result.note("door: .pth", f"no {PTH} on sys.path", _REINSTALL)
    plugin = any(
        entry.value.startswith("kvcached_patch.")
        for found in distributions()
        for entry in found.entry_points.select(group=PLUGIN_GROUP)
    )
    allowed = config.raw("VLLM_PLUGINS")
    listed = allowed is None or "kvcached_patch" in allowed.split(",")
    if not plugin:
        result.note("door: plugin", f"no entry point in {PLUGIN_GROUP}", _REINSTALL)
    elif not listed:
        text = f"VLLM_PLUGINS={allowed!r} leaves kvcached_patch out"
        result.note("door: plugin", text, "add kvcached_patch to it")
    else:
        result.add("door: plugin", f"entry point kvcached_patch in {PLUGIN_GROUP}")
    if not runs and not (plugin and listed):
        remedy = "open one of them"
        result.problem("doors", "none is open: vLLM would run unpatched", remedy)


def command(result: Diagnosis) -> None:
    """Whether the ``vllm`` of the command line is this environment's."""
    found = shutil.which("vllm")
    if found is None:
        return
    folder = Path(found).resolve().parent
    schemes = (sysconfig.get_default_scheme(), sysconfig.get_preferred_scheme("user"))
    if folder in [Path(sysconfig.get_path("scripts", scheme)).resolve() for scheme in schemes]:
        result.add("vllm on PATH", found)
        return
    theirs = folder / "kvcached-patch"
    text = f"{found} is of another environment than this Python's ({sys.prefix})"
    if theirs.exists():
        result.problem("vllm on PATH", text, f"ask there: `{theirs} doctor`")
    else:
        text += ", where kvcached-patch is not installed: it runs unpatched"
        remedy = f"`{folder / 'python'} -m pip install kvcached-patch`, then `{theirs} doctor`"
        result.problem("vllm on PATH", text, remedy)


def ledger(result: Diagnosis) -> None:
    """Whether the file of the shared budget can be used; it is read, not made."""
    directory = config.ledger_dir()
    fault = _ledger_fault(directory)
    if not fault:
        result.add("ledger", str(directory))
        return
    bounds = bounds_asked()
    remedy = f"make {directory} yours alone (mode 0700), or remove it"
    if bounds:
        fault += f"; vLLM does not start, since {bounds} cannot be kept"
        result.problem("ledger", fault, f"{remedy}; or unset the bound")
    else:
        fault += "; an engine runs, but nothing bounds it and `kvcached-patch top` misses it"
        result.note("ledger", fault, remedy)


def bounds_asked() -> str:
    """The variables that bound memory, with their values; '' if there is none."""
    settings = config.load()
    bounds = ((config.LIMIT, settings.limit), (config.BUDGET, settings.budget))
    return ", ".join(f"{n}={config.raw(n)!r}" for n, nbytes in bounds if nbytes is not None)


def _ledger_fault(directory: Path) -> str:
    try:
        for device in devices(directory):
            _ = Ledger(ledger_path(directory, device)).total
    except LedgerError as error:
        return str(error)
    place = directory if directory.exists() else directory.parent
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        return f"ledger {directory}: user {os.geteuid()} must not write to {place}"
    return ""


def vllm_variables(result: Diagnosis, version: Version) -> None:
    """Variables of vLLM's own under which memory does not follow the load, or not at once."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if config.raw(name) == "0":
        text = f"{name}='0': a quiet engine keeps its last pages until the next request"
        result.note("variable", text, f"unset {name}")
    name = "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    if config.raw(name) == "0" and version < Version("0.33"):
        text = f"{name}='0': Ray's older executor passes no plans on, so under it memory once "
        result.note("variable", f"{text}touched stays committed", f"unset {name}")
