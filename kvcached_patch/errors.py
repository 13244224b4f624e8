"""The errors a user can meet."""

from collections.abc import Sequence


class KvcachedPatchError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(KvcachedPatchError):
    """An environment variable or command-line value that cannot be honoured."""


class SeamMismatch(KvcachedPatchError):
    """The installed target library differs from what the seam manifest describes."""


class LayerPlanError(KvcachedPatchError):
    """Layers that cannot be given storage: the message names them."""


class PoolExhausted(KvcachedPatchError):
    """A pool or the shared budget has no page left to commit."""


class DriverError(KvcachedPatchError):
    """The memory backend refused a call: the message names call, size and reason."""


class LedgerError(KvcachedPatchError):
    """A shared-budget file that cannot be used: what was found, what is expected."""


class EngineNotFound(LedgerError):
    """No live engine has this name: the message lists the names there are."""

    def __init__(self, name: str, live: Sequence[str], problems: Sequence[str] = ()) -> None:
        """`problems`: of ledgers that could not be read, where it may be."""
        known = f"expected one of: {', '.join(live)}" if live else "no engine is running"
        super().__init__("; ".join([f"found no engine {name!r}; {known}", *problems]))
