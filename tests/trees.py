"""Small source trees: to be read by the seam check, or imported as libraries of their own."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kvcached_patch.seams.manifest import Importer, Manifest, Seam, Use
from kvcached_patch.seams.sources import Installed


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write files below `root`, each text dedented; returns `root`."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def installed(root: Path, files: Mapping[str, str], version: str = "1.0") -> Installed:
    """A package `lib` with these files, of that version, to be parsed only."""
    return Installed("lib", Version(version), write(root / "lib", files))


def seam(target: str = "lib.work:allocate", signature: str = "(plan)", **given: Any) -> Seam:
    """A seam with everything that a test does not care about; importers are names or pairs."""
    importers = [(i, "") if isinstance(i, str) else i for i in given.pop("importers", ())]
    return Seam(
        id=given.pop("id", target.rpartition(":")[2]),
        target=target,
        kind="method" if "." in target.partition(":")[2] else "function",
        versions=SpecifierSet(given.pop("versions", "")),
        signature=signature,
        importers=tuple(Importer(module, SpecifierSet(range)) for module, range in importers),
        calls=tuple(given.pop("calls", ())),
        process="worker",
        runner="any",
        wrapper=given.pop("wrapper", "ours:wrapper"),
        why="a test",
        remove_when="never",
    )


def use(target: str, versions: str = "", **given: Any) -> Use:
    """A name that is relied on: `signature`, or `has` and `methods`."""
    has, methods = given.get("has", ()), given.get("methods", ())
    return Use(target, SpecifierSet(versions), given.get("signature", ""), has, methods, "a test")


def manifest(
    *seams: Seam,
    supported: str = ">=1",
    tested: tuple[str, ...] = ("1.0",),
    uses: tuple[Use, ...] = (),
) -> Manifest:
    """A manifest of `lib`."""
    return Manifest("lib", SpecifierSet(supported), tested, seams, uses)
