"""The jax lane runs patched, on CPUs: all is set before JAX, vLLM or MaxText are imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tools.maxtext import environment

environment.prepare("1")

from tools.maxtext import kernels  # noqa: E402
from tools.maxtext.models import MODELS  # noqa: E402
from tools.maxtext.served import Served  # noqa: E402

Serve = Callable[[str], Served]


@pytest.fixture(scope="session")
def stand_ins() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels.install(monkeypatch.setattr)
        yield


@pytest.fixture(scope="session")
def serve(stand_ins: None) -> Serve:
    """Models by name; each is made once."""
    made: dict[str, Served] = {}

    def serve(name: str) -> Served:
        if name not in made:
            made[name] = Served(MODELS[name])
        return made[name]

    return serve
