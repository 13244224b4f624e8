"""Run a fresh interpreter whose environment says nothing about this package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

DROPPED = ("KVCACHED_PATCH", "VLLM_", "PYTHON", "PYTEST", "PY_COLORS", "FORCE_COLOR", "VIRTUAL_ENV")
DROPPED += ("PIP_PREFIX", "PIP_REQUIRE", "PIP_TARGET", "PIP_USER")


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without what steers Python or the package, and `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return kept | variables


def run(
    *command: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture what it writes."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
    )


def python(
    *options: str | Path, executable: str | Path = sys.executable, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter away from the checkout, so that only what is installed is found."""
    return run(executable, *options, cwd=Path("/"), **variables)


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


def venv(root: Path) -> Path:
    """Make an empty environment, without even pip; returns its interpreter."""
    done = run(sys.executable, "-m", "venv", "--without-pip", root)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "bin" / "python"


def purelib(interpreter: Path) -> Path:
    """Where an environment's pure Python packages are."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(output("-c", code, executable=interpreter))
