"""Run a fresh interpreter whose environment says nothing about this package."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lanes import ROOT

DROPPED = ("KVCACHED_PATCH", "VLLM_", "PYTHON", "PYTEST", "PY_COLORS", "FORCE_COLOR", "VIRTUAL_ENV")
DROPPED += ("PIP_PREFIX", "PIP_REQUIRE", "PIP_TARGET", "PIP_USER")


PACKAGE, PTH = ROOT / "kvcached_patch", "kvcached_patch.pth"
# What our wheel is built from.
SOURCES = ("pyproject.toml", "hatch_build.py", "autopatch.pth", "README.md", "LICENSE")


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what steers Python or the package, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | variables


def run(
    *command: str | Path, cwd: Path | None = None, unprivileged: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture what it writes.

    unprivileged: file modes bind it, also where root runs the tests.
    """
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=_obey_file_modes if unprivileged and os.geteuid() == 0 else None,
    )


def _obey_file_modes() -> None:
    """Give up CAP_DAC_OVERRIDE (1) and CAP_DAC_READ_SEARCH (2), as prctl(2) has it."""
    drop_from_bounding_set = 24
    for capability in (1, 2):
        if ctypes.CDLL(None, use_errno=True).prctl(drop_from_bounding_set, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def python(
    *options: str | Path,
    executable: str | Path = sys.executable,
    unprivileged: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter away from the checkout, so that only what is installed is found."""
    return run(executable, *options, cwd=Path("/"), unprivileged=unprivileged, **variables)


def output(*options: str | Path, **variables: str) -> str:
    """What an interpreter prints; it must end well and write nothing to standard error."""
    done = python(*options, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def imported(*options: str | Path, **variables: str) -> set[str]:
    """The modules that an interpreter imports from its very start, by ``-X importtime``."""
    done = python("-X", "importtime", *options, **variables)
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"^import time: +\d+ \| +\d+ \| +(\S+)$", done.stderr, re.MULTILINE))


def venv(root: Path, *options: str, base: str | Path = sys.executable) -> Path:
    """Make an empty environment, without even pip; returns its interpreter."""
    done = run(base, "-m", "venv", "--without-pip", *options, root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "bin" / "python"


def pip(interpreter: Path, *arguments: str | Path, **variables: str) -> None:
    """Run this environment's pip for another one: making one with its own pip takes longer."""
    command = (sys.executable, "-m", "pip", "--python", interpreter, *arguments)
    done = run(*command, cwd=interpreter.parent, **variables)
    assert done.returncode == 0, done.stdout + done.stderr


def build(out: Path, *arguments: str | Path) -> Path:
    """Build with the backend that is installed here; returns the one file that was made last."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", out)
    done = run(*command, *arguments, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    return max(out.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def checkout(folder: Path) -> Path:
    """Copy to a new folder what our wheel is built from; returns the folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, folder / "kvcached_patch", ignore=ignored)
    shutil.copytree(ROOT / "manifests" / "seams", folder / "manifests" / "seams")
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    return folder


def find_python(version: str) -> str | None:
    """An interpreter of this version, such as 3.12: this one, PATH's or pyenv's; None if none."""
    code = "import sys, venv; print(*sys.version_info[:2], sep='.')"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    pyenvs = sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python3")))
    for command in (sys.executable, f"python{version}", *pyenvs):
        try:
            done = run(command, "-Ic", code)
        except OSError:
            continue
        if (done.returncode, done.stdout.strip()) == (0, version):
            return command
    return None


def purelib(interpreter: Path) -> Path:
    """Where an environment's pure Python packages are."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(output("-c", code, executable=interpreter))
