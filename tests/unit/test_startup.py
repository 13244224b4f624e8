"""What the hook does in every interpreter of an environment: nothing, unless it is asked to."""

from __future__ import annotations

import importlib.util
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fresh import imported, output, purelib, python, venv
from tests.lanes import ROOT

OFF = [None, "", "0", "off"]
ON = ["1", "on", "auto", "OFF", " 0", "maybe"]  # to be looked at: a bad value must not be ignored
WATCHES = "[type(f).__name__ for f in __import__('sys').meta_path].count('_ImportWatch')"
OURS = ("kvcached_patch", "wrapt", "packaging", "tomli")

without_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is not None, reason="vLLM is installed in this environment"
)


def toggle(value: str | None) -> dict[str, str]:
    return {} if value is None else {"KVCACHED_PATCH": value}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in OURS}


@pytest.mark.parametrize("value", OFF)
def test_off_imports_nothing(value: str | None) -> None:
    modules = imported("-c", "pass", **toggle(value))
    assert "site" in modules
    assert ours(modules) == set()


@pytest.mark.parametrize("value", ON)
def test_on_imports_the_start_up_module_alone(value: str) -> None:
    modules = imported("-c", "pass", **toggle(value))
    assert ours(modules) == {"kvcached_patch", "kvcached_patch._startup"}


@pytest.mark.parametrize("value", [*OFF, *ON])
def test_the_hook_is_silent(value: str | None) -> None:
    assert output("-c", "print('hello')", **toggle(value)) == "hello"


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_children_have_the_hook(method: str) -> None:
    code = f"""
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        print(pool.apply(eval, ({WATCHES!r},)))
"""
    assert output("-c", code, KVCACHED_PATCH="1") == "1"


@pytest.mark.parametrize(("value", "before"), [(None, "0"), ("1", "1")])
def test_install_is_idempotent(value: str | None, before: str) -> None:
    code = f"""
print({WATCHES})
from kvcached_patch._startup import install
install(); install()
print({WATCHES})
"""
    assert output("-c", code, **toggle(value)).split() == [before, "1"]


@without_vllm
@pytest.mark.parametrize("value", ["1", "auto", "maybe"])
def test_looking_for_vllm_decides_nothing(value: str) -> None:
    code = f"""
import importlib.util, sys
print(importlib.util.find_spec("vllm"), {WATCHES})
print(*sorted(name for name in sys.modules if name.startswith("kvcached_patch")))
"""
    found = output("-c", code, KVCACHED_PATCH=value).splitlines()
    assert found == ["None 1", "kvcached_patch kvcached_patch._startup"]


@without_vllm
@pytest.mark.parametrize("value", [None, "0", "1", "auto", "maybe"])
@pytest.mark.parametrize("module", ["vllm", "vllm.version"])
def test_an_absent_vllm_is_absent_in_the_usual_way(value: str | None, module: str) -> None:
    done = python("-c", f"import {module}", **toggle(value))
    assert "ModuleNotFoundError: No module named 'vllm'" in done.stderr
    usual = python("-c", f"import {module}".replace("vllm", "nope"))
    assert (done.returncode, done.stderr) == (1, usual.stderr.replace("nope", "vllm"))


PLUGIN = """
from kvcached_patch._startup import install_plugin
for _ in range(2):
    try:
        print(install_plugin())
    except Exception as error:
        print(type(error).__name__, error)
"""


@without_vllm
@pytest.mark.parametrize("value", [*OFF, "1", "auto"])
def test_the_plugin_door_without_vllm_does_nothing(value: str | None) -> None:
    assert output("-c", PLUGIN, **toggle(value)) == "None\nNone"


@pytest.mark.parametrize(
    ("name", "value"), [("", "maybe"), ("_POOL", "lake"), ("_POLL", "host"), ("_POOL", "gpu")]
)
def test_a_bad_setting_is_refused_again_and_again(name: str, value: str) -> None:
    found = output("-c", PLUGIN, **({"KVCACHED_PATCH": "1"} | {f"KVCACHED_PATCH{name}": value}))
    first, second = found.splitlines()
    assert first == second
    assert first.startswith(f"ConfigError KVCACHED_PATCH{name}={value!r}: ")


def remove(package: Path) -> None:
    """Nothing of the package is left."""


def empty(package: Path) -> None:
    package.mkdir()


def gut(package: Path) -> None:
    (package / "seams" / "__pycache__").mkdir(parents=True)


@pytest.mark.parametrize("breakage", [remove, empty, gut])
def test_a_hook_without_its_package_is_silent(
    tmp_path: Path, breakage: Callable[[Path], None]
) -> None:
    interpreter = venv(tmp_path / "venv")
    shutil.copy(ROOT / "autopatch.pth", purelib(interpreter) / "kvcached_patch.pth")
    breakage(purelib(interpreter) / "kvcached_patch")
    for value in ("1", "auto", *OFF):
        assert output("-c", "pass", executable=interpreter, **toggle(value)) == ""
