"""A stand-in for kvcached, which pip cannot build without a GPU's headers: its name, its doors."""

from __future__ import annotations

import zipfile
from pathlib import Path

VERSION = "0.0.0"
ON = {"ENABLE_KVCACHED": "1"}
MODULE = "kvcached.autopatch"

_FILES = {
    # kvcached_autopatch.pth and the hooks of kvcached/integration/vllm/autopatch.py.
    "kvcached_autopatch.pth": (
        f"import os; os.getenv('ENABLE_KVCACHED') == '1' and __import__('{MODULE}')\n"
    ),
    "kvcached/__init__.py": "",
    "kvcached/autopatch.py": """\
from wrapt.importer import when_imported


@when_imported("vllm.v1.worker.utils")
def patch(utils):
    original = utils.allocate_kv_cache

    def allocate_kv_cache(*args, **kwargs):
        return original(*args, **kwargs)

    utils.allocate_kv_cache = allocate_kv_cache
""",
}


def wheel(folder: Path) -> Path:
    """Write its wheel to a folder."""
    path = folder / f"kvcached-{VERSION}-py3-none-any.whl"
    info = f"kvcached-{VERSION}.dist-info"
    contents = _FILES | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: kvcached\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*contents, f"{info}/RECORD"))
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in (contents | {f"{info}/RECORD": record}).items():
            archive.writestr(name, text)
    return path
