"""The seam of vLLM's front end: it says that it is patched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvcached_patch import __version__
from kvcached_patch.seams.apply import tally

logger = logging.getLogger("vllm.kvcached_patch")


def connect(
    wrapped: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """``MPClient.__init__``: made once in each front-end process whose EngineCore is another."""
    logger.info("kvcached-patch %s active: front end, seams applied: %s", __version__, tally())
    wrapped(*args, **kwargs)
