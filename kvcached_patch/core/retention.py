"""How long cached blocks that nobody uses are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcached_patch.core.sizes import parse_bytes
from kvcached_patch.errors import ConfigError

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?) *(ms|s|min|h)", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Retention:
    """A bound on cached blocks in no use: None is no bound.

    seconds: since their last use. nbytes: of their contents, all pools together.
    """

    seconds: float | None = None
    nbytes: int | None = None


KEEP_ALL = Retention()
# A minute bridges the turns of a conversation and the requests of an agent's loop, which is what
# prefix caching is for; a quiet engine has given everything back a minute later.
DEFAULT = Retention(seconds=60.0)


def parse_retention(text: str) -> Retention:
    """``all``, ``none``, a size such as ``2GiB`` or a duration such as ``90s`` or ``5min``.

    Raises ConfigError naming the value and what is expected.
    """
    word = text.strip().lower()
    if word == "all":
        return KEEP_ALL
    if word == "none":
        return Retention(nbytes=0)
    if found := _DURATION.fullmatch(word):
        return Retention(seconds=float(found[1]) * _SECONDS[found[2]])
    try:
        return Retention(nbytes=parse_bytes(word))
    except ConfigError as error:
        raise ConfigError(
            f"{text!r}: expected all, none, a size (512MiB, 2GiB) or a duration (500ms, 60s, 5min)"
        ) from error
