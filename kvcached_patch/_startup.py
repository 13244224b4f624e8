"""Decide, when a target library is first imported, whether it is patched in this process."""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from logging import Logger
    from types import ModuleType

    from kvcached_patch.config import Config, Mode
    from kvcached_patch.errors import KvcachedPatchError
    from kvcached_patch.seams.check import Verdict

TARGETS = {"vllm": "vLLM", "tpu_inference": "tpu-inference", "maxtext": "MaxText"}

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
            decide(package)
        return None


_watch = _ImportWatch()
_decisions: dict[str, Mode] = {}


def install() -> None:
    """Watch for the first import of each target; the door of the ``.pth`` file. Idempotent."""
    with _lock:
        if _watch not in sys.meta_path and (not _decisions or _undecided()):
            sys.meta_path.insert(0, _watch)


def watching() -> bool:
    """Whether this process waits for the first import of a target."""
    return _watch in sys.meta_path


def install_plugin() -> None:
    """Decide now; the door of vLLM's ``vllm.general_plugins``, which calls it in each process.

    A target that is not imported yet is decided when it is. Raises what `decide` raises: vLLM
    treats it as fatal.
    """
    from kvcached_patch import config

    off = config.load().mode is config.Mode.OFF
    if any(off is not (mode is config.Mode.OFF) for mode in _decisions.values()):
        _reconsider()
    for package in TARGETS:
        if package == "vllm" or package in sys.modules:
            decide(package)
    if not off:
        install()


def decide(package: str) -> None:
    """Check every seam of a target and patch all of them or none; done once, unless it raises.

    Raises ConfigError for bad settings and, in strict mode, SeamMismatch for a release whose
    seams differ: at every import of one of its modules, until the cause is gone.
    """
    with _lock:
        if package in _decisions:
            return
        from kvcached_patch import config

        settings = config.load()
        if settings.mode is not config.Mode.OFF:
            from kvcached_patch.errors import SeamMismatch

            try:
                _patch(package, settings)
            except SeamMismatch as error:
                _refuse(package, error)
        _decisions[package] = settings.mode
        if _watch in sys.meta_path and not _undecided():
            sys.meta_path.remove(_watch)


def _undecided() -> list[str]:
    """The installed targets that nothing has imported so far."""
    from importlib.util import find_spec

    return [package for package in TARGETS if package not in _decisions and find_spec(package)]


def examine(package: str, settings: Config) -> Verdict | None:
    """Compare the installed target with its manifest, under these settings; None: not installed."""
    from kvcached_patch.seams.check import check, locate
    from kvcached_patch.seams.manifest import load_manifest

    installed = locate(package)
    return check(load_manifest(package).under(settings.chosen), installed) if installed else None


def _patch(package: str, settings: Config) -> None:
    from kvcached_patch.errors import SeamMismatch
    from kvcached_patch.seams.apply import arm

    verdict = examine(package, settings)
    if verdict is None:
        return
    if verdict.aside:
        _logger().info("kvcached-patch: %s", verdict.aside)
        return
    if verdict.problem:
        raise SeamMismatch(verdict.problem)
    version = verdict.installed.version
    if not verdict.tested and _is_first():
        _logger().warning(
            "kvcached-patch: %s %s is untested; all its seams match, so it is patched",
            package,
            version,
        )
    arm(verdict.seams, version, on_conflict=lambda error: _refuse(package, error))


def _refuse(package: str, error: KvcachedPatchError) -> None:
    """Raise in strict mode, now and at every later import; with ``auto`` warn and stay stock."""
    from kvcached_patch import config

    if config.load().mode is config.Mode.AUTO:
        if _is_first():
            _logger().warning("kvcached-patch: off, %s runs unpatched: %s", TARGETS[package], error)
        return
    _decisions.pop(package, None)
    install()
    raise error


def _is_first() -> bool:
    """Whether this is no child of a process that has said the same."""
    import multiprocessing

    # A spawned child imports its target before it knows its parent (multiprocessing/spawn.py).
    spawned = getattr(multiprocessing.current_process(), "_inheriting", False)
    return multiprocessing.parent_process() is None and not spawned


def _reconsider() -> None:
    """Forget all decisions: the toggle was set or unset since, in the script."""
    from kvcached_patch.seams.apply import restore

    restore()
    _decisions.clear()


def _logger() -> Logger:
    """A child of vLLM's logger: shown by its handlers, at its level, once vLLM has set them up."""
    import logging

    return logging.getLogger("vllm.kvcached_patch")
