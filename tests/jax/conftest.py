"""The jax lane runs patched, on CPUs: all is set before JAX, vLLM or MaxText are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvcached_patch import config
from tools.maxtext import environment

environment.prepare("1", scan="pool")

from tools.maxtext import kernels  # noqa: E402
from tools.maxtext.models import MODELS  # noqa: E402
from tools.maxtext.served import Served  # noqa: E402

Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels.install(monkeypatch.setattr)
        yield


@pytest.fixture(scope="session")
def serve(stand_ins: None) -> Serve:
    """Models by name and KVCACHED_PATCH_SCAN; each is made once."""
    made: dict[tuple[str, str], Served] = {}

    def serve(name: str, scan: str = "layers") -> Served:
        if (name, scan) not in made:
            with pytest.MonkeyPatch.context() as monkeypatch:
                monkeypatch.setenv(config.SCAN, scan)
                made[name, scan] = Served(MODELS[name])
        return made[name, scan]

    return serve
