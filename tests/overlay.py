"""A real vLLM tree with a few files changed: links to everything else."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path


def vllm_root() -> Path:
    """The installed package's directory, without importing it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def overlay(folder: Path, changes: Mapping[str, tuple[str, str]]) -> Path:
    """Make ``folder/vllm``: for each relative path replace a text by another, once.

    Returns `folder`, to be put on PYTHONPATH. Directories on the way to a changed file are real,
    everything else is a link into the installed package.
    """
    _link(vllm_root(), folder / "vllm", "", changes)
    return folder


def _link(
    source: Path, target: Path, relative: str, changes: Mapping[str, tuple[str, str]]
) -> None:
    target.mkdir(parents=True)
    for entry in source.iterdir():
        path = f"{relative}{entry.name}"
        if path in changes:
            old, new = changes[path]
            text = entry.read_text(encoding="utf-8")
            assert text.count(old) == 1, f"{path}: {old!r} is there {text.count(old)} times"
            (target / entry.name).write_text(text.replace(old, new), encoding="utf-8")
        elif any(change.startswith(path + "/") for change in changes):
            _link(entry, target / entry.name, path + "/", changes)
        elif entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
