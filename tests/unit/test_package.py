"""What is built, and what installing and uninstalling it leaves in an environment."""

from __future__ import annotations

import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kvcached_patch import __version__
from tests.fresh import PACKAGE, PTH, build, imported, output, pip, purelib, python, run, venv
from tests.lanes import ROOT

SEAMS = ROOT / "manifests" / "seams"
DOOR = "kvcached_patch = kvcached_patch._startup:install_plugin"
DIST_INFO = f"kvcached_patch-{__version__}.dist-info"


def installed(interpreter: Path) -> set[str]:
    """What of ours lies in an environment, but for the caches of what ran there."""
    return {path.name for path in purelib(interpreter).iterdir() if "kvcached" in path.name}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel", ROOT)


@pytest.fixture(scope="module")
def from_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the wheel."""
    interpreter = venv(tmp_path_factory.mktemp("from-wheel"))
    pip(interpreter, "install", wheel)
    return interpreter


@pytest.fixture(scope="module")
def from_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with an editable install."""
    interpreter = venv(tmp_path_factory.mktemp("from-checkout"))
    pip(interpreter, "install", "--editable", ROOT)
    return interpreter


@pytest.fixture(params=["from_wheel", "from_checkout"])
def interpreter(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_the_wheel_is_pure_python_with_the_hook_at_its_root(wheel: Path) -> None:
    assert wheel.name == f"kvcached_patch-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        hook = archive.read(PTH).decode()
        manifest = archive.read("kvcached_patch/manifests/seams/vllm.toml")
        entries = archive.read(f"{DIST_INFO}/entry_points.txt").decode()
    assert {name.partition("/")[0] for name in names} == {PTH, "kvcached_patch", DIST_INFO}
    modules = {path.relative_to(ROOT).as_posix() for path in PACKAGE.rglob("*.py")}
    seams = {f"kvcached_patch/manifests/seams/{path.name}" for path in SEAMS.iterdir()}
    ours = {name for name in names if name.startswith("kvcached_patch/")}
    assert ours == {*modules, *seams, "kvcached_patch/py.typed"}
    assert manifest == (SEAMS / "vllm.toml").read_bytes()
    # site.py runs each line that starts with "import " by itself.
    assert len(hook.splitlines()) == 1
    assert hook.startswith("import ")
    assert "kvcached-patch = kvcached_patch.cli:main" in entries
    assert f"[vllm.general_plugins]\n{DOOR}" in entries


def test_the_source_archive_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    again = build(tmp_path, ROOT)  # the archive, then the wheel from it
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "autopatch.pth", "LICENSE"} <= names
    assert not [name for name in names if name.startswith((".venvs", ".ci"))]
    assert contents(again) == contents(wheel)


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


USER = """
from kvcached_patch import api

found: list[api.Engine] = api.engines()
sizes: int = found[0].committed_bytes
wrong: str = found[0].committed_bytes
"""


def test_programs_are_checked_against_its_types(from_wheel: Path, tmp_path: Path) -> None:
    program = tmp_path / "user.py"
    program.write_text(USER, encoding="utf-8")
    command = (sys.executable, "-m", "mypy", "--strict", "--python-executable", from_wheel)
    done = run(*command, program, cwd=tmp_path)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert errors[0].startswith("user.py:6: error: Incompatible types in assignment")


def test_the_command_tells_its_version(interpreter: Path) -> None:
    done = run(interpreter.parent / "kvcached-patch", "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")
    assert output("-m", "kvcached_patch", "--version", executable=interpreter) == __version__


def test_the_hook_is_in_place(interpreter: Path) -> None:
    assert (purelib(interpreter) / PTH).read_text() == (ROOT / "autopatch.pth").read_text()
    for value, expected in (("1", True), ("0", False)):
        modules = imported("-c", "pass", executable=interpreter, KVCACHED_PATCH=value)
        assert ("kvcached_patch._startup" in modules) is expected


MANIFEST = """
from kvcached_patch.seams.manifest import load_manifest, manifest_dir
import os
print(len(load_manifest("vllm").seams), os.path.realpath(manifest_dir()))
"""


def test_the_manifests_load(from_wheel: Path, from_checkout: Path) -> None:
    packed = purelib(from_wheel) / "kvcached_patch" / "manifests" / "seams"
    text = (SEAMS / "vllm.toml").read_text(encoding="utf-8")
    seams = sum(line == "[[seam]]" for line in text.splitlines())
    for interpreter, place in ((from_wheel, packed), (from_checkout, SEAMS)):
        found = output("-c", MANIFEST, executable=interpreter)
        assert found == f"{seams} {place.resolve()}"


def test_an_editable_install_runs_the_checkout(from_checkout: Path) -> None:
    where = output("-c", "import kvcached_patch as k; print(k.__file__)", executable=from_checkout)
    assert Path(where).resolve() == PACKAGE / "__init__.py"
    assert not (purelib(from_checkout) / "kvcached_patch").exists()


@pytest.mark.parametrize("value", [None, "1", "auto"])
def test_doctor_says_that_vllm_is_not_installed(interpreter: Path, value: str | None) -> None:
    toggle = {} if value is None else {"KVCACHED_PATCH": value}
    command = (interpreter.parent / "kvcached-patch", "doctor")
    done = run(*command, **toggle)
    assert (done.returncode, done.stderr) == (1, "")
    assert re.search(r"^PROBLEM +vLLM +not installed", done.stdout, re.MULTILINE)
    assert done.stdout.endswith("active: no\n")
    done = run(*command, "--json", **toggle)
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads(done.stdout)
    found = {finding["name"]: finding for finding in report["findings"]}
    assert (report["active"], report["version"], report["seams"]) == (False, __version__, [])
    assert found["vLLM"]["state"] == "problem"
    assert found["toggle"]["state"] == ("problem" if value is None else "ok")
    assert [found[f"door: {door}"]["state"] for door in (".pth", "plugin")] == ["ok", "ok"]


@pytest.mark.parametrize("arguments", [(), ("docter",), ("doctor", "--jsn"), ("doctor", "x")])
def test_bad_usage_ends_with_2(from_wheel: Path, arguments: tuple[str, ...]) -> None:
    done = run(from_wheel.parent / "kvcached-patch", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: kvcached-patch")


ENTRIES = """
import importlib.metadata, sys
(door,) = importlib.metadata.entry_points(group="vllm.general_plugins")
print("kvcached_patch" in sys.modules, door.name, "=", door.value, door.load().__name__)
from kvcached_patch.seams.manifest import load_manifest
print(len(load_manifest("vllm").seams) > 0)
"""


def test_a_target_directory_opens_the_second_door(wheel: Path, tmp_path: Path) -> None:
    interpreter, target = venv(tmp_path / "venv"), tmp_path / "target"
    pip(interpreter, "install", "--target", target, wheel)
    for value in ("0", "1"):  # a .pth file outside of site-packages is not run
        path = {"PYTHONPATH": str(target), "KVCACHED_PATCH": value}
        found = output("-c", ENTRIES, executable=interpreter, **path)
        assert found.splitlines() == [f"False {DOOR} install_plugin", "True"]


# These two end the shared environments: they stay last.


def test_uninstall_leaves_nothing_of_the_wheel(from_wheel: Path) -> None:
    assert installed(from_wheel) == {PTH, "kvcached_patch", DIST_INFO}
    uninstall(from_wheel)


def test_uninstall_leaves_nothing_of_the_editable_install(from_checkout: Path) -> None:
    assert installed(from_checkout) >= {PTH, DIST_INFO}
    uninstall(from_checkout)
    assert (PACKAGE / "__init__.py").exists()


def uninstall(interpreter: Path) -> None:
    pip(interpreter, "uninstall", "--yes", "kvcached-patch")
    assert installed(interpreter) == set()
    assert not (interpreter.parent / "kvcached-patch").exists()
    done = python("-c", "import kvcached_patch", executable=interpreter, KVCACHED_PATCH="1")
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'kvcached_patch'"
    assert output("-c", "pass", executable=interpreter, KVCACHED_PATCH="1") == ""
