"""The matrix lane runs patched: the toggle is set before vLLM is imported."""

from __future__ import annotations

import os

import pytest

from kvcached_patch import _startup

os.environ["KVCACHED_PATCH"] = "1"
_startup.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tell the result which caches a test stands for, for the table of support."""
    for item in items:
        for mark in item.iter_markers():
            if mark.name in ("shape", "driven"):
                item.user_properties += [(mark.name, what) for what in mark.args]
