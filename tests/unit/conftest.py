"""Fixtures of the unit lane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from kvcached_patch.seams.apply import restore
from tests.library import Library

settings.register_profile("unit", deadline=None)  # nothing here depends on how fast a machine is
settings.load_profile("unit")


@pytest.fixture
def lib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """A library that can be imported; what a test armed is restored."""
    monkeypatch.syspath_prepend(tmp_path)
    yield Library(tmp_path)
    restore()
