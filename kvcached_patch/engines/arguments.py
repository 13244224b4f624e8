"""Arguments of a wrapped call by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def named(
    wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Bind a call's arguments to the wrapped function's parameter names, defaults filled in."""
    bound = inspect.signature(wrapped).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
