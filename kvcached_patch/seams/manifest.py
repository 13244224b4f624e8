"""What is patched, read from ``manifests/seams/*.toml``."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from kvcached_patch.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Collection
    from importlib.abc import Traversable

KINDS = ("function", "method")
PROCESSES = ("front_end", "engine_core", "worker")
ANY_SIGNATURE = "(*args, **kwargs)"
RUNNERS = ("v1", "v2", "any")


@dataclass(frozen=True)
class Importer:
    """A module that imports the seam's function by value, in a range of releases."""

    module: str
    versions: SpecifierSet


@dataclass(frozen=True)
class Seam:
    """One patched name.

    target: ``module:qualname``. signature: parameter names, kinds and defaults, without
    annotations; ANY_SIGNATURE where the wrapper only passes arguments through.
    calls: dotted names that the body must call, because the wrapper relies on it.
    process, runner: where it takes effect. wrapper: our ``module:function``. setting: the
    ``VARIABLE=value`` that it is applied with only; '' for always.
    """

    id: str
    target: str
    kind: str
    versions: SpecifierSet
    signature: str
    calls: tuple[str, ...]
    importers: tuple[Importer, ...]
    process: str
    runner: str
    wrapper: str
    why: str
    remove_when: str
    setting: str = ""

    @property
    def module(self) -> str:
        """The module that defines the name."""
        return self.target.partition(":")[0]

    @property
    def qualname(self) -> str:
        """The name inside the module: ``function`` or ``Class.method``."""
        return self.target.partition(":")[2]

    def importers_in(self, version: Version) -> tuple[str, ...]:
        """Modules that hold their own reference to the function in this release."""
        return tuple(i.module for i in self.importers if covers(i.versions, version))


@dataclass(frozen=True)
class Use:
    """A name of the library that our code relies on without patching it.

    target: ``module:qualname``. signature: of a function, else ''. has: attributes and methods
    that a class must have. methods: all methods that a class may have, but for dunders; empty if
    others do no harm.
    """

    target: str
    versions: SpecifierSet
    signature: str
    has: tuple[str, ...]
    methods: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Manifest:
    """All seams of one target library.

    package: its import name. supported: releases the seams are written for. tested: releases
    they were run against. right: releases that need no patch, unless a setting asks for one.
    displaced_by: a package whose
    presence means that this library's patched parts do not run.
    """

    package: str
    supported: SpecifierSet
    tested: tuple[str, ...]
    seams: tuple[Seam, ...]
    uses: tuple[Use, ...] = ()
    right: SpecifierSet | None = None
    displaced_by: str = ""

    def under(self, chosen: Collection[str]) -> Manifest:
        """Without the seams whose setting is not among the chosen ones."""
        seams = tuple(s for s in self.seams if not s.setting or s.setting in chosen)
        return replace(self, seams=seams)

    def seams_in(self, version: Version) -> tuple[Seam, ...]:
        """The seams that this release must have."""
        return tuple(seam for seam in self.seams if covers(seam.versions, version))

    def uses_in(self, version: Version) -> tuple[Use, ...]:
        """What this release must have besides."""
        return tuple(use for use in self.uses if covers(use.versions, version))

    def is_tested(self, version: Version) -> bool:
        """Whether this release was run against; post-releases and local builds are that release."""
        return not version.is_prerelease and version.base_version in self.tested


def covers(versions: SpecifierSet, version: Version) -> bool:
    """Whether a range holds a version; a pre-release counts as the release it leads to.

    PEP 440 leaves 0.29.0rc1 out of both ``<0.29`` and ``>=0.29``; its sources are 0.29's.
    """
    return versions.contains(version.base_version, prereleases=True)


def manifest_dir() -> Traversable:
    """The directory of seam manifests: inside the wheel, beside the package in a checkout."""
    package = files("kvcached_patch")
    packed = package / "manifests" / "seams"
    return packed if packed.is_dir() else package / ".." / "manifests" / "seams"


def load_manifest(package: str) -> Manifest:
    """Load the manifest of one target library.

    Raises ConfigError naming file, key, value and what was expected.
    """
    path = manifest_dir() / f"{package}.toml"
    return parse_manifest(path.read_text(encoding="utf-8"), f"{package}.toml")


def parse_manifest(text: str, source: str) -> Manifest:
    """Parse a manifest; `source` names it in errors.

    Raises ConfigError naming file, key, value and what was expected.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML: {error}") from error
    top = _Table(source, data)
    target = _Table(f"{source} [target]", top.take("target", dict, default={}))
    entries = top.take("seam", list, default=[])
    used = top.take("use", list, default=[])
    top.done()
    tested = target.texts("tested")
    manifest = Manifest(
        package=target.text("package"),
        supported=target.versions("supported"),
        tested=tuple(tested),
        right=target.versions("right") if "right" in target else None,
        displaced_by=target.text("displaced_by") if "displaced_by" in target else "",
        seams=tuple(
            _seam(_Table(f"{source} [[seam]] {n}", entry))
            for n, entry in enumerate(entries, start=1)
        ),
        uses=tuple(
            _use(_Table(f"{source} [[use]] {n}", entry)) for n, entry in enumerate(used, start=1)
        ),
    )
    target.done()
    seen: set[str] = set()
    for seam in manifest.seams:
        if seam.id in seen:
            raise ConfigError(f"{source}: id={seam.id!r}: given twice; expected unique ids")
        seen.add(seam.id)
    return manifest


def _seam(table: _Table) -> Seam:
    importers = tuple(
        _importer(_Table(f"{table.where} importers {n}", entry))
        for n, entry in enumerate(table.take("importers", list, default=[]), start=1)
    )
    seam = Seam(
        id=table.text("id"),
        target=table.text("target"),
        kind=table.choice("kind", KINDS),
        versions=table.versions("versions"),
        signature=table.text("signature"),
        calls=tuple(table.texts("calls", default=[])),
        importers=importers,
        process=table.choice("process", PROCESSES),
        runner=table.choice("runner", RUNNERS),
        wrapper=table.text("wrapper"),
        why=table.text("why"),
        remove_when=table.text("remove_when"),
        setting=table.text("setting") if "setting" in table else "",
    )
    table.done()
    _require_name(table, "target", seam.target)
    _require_name(table, "wrapper", seam.wrapper)
    if (seam.kind == "method") != ("." in seam.qualname):
        raise ConfigError(
            f"{table.where}: target={seam.target!r}: expected module:Class.name for a method, "
            "module:name for a function"
        )
    _require_signature(table, seam.signature)
    return seam


def _use(table: _Table) -> Use:
    use = Use(
        target=table.text("target"),
        versions=table.versions("versions"),
        signature=table.text("signature") if "signature" in table else "",
        has=tuple(table.texts("has", default=[])),
        methods=tuple(table.texts("methods", default=[])),
        why=table.text("why"),
    )
    table.done()
    _require_name(table, "target", use.target)
    if use.signature:
        _require_signature(table, use.signature)
    if bool(use.signature) is bool(use.has):
        raise ConfigError(f"{table.where}: expected signature, for a function, or has, for a class")
    return use


def _require_name(table: _Table, key: str, value: str) -> None:
    module, colon, name = value.partition(":")
    if not (colon and module and name):
        raise ConfigError(f"{table.where}: {key}={value!r}: expected module:name")


def _require_signature(table: _Table, signature: str) -> None:
    try:
        statements = ast.parse(f"def f{signature}: ...").body
    except SyntaxError:
        statements = []
    if len(statements) != 1:
        raise ConfigError(f"{table.where}: signature={signature!r}: expected a parameter list")


def _importer(table: _Table) -> Importer:
    importer = Importer(table.text("module"), table.versions("versions"))
    table.done()
    return importer


class _Table:
    """A TOML table whose every key is checked and used once."""

    def __init__(self, where: str, data: Any) -> None:
        if not isinstance(data, dict):
            raise ConfigError(f"{where}: {data!r}: expected a table")
        self.where = where
        self._data = dict(data)
        self._used: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        value = self._data.pop(key, default)
        self._used.append(key)
        if not isinstance(value, kind):
            raise ConfigError(f"{self.where}: {key}={value!r}: expected a {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        value: str = self.take(key, str)
        if not value.strip():
            raise ConfigError(f"{self.where}: {key}={value!r}: expected some text")
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        values: list[str] = self.take(key, list, default)
        if not all(isinstance(value, str) for value in values):
            raise ConfigError(f"{self.where}: {key}={values!r}: expected a list of strings")
        return values

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in allowed:
            raise ConfigError(
                f"{self.where}: {key}={value!r}: expected one of: {', '.join(allowed)}"
            )
        return value

    def versions(self, key: str) -> SpecifierSet:
        value = self.text(key)
        try:
            return SpecifierSet(value)
        except InvalidSpecifier as error:
            raise ConfigError(
                f"{self.where}: {key}={value!r}: expected a version range such as >=0.24,<0.29"
            ) from error

    def done(self) -> None:
        for key, value in self._data.items():
            known = ", ".join(self._used)
            raise ConfigError(f"{self.where}: {key}={value!r}: unknown key; expected only: {known}")
