"""The settings, read from the environment in this one place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvcached_patch.core.retention import DEFAULT, Retention, parse_retention
from kvcached_patch.core.sizes import parse_bytes
from kvcached_patch.errors import ConfigError

T = TypeVar("T")

TOGGLE = "KVCACHED_PATCH"
POOL = "KVCACHED_PATCH_POOL"
RETAIN = "KVCACHED_PATCH_RETAIN"
LIMIT = "KVCACHED_PATCH_LIMIT"
BUDGET = "KVCACHED_PATCH_BUDGET"
SCAN = "KVCACHED_PATCH_SCAN"


class Mode(Enum):
    """What the toggle asks for."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


_SWITCH = {"": Mode.OFF, "0": Mode.OFF, "off": Mode.OFF, "1": Mode.ON, "on": Mode.ON}
SWITCH_FORMS = ("0", "off", "1", "on")
POOL_KINDS = ("auto", "host", "cuda", "static")
SCAN_KINDS = ("layers", "pool")
SIZE_FORMS = ("a size such as 512MiB or 2GiB",)
RETAIN_FORMS = ("all", "none", "a size such as 2GiB", "a duration such as 90s or 5min")


@dataclass(frozen=True)
class Setting:
    """A variable as people are told of it, in Markdown.

    default: what holds where it is unset or empty.
    """

    name: str
    values: tuple[str, ...]
    default: str
    meaning: str


SETTINGS = (
    Setting(
        TOGGLE,
        (*SWITCH_FORMS, "auto"),
        "0",
        "`0`, `off`: nothing is patched. `1`, `on`: vLLM is patched completely or "
        "does not start. `auto`: patched where everything matches, else stock vLLM and one warning "
        "that says why",
    ),
    Setting(
        POOL,
        POOL_KINDS,
        "auto",
        "where the KV cache's memory comes from. `host`: page by page, on CPUs. `cuda`: page by "
        "page, on NVIDIA GPUs, with cuda-bindings. `static`: one allocation that stays, on any "
        "device. `auto`: `host` or `cuda` where they serve, else `static`",
    ),
    Setting(
        RETAIN,
        RETAIN_FORMS,
        "60s",
        "how long, or how much, prefix cache that no request uses keeps its memory",
    ),
    Setting(LIMIT, SIZE_FORMS, "no limit", "the most that this engine may commit, on each device"),
    Setting(
        BUDGET,
        SIZE_FORMS,
        "none, or the one in force",
        "the most that all engines of this user may commit together, on each device; the first "
        "engine sets it",
    ),
    Setting(
        SCAN,
        SCAN_KINDS,
        "layers",
        "how MaxText's scanned layers have their KV caches. `layers`: one each, the loop unrolled. "
        "`pool`: one array for all layers of a kind, in a real scan",
    ),
)
VARIABLES = tuple(setting.name for setting in SETTINGS)


@dataclass(frozen=True)
class Config:
    """Settings of one process.

    mode: the toggle.
    pool: where KV-cache storage comes from; ``auto`` is ``host`` on a CPU, ``cuda``
        on NVIDIA GPUs where cuda-bindings is installed, else ``static``.
    retain: how long cached blocks that nobody uses keep their memory.
    limit: bytes this engine may commit. budget: bytes all engines may commit; None: as it is.
    scan: how scanned layers of MaxText have their KV caches.
    """

    mode: Mode = Mode.OFF
    pool: str = "auto"
    retain: Retention = DEFAULT
    limit: int | None = None
    budget: int | None = None
    scan: str = "layers"

    @property
    def chosen(self) -> tuple[str, ...]:
        """Settings by which seams are in force or not, as manifests name them."""
        return (f"{SCAN}={self.scan}",)


def parse_switch(name: str, value: str, *, auto: bool = False) -> Mode:
    """Parse a switch; the only parser of boolean variables.

    Raises ConfigError naming the variable, the value and what is allowed.
    """
    word = value.strip().lower()
    if auto and word == "auto":
        return Mode.AUTO
    if word not in _SWITCH:
        raise ConfigError(_expected(name, value, SWITCH_FORMS + ("auto",) * auto))
    return _SWITCH[word]


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings; with the toggle off nothing else is looked at.

    Raises ConfigError for a value that is not allowed and for an unknown ``KVCACHED_PATCH_*``
    variable (a misspelt setting must not be ignored).
    """
    env = os.environ if environ is None else environ
    mode = parse_switch(TOGGLE, env.get(TOGGLE, "0"), auto=True)
    if mode is Mode.OFF:
        return Config()
    for name in sorted(env):
        if name.startswith(TOGGLE + "_") and name not in VARIABLES:
            raise ConfigError(_expected(name, env[name], VARIABLES, what="unknown variable"))
    return Config(
        mode=mode,
        pool=_choice(env, POOL, POOL_KINDS, "auto"),
        retain=_parsed(env, RETAIN, parse_retention, RETAIN_FORMS) or DEFAULT,
        limit=_parsed(env, LIMIT, _positive_bytes, SIZE_FORMS),
        budget=_parsed(env, BUDGET, _positive_bytes, SIZE_FORMS),
        scan=_choice(env, SCAN, SCAN_KINDS, "layers"),
    )


def ledger_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Where the ledgers of this user are."""
    from kvcached_patch.system import default_dir

    env = os.environ if environ is None else environ
    return default_dir(env.get("XDG_RUNTIME_DIR"), Path(tempfile.gettempdir()), os.getuid())


def raw(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return a variable as it stands, None if unset: one of ours to be shown, or one of vLLM's."""
    return (os.environ if environ is None else environ).get(name)


def _expected(name: str, value: str, allowed: tuple[str, ...], what: str = "bad value") -> str:
    return f"{name}={value!r}: {what}; expected one of: {', '.join(allowed)}"


def _choice(env: Mapping[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    """A variable's value, one of a few words; the default if it is unset or empty."""
    word = env.get(name, "").strip().lower() or default
    if word not in allowed:
        raise ConfigError(_expected(name, env[name], allowed))
    return word


def _parsed(
    env: Mapping[str, str], name: str, parse: Callable[[str], T], forms: tuple[str, ...]
) -> T | None:
    """A variable's value; None if it is unset or empty."""
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except ConfigError as error:
        raise ConfigError(_expected(name, env[name], forms)) from error


def _positive_bytes(text: str) -> int:
    nbytes = parse_bytes(text)
    if not nbytes:
        raise ConfigError("0 bytes")
    return nbytes
