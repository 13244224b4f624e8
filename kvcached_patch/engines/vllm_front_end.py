"""The seam of vLLM's front end: it says that it is patched, and shows what its engines hold."""

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
    # Here, since other processes import MPClient, too, but have no metrics.
    from kvcached_patch.engines.vllm_metrics import register

    logger.info("kvcached-patch %s active: front end, seams applied: %s", __version__, tally())
    wrapped(*args, **kwargs)
    register()
