"""Whether an installed target library has the seams, told from its sources alone."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.manifest import ANY_SIGNATURE, Manifest, Seam, Use, covers
from kvcached_patch.seams.sources import (
    Installed,
    calls,
    class_source,
    find_function,
    imports_by_value,
    normal_signature,
    parse_function,
    read_module,
)


@dataclass(frozen=True)
class SeamStatus:
    """What was expected of one seam, what the sources have, and whether they agree."""

    seam: Seam
    expected: str
    found: str
    ok: bool

    def as_json(self) -> dict[str, str | bool]:
        """What reports say of it, as JSON-able data."""
        return {
            "id": self.seam.id,
            "target": self.seam.target,
            "process": self.seam.process,
            "runner": self.seam.runner,
            "ok": self.ok,
            "expected": self.expected,
            "found": self.found,
        }


@dataclass(frozen=True)
class Verdict:
    """The decision for all seams of one library.

    problem: the reason to refuse, or ''. aside: the reason to leave the library as it is, or ''.
    """

    installed: Installed
    statuses: tuple[SeamStatus, ...]
    tested: bool
    problem: str
    aside: str = ""

    @property
    def seams(self) -> tuple[Seam, ...]:
        """The seams of this release."""
        return tuple(status.seam for status in self.statuses)


def locate(package: str) -> Installed | None:
    """Find a library without importing it; None if it is not installed.

    Raises SeamMismatch if its version cannot be told or is not a PEP 440 version.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)))
    return Installed(package, read_version(package, root), root)


def read_version(package: str, root: Path) -> Version:
    """Read the version a source tree states in ``_version.py``, else its distribution's.

    Raises SeamMismatch naming package, value and what was expected.
    """
    path = root / "_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    stated = re.search(r"""^__version__ = (?:version = )?['"]([^'"]+)['"]""", text, re.MULTILINE)
    if stated:
        value = stated[1]
    else:
        try:
            value = distribution_version(package)
        except PackageNotFoundError as error:
            raise SeamMismatch(
                f"{package} in {root}: version unknown; expected _version.py or the metadata of "
                f"distribution {package}"
            ) from error
    try:
        return Version(value)
    except InvalidVersion as error:
        raise SeamMismatch(f"{package} version {value!r}: expected a PEP 440 version") from error


def check(manifest: Manifest, installed: Installed, *, alone: bool = False) -> Verdict:
    """Compare every seam of the installed release before anything is patched.

    alone: look at its sources only, not at what else is installed here.
    """
    version = installed.version
    if aside := _aside(manifest, version, alone=alone):
        return Verdict(installed, (), manifest.is_tested(version), "", aside)
    statuses = tuple(_check_seam(seam, installed) for seam in manifest.seams_in(version))
    problem = ""
    if not covers(manifest.supported, version) or not statuses:
        problem = (
            f"{installed.package} {version}: no seams are known for this release; "
            f"expected {installed.package} {manifest.supported}"
        )
    elif not alone and sys.platform != "linux":
        problem = f"{installed.package} {version}: this system is {sys.platform}; expected linux"
    else:
        problem = "\n".join(
            [
                f"{installed.package} {version}: seam {s.seam.id} differs ({s.seam.target}): "
                f"expected {s.expected}; found {s.found}"
                for s in statuses
                if not s.ok
            ]
            + [
                f"{installed.package} {version}: {use.target} differs, which is relied on: {fault}"
                for use in manifest.uses_in(version)
                if (fault := _fault(use, installed))
            ]
        )
    return Verdict(installed, statuses, manifest.is_tested(version), problem)


def _aside(manifest: Manifest, version: Version, *, alone: bool) -> str:
    right = manifest.right is not None and covers(manifest.right, version)
    if right and not any(seam.setting for seam in manifest.seams_in(version)):
        return f"{manifest.package} {version} needs no patch"
    if not alone and manifest.displaced_by and importlib.util.find_spec(manifest.displaced_by):
        return f"{manifest.displaced_by} is installed and runs in the place of {manifest.package}"
    return ""


def _check_seam(seam: Seam, installed: Installed) -> SeamStatus:
    expected = normal_signature(parse_function(f"def f{seam.signature}: ..."))
    source = read_module(installed, seam.module)
    function = source and find_function(source, seam.qualname)
    if not function:
        return SeamStatus(seam, expected, f"no {seam.qualname} in {seam.module}", ok=False)
    found = normal_signature(function)
    missing = [f"no call of {name} in its body" for name in seam.calls if not calls(function, name)]
    for module in seam.importers_in(installed.version):
        text = read_module(installed, module)
        is_package = installed.root.joinpath(*module.split(".")[1:]).is_dir()
        if text is None or not imports_by_value(text, module, seam, is_package=is_package):
            missing.append(f"no from-import of it in {module}")
    ok = expected in (found, ANY_SIGNATURE) and not missing
    return SeamStatus(seam, expected, "; ".join([found, *missing]), ok)


def _fault(use: Use, installed: Installed) -> str:
    """What is not as it must be of a name that is relied on, '' if all is."""
    module, _, qualname = use.target.partition(":")
    source = read_module(installed, module)
    if use.signature:
        function = source and find_function(source, qualname)
        found = normal_signature(function) if function else "nothing"
        expected = normal_signature(parse_function(f"def f{use.signature}: ..."))
        return "" if found == expected else f"expected {expected}; found {found}"
    text = source and class_source(source, qualname)
    if not text:
        return "expected one such class; found none, or several"
    missing = [name for name in use.has if not _has(text, name)]
    methods = re.findall(r"^    (?:async )?def (\w+)", text, re.MULTILINE)
    new = [name for name in methods if not (name in use.methods or name.startswith("__"))]
    faults = [f"no {name}" for name in missing]
    faults += [f"a new method {name}" for name in new if use.methods]
    expected = ", ".join(use.methods or use.has)
    return f"expected {expected}; found {', '.join(faults)}" if faults else ""


def _has(class_source: str, name: str) -> bool:
    """Whether a class defines a method, a field or an attribute of this name."""
    pattern = rf"^    (?:async )?def {name}\(|^    {name}\b *[:=]|\bself\.{name}\b *[:=]"
    return re.search(pattern, class_source, re.MULTILINE) is not None


def unlisted_importers(manifest: Manifest, installed: Installed) -> list[tuple[Seam, str]]:
    """Modules that import a seam's function by value, at top level, and are in no manifest."""
    functions = [seam for seam in manifest.seams_in(installed.version) if seam.kind == "function"]
    found = []
    for path in sorted(installed.root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        is_package = path.name == "__init__.py"
        relative = path.relative_to(installed.root.parent).with_suffix("")
        module = ".".join(relative.parts[: -1 if is_package else None])
        found += [
            (seam, module)
            for seam in functions
            if seam.qualname in source
            and module not in (seam.module, *seam.importers_in(installed.version))
            and imports_by_value(source, module, seam, is_package=is_package)
        ]
    return found
