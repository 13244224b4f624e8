"""Put the wrappers in place, and take them away again."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import wrapt
from packaging.version import Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.manifest import Seam


@dataclass
class _Change:
    """One attribute that was replaced: its undo is ``setattr(owner, name, original)``."""

    owner: Any
    name: str
    original: Any
    replacement: Any

    @property
    def in_place(self) -> bool:
        return vars(self.owner)[self.name] is self.replacement

    @property
    def where(self) -> str:
        return f"{self.owner.__name__}.{self.name}"


@dataclass(eq=False)
class AppliedSeam:
    """What was done for one seam in this process; changes are empty until its module loads."""

    seam: Seam
    importers: tuple[str, ...]
    changes: list[_Change] = field(default_factory=list)

    @property
    def package(self) -> str:
        """The library that the seam belongs to."""
        return self.seam.module.partition(".")[0]

    @property
    def loaded(self) -> bool:
        """Whether the defining module is imported, so that the seam must be in place."""
        return self.seam.module in sys.modules

    @property
    def applied(self) -> bool:
        """Whether the wrapper stands at the target and at every importer that is imported."""
        if not self.changes:
            return False
        replacement = self.changes[0].replacement
        owner, name = _resolve(sys.modules[self.seam.module], self.seam)
        held = [vars(owner)[name]]
        held += [vars(sys.modules[m])[name] for m in self.importers if m in sys.modules]
        return all(value is replacement for value in held)


_armed: list[AppliedSeam] = []

# Decorators of these packages are the library's own doing: vLLM's @torch.inference_mode(), and
# flax's around every method of a linen module.
_DECORATORS = ("torch", "contextlib", "flax")


def armed() -> tuple[AppliedSeam, ...]:
    """The seams this process watches, in the manifest's order; empty when switched off."""
    return tuple(_armed)


def tally() -> str:
    """``applied/loaded``: seams in place, of those whose module this process has imported."""
    loaded = [entry for entry in _armed if entry.loaded]
    return f"{sum(entry.applied for entry in loaded)}/{len(loaded)}"


def arm(
    seams: Sequence[Seam], version: Version, on_conflict: Callable[[SeamMismatch], None]
) -> None:
    """Wrap each seam of one library now if its module is imported, else as soon as it is.

    Called once all seams of the release were found to match. A seam that something else already
    wraps takes all of its library back and is handed to `on_conflict`, which raises or tells.
    """
    entries = [AppliedSeam(seam, seam.importers_in(version)) for seam in seams]
    if {entry.package for entry in entries} & {entry.package for entry in _armed}:
        return
    _armed.extend(entries)
    for entry in entries:
        for module in (entry.seam.module, *entry.importers):
            wrapt.register_post_import_hook(_hook(entry, on_conflict), module)


def restore() -> None:
    """Put every original back and stop watching.

    Raises SeamMismatch, with nothing restored, if another tool has since wrapped a wrapper.
    """
    for change in [change for entry in _armed for change in entry.changes]:
        if not change.in_place:
            raise SeamMismatch(
                f"{change.where}: cannot be restored; expected our wrapper, found one of "
                f"{_origin(vars(change.owner)[change.name])}"
            )
    for package in {entry.package for entry in _armed}:
        _withdraw(package)


def _withdraw(package: str) -> None:
    """Put a library's originals back wherever our wrapper still stands, and stop watching it.

    A wrapper that another tool has wrapped stays below it, where it does nothing: the gate, which
    no such tool is known to touch, is what makes the others act.
    """
    entries = [entry for entry in _armed if entry.package == package]
    for change in reversed([change for entry in entries for change in entry.changes]):
        if change.in_place:
            setattr(change.owner, change.name, change.original)
    _armed[:] = [entry for entry in _armed if entry.package != package]


def _hook(
    entry: AppliedSeam, on_conflict: Callable[[SeamMismatch], None]
) -> Callable[[ModuleType], None]:
    def apply(module: ModuleType) -> None:
        if entry not in _armed:
            return
        try:
            if module.__name__ == entry.seam.module:
                _wrap(entry, module)
            else:
                _rebind(entry, module)
        except SeamMismatch as error:
            _withdraw(entry.package)
            on_conflict(error)

    return apply


def _wrap(entry: AppliedSeam, module: ModuleType) -> None:
    owner, name = _resolve(module, entry.seam)
    original = vars(owner)[name]
    origin = _origin(original)
    if origin.partition(".")[0] != entry.package:
        raise SeamMismatch(
            f"seam {entry.seam.id} ({entry.seam.target}): wrapped by {origin}; "
            "expected the library's own function. Switch one of the two off"
        )
    replacement = wrapt.FunctionWrapper(original, _wrapper(entry.seam.wrapper))
    _replace(entry, _Change(owner, name, original, replacement))
    for importer in entry.importers:
        if importer in sys.modules and name in vars(sys.modules[importer]):
            _rebind(entry, sys.modules[importer])


def _rebind(entry: AppliedSeam, module: ModuleType) -> None:
    """Make an importer hold the wrapper: it took the original before, or the wrapper after."""
    if not entry.changes or any(change.owner is module for change in entry.changes):
        return
    wrapped = entry.changes[0]
    _, name = _resolve(module, entry.seam)
    value = vars(module)[name]
    if value is not wrapped.original and value is not wrapped.replacement:
        raise SeamMismatch(
            f"seam {entry.seam.id}: {module.__name__}.{name} is wrapped by {_origin(value)}; "
            "expected the library's own function. Switch one of the two off"
        )
    _replace(entry, _Change(module, name, wrapped.original, wrapped.replacement))


def _replace(entry: AppliedSeam, change: _Change) -> None:
    entry.changes.append(change)
    setattr(change.owner, change.name, change.replacement)


def _resolve(module: ModuleType, seam: Seam) -> tuple[Any, str]:
    """The object whose attribute the seam is, and the attribute's name."""
    *outer, name = seam.qualname.split(".")
    owner: Any = module
    for part in [*outer, name]:
        if part not in vars(owner):
            raise SeamMismatch(
                f"seam {seam.id}: {module.__name__} has no {seam.qualname} once it is imported; "
                "expected what its source says"
            )
        owner, parent = vars(owner)[part], owner
    return parent, name


def _wrapper(target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _origin(value: Any) -> str:
    """The module whose code runs when this function is called.

    ``__module__`` is copied by functools.wraps, so it names the wrapped function's module; the
    globals of the code that runs cannot be.
    """
    if isinstance(value, wrapt.FunctionWrapper):
        value = value._self_wrapper
    if isinstance(value, staticmethod):
        value = value.__func__
    origin = str(getattr(value, "__globals__", {}).get("__name__", type(value).__module__))
    if origin.partition(".")[0] in _DECORATORS and hasattr(value, "__wrapped__"):
        return _origin(value.__wrapped__)
    return origin
