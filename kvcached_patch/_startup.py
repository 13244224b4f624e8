"""Decide, when vLLM is first imported, whether this process is patched."""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from logging import Logger
    from types import ModuleType

    from kvcached_patch.config import Mode
    from kvcached_patch.errors import KvcachedPatchError
    from kvcached_patch.seams.check import Verdict

TARGETS = ("vllm",)

_lock = threading.RLock()


class _ImportWatch:
    """Sees the first import of a target's submodule, which no mere look-up of the target does.

    ``find_spec("vllm")``, which other libraries call to learn whether vLLM is installed, asks for
    the package only; importing it for real always asks for ``vllm.version`` and more.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, dot, _ = fullname.partition(".")
        if dot and package in TARGETS:
            decide()
        return None


_watch = _ImportWatch()
_decision: Mode | None = None


def install() -> None:
    """Watch for the first import of a target; the door of the ``.pth`` file. Idempotent."""
    with _lock:
        if _decision is None and _watch not in sys.meta_path:
            sys.meta_path.insert(0, _watch)


def install_plugin() -> None:
    """Decide now; the door of vLLM's ``vllm.general_plugins``, which calls it in each process.

    Raises what `decide` raises: vLLM treats it as fatal.
    """
    from kvcached_patch import config

    off = config.Mode.OFF
    if _decision is not None and (config.load().mode is off) is not (_decision is off):
        _reconsider()
    decide()


def decide() -> None:
    """Check every seam and patch all of them or none; done once, unless it raises.

    Raises ConfigError for bad settings and, in strict mode, SeamMismatch for a release whose
    seams differ: at every import of a vLLM module, until the cause is gone.
    """
    global _decision
    with _lock:
        if _decision is not None:
            return
        from kvcached_patch import config

        settings = config.load()
        if settings.mode is not config.Mode.OFF:
            from kvcached_patch.errors import SeamMismatch

            try:
                _patch("vllm")
            except SeamMismatch as error:
                _refuse(error)
        _decision = settings.mode
        if _watch in sys.meta_path:
            sys.meta_path.remove(_watch)


def examine(package: str) -> Verdict | None:
    """Compare the installed target with its manifest; None if it is not installed."""
    from kvcached_patch.seams.check import check, locate
    from kvcached_patch.seams.manifest import load_manifest

    installed = locate(package)
    return check(load_manifest(package), installed) if installed else None


def _patch(package: str) -> None:
    import multiprocessing

    from kvcached_patch.errors import SeamMismatch
    from kvcached_patch.seams.apply import arm

    verdict = examine(package)
    if verdict is None:
        return
    if verdict.problem:
        raise SeamMismatch(verdict.problem)
    version = verdict.installed.version
    if not verdict.tested and multiprocessing.parent_process() is None:
        _logger().warning(
            "kvcached-patch: %s %s is untested; all its seams match, so it is patched",
            package,
            version,
        )
    arm(verdict.seams, version, on_conflict=_refuse)


def _refuse(error: KvcachedPatchError) -> None:
    """Raise in strict mode, now and at every later import; with ``auto`` warn and stay stock."""
    global _decision
    from kvcached_patch import config

    if config.load().mode is config.Mode.AUTO:
        _logger().warning("kvcached-patch: off, vLLM runs unpatched: %s", error)
        return
    _decision = None
    install()
    raise error


def _reconsider() -> None:
    """Forget a decision: the toggle was set or unset since, in the script."""
    global _decision
    from kvcached_patch.seams.apply import restore

    restore()
    _decision = None


def _logger() -> Logger:
    """A child of vLLM's logger: shown by its handlers, at its level, once vLLM has set them up."""
    import logging

    return logging.getLogger("vllm.kvcached_patch")
