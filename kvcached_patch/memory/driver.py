"""Calls of NVIDIA's driver, each of them checked."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvcached_patch.errors import DriverError, PoolExhausted

INSTALL = "pip install 'kvcached-patch[cuda]'"


def installed() -> bool:
    """Whether the package is there; says nothing of a driver or a GPU."""
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


def load() -> Any:
    """The module of the driver's functions, initialised: ``cuda.bindings.driver``.

    Raises DriverError saying what is missing: the package, the driver's library, a GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(f"cuda-bindings: not installed ({error}); {INSTALL}") from error
    try:
        call(driver, "cuInit", 0)
    except RuntimeError as error:  # what cuda-bindings raises for a library it cannot load
        raise DriverError(f"NVIDIA's driver library: not found ({error})") from error
    return driver


def call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a function of the driver; returns its results without the code.

    Raises PoolExhausted where the device is out of memory, DriverError for every other code; both
    name the call, its arguments and the code.
    """
    code, *results = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        short = code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        shown = ", ".join(str(each) for each in arguments if isinstance(each, int))
        raise (PoolExhausted if short else DriverError)(f"{name}({shown}): {code.name}")
    return results[0] if len(results) == 1 else tuple(results)
