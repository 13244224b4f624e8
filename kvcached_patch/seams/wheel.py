"""Whether a wheel has the seams, told from its Python files without installing it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from packaging.version import InvalidVersion, Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.check import Verdict, check, unlisted_importers
from kvcached_patch.seams.manifest import load_manifest
from kvcached_patch.seams.sources import Installed


@dataclass(frozen=True)
class WheelReport:
    """What was found in one wheel.

    unlisted: seam and module of every by-value importer that the manifest does not name.
    """

    verdict: Verdict
    unlisted: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """Whether the release could be patched, or needs no patch."""
        return not (self.verdict.problem or self.unlisted)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        verdict = self.verdict
        return {
            "package": verdict.installed.package,
            "version": str(verdict.installed.version),
            "ok": self.ok,
            "tested": verdict.tested,
            "aside": verdict.aside,
            "problem": verdict.problem,
            "seams": [status.as_json() for status in verdict.statuses],
            "unlisted_importers": [list(each) for each in self.unlisted],
        }

    def text(self) -> str:
        """The report for people."""
        verdict = self.verdict
        name = f"{verdict.installed.package} {verdict.installed.version}"
        if verdict.aside:
            return f"{name}: left as it is: {verdict.aside}"
        matching = sum(status.ok for status in verdict.statuses)
        tested = "tested" if verdict.tested else "not tested with whole engines"
        lines = [f"{name}: {matching} of {len(verdict.statuses)} seams match; {tested}"]
        lines += verdict.problem.splitlines()
        lines += [
            f"seam {seam}: {module} imports it by value; expected only the manifest's importers"
            for seam, module in self.unlisted
        ]
        return "\n".join(lines)


def examine(wheel: Path, packages: Collection[str], chosen: Collection[str]) -> WheelReport:
    """Check the wheel of one of the packages (import names) against that package's manifest.

    chosen: see `Manifest.under`.

    Raises SeamMismatch if the file is no wheel, or one of another package.
    """
    with _unpacked(wheel, packages) as installed:
        manifest = load_manifest(installed.package).under(chosen)
        verdict = check(manifest, installed, alone=True)
        unlisted = () if verdict.aside else unlisted_importers(manifest, installed)
        return WheelReport(verdict, tuple((seam.id, module) for seam, module in unlisted))


@contextmanager
def _unpacked(wheel: Path, packages: Collection[str]) -> Iterator[Installed]:
    try:
        with ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
            names = archive.namelist()
            package = next((p for p in packages if f"{p}/__init__.py" in names), None)
            if package is None:
                raise SeamMismatch(f"{wheel}: found none of the packages {', '.join(packages)}")
            version = _version(wheel, archive)
            sources = [n for n in names if n.startswith(f"{package}/") and n.endswith(".py")]
            archive.extractall(folder, sources)
            yield Installed(package, version, Path(folder, package))
    except (BadZipFile, OSError) as error:
        raise SeamMismatch(f"{wheel}: expected a wheel: {error}") from error


def _version(wheel: Path, archive: ZipFile) -> Version:
    for name in archive.namelist():
        if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
            text = archive.read(name).decode("utf-8")
            stated = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
            try:
                return Version(stated[1] if stated else "")
            except InvalidVersion as error:
                raise SeamMismatch(f"{wheel}: {name}: expected a PEP 440 version") from error
    raise SeamMismatch(f"{wheel}: expected the metadata of a wheel (*.dist-info/METADATA)")
