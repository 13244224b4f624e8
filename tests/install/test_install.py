"""Every way to install, on every Python: the plugin works afterwards, and leaves without a trace.

EVERY_PYTHON in the environment makes a Python that is not there a failure, as CI wants it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcached_patch import __version__
from tests import kvcached
from tests.fresh import (
    PACKAGE,
    PTH,
    build,
    checkout,
    find_python,
    imported,
    output,
    pip,
    purelib,
    python,
    run,
    venv,
)
from tests.lanes import ROOT

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
OLDER = "0.0.1"
ON, OFF = {"KVCACHED_PATCH": "1"}, {"KVCACHED_PATCH": "0"}
START = "kvcached_patch._startup"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"), "--wheel", ROOT)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of an older version, with a module that this one does not have."""
    folder = tmp_path_factory.mktemp("older")
    package = checkout(folder / "checkout") / "kvcached_patch"
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace(__version__, OLDER))
    (package / "core" / "gone.py").write_text("")
    (folder / "out").mkdir()
    return build(folder / "out", "--wheel", folder / "checkout")


@pytest.fixture(params=PYTHONS)
def base(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    found = find_python(version)
    if found is None:
        reason = f"no python{version} with venv on PATH or among pyenv's"
        pytest.fail(reason) if "EVERY_PYTHON" in os.environ else pytest.skip(reason)
    return found


def proof(interpreter: Path, place: Path, version: str = __version__, **variables: str) -> None:
    """The plugin works in an environment; `place`: where its package is.

    Asked for, it is there from the start of each interpreter, both doors are open, and the command
    runs. Not asked for, nothing of it is imported. Nothing is ever said.
    """
    assert START in imported("-c", "pass", executable=interpreter, **ON, **variables)
    off = imported("-c", "pass", executable=interpreter, **OFF, **variables)
    assert not [name for name in off if name.startswith(("kvcached_patch", "wrapt"))]
    for toggle in (ON, OFF):
        hello = output("-c", "print('hello')", executable=interpreter, **toggle, **variables)
        assert hello == "hello"
    report = doctor(interpreter, **ON, **variables)
    assert report["kvcached-patch"] == ("ok", f"{version} ({place.resolve()})")
    assert [report[f"door: {door}"][0] for door in (".pth", "plugin")] == ["ok", "ok"]
    problems = {name for name, (state, _) in report.items() if state == "problem"}
    assert problems == {"vLLM"}, report


def doctor(interpreter: Path, **variables: str) -> dict[str, tuple[str, str]]:
    """State and text of each finding; vLLM is in none of these environments."""
    command = ("-m", "kvcached_patch", "doctor", "--json")
    done = python(*command, executable=interpreter, **variables)
    assert (done.returncode, done.stderr) == (1, "")
    findings = json.loads(done.stdout)["findings"]
    return {each["name"]: (each["state"], each["text"]) for each in findings}


def command(interpreter: Path, **variables: str) -> str:
    """The version that the installed command tells."""
    done = run(interpreter.parent / "kvcached-patch", "--version", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def files(root: Path) -> dict[Path, int]:
    """Every file below a folder, and when it was written."""
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if not path.is_dir()}


def from_wheel(interpreter: Path, wheel: Path, folder: Path) -> Path:
    pip(interpreter, "install", wheel)
    return purelib(interpreter) / "kvcached_patch"


def from_archive(interpreter: Path, wheel: Path, folder: Path) -> Path:
    pip(interpreter, "install", build(folder, "--sdist", ROOT))
    return purelib(interpreter) / "kvcached_patch"


def from_checkout(interpreter: Path, wheel: Path, folder: Path) -> Path:
    pip(interpreter, "install", "--editable", ROOT)
    return PACKAGE


WAYS = [from_wheel, from_archive, from_checkout]


@pytest.mark.parametrize("install", WAYS)
def test_each_way_works_and_leaves_no_trace(
    base: str, install: Callable[[Path, Path, Path], Path], wheel: Path, tmp_path: Path
) -> None:
    interpreter = venv(tmp_path / "venv", base=base)
    pip(interpreter, "install", "wrapt", "packaging", "tomli")
    before = files(tmp_path / "venv")
    (tmp_path / "archive").mkdir()
    place = install(interpreter, wheel, tmp_path / "archive")
    proof(interpreter, place)
    assert command(interpreter) == __version__
    pip(interpreter, "uninstall", "--yes", "kvcached-patch")
    assert files(tmp_path / "venv") == before
    for toggle in (ON, OFF):
        assert output("-c", "pass", executable=interpreter, **toggle) == ""


def test_a_target_folder_has_the_plugin_door_only(wheel: Path, tmp_path: Path) -> None:
    interpreter, target = venv(tmp_path / "venv"), tmp_path / "target"
    pip(interpreter, "install", "--target", target, wheel)
    report = doctor(interpreter, **ON, PYTHONPATH=str(target))
    assert report["kvcached-patch"] == ("ok", f"{__version__} ({target / 'kvcached_patch'})")
    assert report["door: plugin"][0] == "ok"
    expected = f"{target / PTH} is not run: Python runs those of site-packages only"
    assert report["door: .pth"] == ("note", expected)


def test_an_upgrade_leaves_nothing_of_the_older_version(
    older: Path, wheel: Path, tmp_path: Path
) -> None:
    interpreter = venv(tmp_path / "venv")
    site = purelib(interpreter)
    pip(interpreter, "install", older)
    proof(interpreter, site / "kvcached_patch", OLDER)
    gone = site / "kvcached_patch" / "core" / "gone.py"
    assert gone.exists()
    pip(interpreter, "install", "--upgrade", wheel)
    assert not gone.exists()
    assert [path.name for path in site.glob("kvcached_patch-*")] == [
        f"kvcached_patch-{__version__}.dist-info"
    ]
    proof(interpreter, site / "kvcached_patch")
    assert command(interpreter) == __version__


def test_a_wheel_takes_the_place_of_an_editable_install(wheel: Path, tmp_path: Path) -> None:
    interpreter = venv(tmp_path / "venv")
    site = purelib(interpreter)
    pip(interpreter, "install", "--editable", ROOT)
    proof(interpreter, PACKAGE)
    pip(interpreter, "install", "--force-reinstall", "--no-deps", wheel)
    proof(interpreter, site / "kvcached_patch")
    assert {path.name for path in site.glob("*.pth")} == {PTH}


@pytest.fixture
def read_only(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    """The interpreter of an environment to which nobody may write; without compiled files."""
    interpreter = venv(tmp_path / "venv")
    pip(interpreter, "install", "--no-compile", wheel)
    folders = [tmp_path / "venv", *(p for p in (tmp_path / "venv").rglob("*") if p.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    yield interpreter
    for folder in folders:
        folder.chmod(0o755)


def test_read_only_site_packages_serve_and_stay_as_they_are(read_only: Path) -> None:
    site = purelib(read_only)
    denied = python(
        "-c", f"open({str(site / 'x')!r}, 'w')", executable=read_only, unprivileged=True
    )
    assert "PermissionError" in denied.stderr
    before = files(site)
    for words in (("-c", "import kvcached_patch.cli"), ("-m", "kvcached_patch", "--version")):
        done = python(*words, executable=read_only, unprivileged=True, **ON)
        assert (done.returncode, done.stderr) == (0, "")
    assert files(site) == before


def test_the_users_own_site_packages_serve_where_the_environments_cannot_be_written(
    wheel: Path, tmp_path: Path
) -> None:
    interpreter = venv(tmp_path / "venv", "--system-site-packages")
    user = {"PYTHONUSERBASE": str(tmp_path / "user")}
    pip(interpreter, "install", "--user", "--ignore-installed", wheel, **user)
    code = "import site; print(site.getusersitepackages())"
    site = Path(output("-c", code, executable=interpreter, **user))
    proof(interpreter, site / "kvcached_patch", **user)
    done = python("-c", "pass", executable=interpreter, **ON)  # without that folder
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("editable", [False, True])
def test_paths_with_spaces(wheel: Path, tmp_path: Path, editable: bool) -> None:
    folder = tmp_path / "a path with spaces"
    interpreter = venv(folder / "my venv")
    place = purelib(interpreter) / "kvcached_patch"
    if editable:
        place = checkout(folder / "my checkout") / "kvcached_patch"
        pip(interpreter, "install", "--editable", place.parent)
    else:
        pip(interpreter, "install", wheel)
    proof(interpreter, place)
    assert command(interpreter) == __version__


def test_nested_environments_have_each_their_own(older: Path, wheel: Path, tmp_path: Path) -> None:
    outer = venv(tmp_path / "outer")
    pip(outer, "install", wheel)
    inner = venv(tmp_path / "outer" / "inner", base=outer)
    modules = imported("-c", "pass", executable=inner, **ON)
    assert not [name for name in modules if name.startswith("kvcached_patch")]
    pip(inner, "install", older)
    proof(outer, purelib(outer) / "kvcached_patch")
    proof(inner, purelib(inner) / "kvcached_patch", OLDER)
    assert [command(each) for each in (outer, inner)] == [__version__, OLDER]


def test_an_environment_that_adds_anothers_packages_runs_the_hook_once(
    older: Path, wheel: Path, tmp_path: Path
) -> None:
    outer = venv(tmp_path / "outer")
    pip(outer, "install", wheel)
    inner = venv(tmp_path / "outer" / "inner", base=outer)
    pip(inner, "install", older)
    chain = f"import site; site.addsitedir({str(purelib(outer))!r})\n"
    (purelib(inner) / "zz-outer.pth").write_text(chain)
    proof(inner, purelib(inner) / "kvcached_patch", OLDER)
    code = "import sys; print([type(f).__name__ for f in sys.meta_path].count('_ImportWatch'))"
    assert output("-c", code, executable=inner, **ON) == "1"


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_kvcached_neither_takes_the_others_files(
    wheel: Path, tmp_path: Path, ours_first: bool
) -> None:
    interpreter, theirs = venv(tmp_path / "venv"), kvcached.wheel(tmp_path)
    for each in (wheel, theirs) if ours_first else (theirs, wheel):
        pip(interpreter, "install", each)
    proof(interpreter, purelib(interpreter) / "kvcached_patch")
    both = {START, kvcached.MODULE}
    assert both <= imported("-c", "pass", executable=interpreter, **ON, **kvcached.ON)
    pip(interpreter, "uninstall", "--yes", "kvcached-patch" if ours_first else "kvcached")
    left = imported("-c", "pass", executable=interpreter, **ON, **kvcached.ON)
    assert both & left == {kvcached.MODULE if ours_first else START}


def lose_the_package(package: Path) -> None:
    shutil.rmtree(package)


def lose_its_first_module(package: Path) -> None:
    (package / "__init__.py").unlink()


def lose_the_start(package: Path) -> None:
    (package / "_startup.py").unlink()


def cut_the_start(package: Path) -> None:
    head, opened, _ = (package / "_startup.py").read_text().partition("(")
    (package / "_startup.py").write_text(head + opened)


def lock_the_start(package: Path) -> None:
    (package / "_startup.py").chmod(0)


def lock_the_package(package: Path) -> None:
    package.chmod(0)


SAID = "kvcached-patch: not active, its installation is damaged: "


@pytest.mark.parametrize(
    ("breakage", "said"),
    [
        (lose_the_package, ""),
        (lose_its_first_module, ""),
        (lose_the_start, SAID + "ModuleNotFoundError"),
        (cut_the_start, SAID + "SyntaxError"),
        (lock_the_start, SAID + "PermissionError"),
        (lock_the_package, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_install_is_no_traceback_at_the_start_of_python(
    base: str, breakage: Callable[[Path], None], said: str, tmp_path: Path
) -> None:
    interpreter = venv(tmp_path / "venv", base=base)
    site = purelib(interpreter)
    shutil.copy(ROOT / "autopatch.pth", site / PTH)
    ignored = shutil.ignore_patterns("__pycache__")
    package = Path(shutil.copytree(PACKAGE, site / "kvcached_patch", ignore=ignored))
    breakage(package)
    for toggle in (ON, {"KVCACHED_PATCH": "auto"}, OFF, {}):
        hello = ("-c", "print('hello')")
        done = python(*hello, executable=interpreter, unprivileged=True, **toggle)
        assert (done.returncode, done.stdout) == (0, "hello\n")
        expected = said if toggle.get("KVCACHED_PATCH") in ("1", "auto") else ""
        lines = set(done.stderr.splitlines())  # in an environment each hook runs twice
        assert len(lines) == bool(expected)
        assert all(line.startswith(expected) for line in lines)
    if package.exists():
        package.chmod(0o755)
