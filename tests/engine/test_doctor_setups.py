"""Ten broken set-ups: doctor alone says what is wrong, with which value, and what to do."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import kvcached
from tests.fresh import PTH, pip, purelib, python, venv
from tests.lanes import ROOT
from tests.overlay import overlay

ON = {"KVCACHED_PATCH": "1"}
BIN = Path(sys.executable).parent
TESTED = "install a tested release (0.23.0, "


@dataclass
class Report:
    """How doctor ended, and what it found: under each name, and of each seam."""

    code: int
    findings: dict[str, dict[str, str]]
    seams: list[dict[str, Any]]

    def says(self, name: str, state: str, text: str, remedy: str) -> None:
        """One finding has this state, this in its text, and this in its remedy."""
        found = self.findings[name]
        assert (found["state"], text in found["text"]) == (state, True), found
        assert remedy in found["remedy"], found

    @property
    def problems(self) -> set[str]:
        return {name for name, each in self.findings.items() if each["state"] == "problem"}


def doctor(
    *options: str,
    executable: str | Path = sys.executable,
    unprivileged: bool = False,
    **variables: str,
) -> Report:
    done = python(
        *("-m", "kvcached_patch", "doctor", "--json", *options),
        executable=executable,
        unprivileged=unprivileged,
        **variables,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["active"] is (done.returncode == 0)
    findings = {each["name"]: each for each in report["findings"]}
    return Report(done.returncode, findings, report["seams"])


@pytest.fixture(scope="module")
def without_vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with this package, but no vLLM."""
    interpreter = venv(tmp_path_factory.mktemp("without-vllm") / "venv")
    pip(interpreter, "install", ROOT)
    return interpreter


@pytest.fixture
def twin(tmp_path: Path) -> Path:
    """The interpreter of an environment with all that this one has, to be changed."""
    interpreter = venv(tmp_path / "twin")
    site = purelib(interpreter)
    for entry in purelib(Path(sys.executable)).iterdir():
        if not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return interpreter


def test_all_is_well_in_the_twin(twin: Path) -> None:
    report = doctor("--static", executable=twin, **ON)
    assert (report.code, report.problems) == (0, set())
    report.says("door: .pth", "ok", str(purelib(twin) / PTH), "")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("KVCACHED_PATCH", "yes", "bad value; expected one of: 0, off, 1, on, auto"),
        ("KVCACHED_PATCH_POOL", "lake", "bad value; expected one of: auto, host, cuda, static"),
        ("KVCACHED_PATCH_LIMIT", "2 parsecs", "bad value; expected one of: a size such as 512MiB"),
        ("KVCACHED_PATCH_POLL", "host", "unknown variable; expected one of: KVCACHED_PATCH, "),
    ],
)
def test_wrong_variable_value(name: str, value: str, expected: str) -> None:
    report = doctor(**ON | {name: value})
    assert (report.code, report.problems) == (1, {"toggle"})
    report.says("toggle", "problem", f"{name}={value!r}: {expected}", "correct this variable")


def test_wrong_environment(without_vllm: Path, tmp_path: Path) -> None:
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    report = doctor(executable=without_vllm, PATH=path, **ON)
    assert (report.code, report.problems) == (1, {"vLLM", "vllm on PATH"})
    prefix = without_vllm.parent.parent
    text = f"{BIN / 'vllm'} is of another environment than this Python's ({prefix})"
    report.says("vllm on PATH", "problem", text, f"ask there: `{BIN / 'kvcached-patch'} doctor`")

    (tmp_path / "vllm").write_text("#!/bin/sh\n")
    (tmp_path / "vllm").chmod(0o755)
    report = doctor("--static", PATH=f"{tmp_path}{os.pathsep}{path}", **ON)
    assert (report.code, report.problems) == (1, {"vllm on PATH"})
    text = f"{tmp_path / 'vllm'} is of another environment than this Python's ({sys.prefix}), "
    text += "where kvcached-patch is not installed: it runs unpatched"
    remedy = f"`{tmp_path / 'python'} -m pip install kvcached-patch`"
    report.says("vllm on PATH", "problem", text, remedy)

    assert doctor("--static", PATH=path, **ON).code == 0


def test_pth_missing(twin: Path) -> None:
    (purelib(twin) / PTH).unlink()
    report = doctor(executable=twin, **ON)
    assert report.code == 0, "vLLM's own plugins open the other door"
    remedy = f"`{twin} -m pip install --force-reinstall kvcached-patch`"
    report.says("door: .pth", "note", f"no {PTH} on sys.path", remedy)
    report.says("import of vLLM", "ok", "seams in place", "")

    report = doctor(executable=twin, VLLM_PLUGINS="other", **ON)
    assert (report.code, report.problems) == (1, {"doors"})
    left_out = "VLLM_PLUGINS='other' leaves kvcached_patch out"
    report.says("door: plugin", "note", left_out, "add kvcached_patch to it")
    report.says("doors", "problem", "none is open: vLLM would run unpatched", "open one of them")


def test_vllm_absent(without_vllm: Path) -> None:
    report = doctor(executable=without_vllm, **ON)
    assert (report.code, report.problems) == (1, {"vLLM"})
    text = f"not installed in this environment ({without_vllm.parent.parent})"
    report.says("vLLM", "problem", text, f"`{without_vllm} -m pip install vllm`")


def test_unsupported_release(tmp_path: Path) -> None:
    tree = overlay(tmp_path, {"_version.py": ("'0.32.0'", "'0.20.2'")})
    report = doctor(PYTHONPATH=str(tree), **ON)
    assert (report.code, report.problems) == (1, {"seams"})
    text = "vllm 0.20.2: no seams are known for this release; expected vllm >=0.22"
    report.says("seams", "problem", text, TESTED)


def test_drifted_seam(tmp_path: Path) -> None:
    change = (
        "def initialize_from_config(self, kv_cache_configs: list",
        "def initialize_from_config(self, configs: list",
    )
    tree = overlay(tmp_path, {"v1/executor/abstract.py": change})
    report = doctor(PYTHONPATH=str(tree), **ON)
    assert (report.code, report.problems) == (1, {"seams"})
    text = (
        "vllm 0.32.0: seam engine-core-proof differs "
        "(vllm.v1.executor.abstract:Executor.initialize_from_config): "
        "expected (self, kv_cache_configs); found (self, configs)"
    )
    report.says("seams", "problem", text, TESTED)
    assert [each["id"] for each in report.seams if not each["ok"]] == ["engine-core-proof"]


def test_other_plugin(twin: Path, tmp_path: Path) -> None:
    """kvcached beside, with doors of its own: told while it sleeps, refused once it is on."""
    pip(twin, "install", kvcached.wheel(tmp_path))
    remedy = "switch kvcached off or uninstall it, or unset KVCACHED_PATCH"
    for variables, wrapped in (({}, False), (kvcached.ON, True)):
        report = doctor(executable=twin, **ON, **variables)
        named = f"kvcached {kvcached.VERSION} names seam allocate"
        report.says("other plugin", "note", named, remedy)
        assert (report.code, report.problems) == (
            (1, {"import of vLLM"}) if wrapped else (0, set())
        )
    text = "seam allocate (vllm.v1.worker.utils:allocate_kv_cache): wrapped by kvcached.autopatch"
    report.says("import of vLLM", "problem", text, "unset KVCACHED_PATCH to run vLLM unpatched")
    code = "import vllm.v1.worker.gpu_worker"
    done = python("-c", code, executable=twin, **ON, **kvcached.ON)
    assert text in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("mode", [0o755, 0o500])
def test_no_permission_on_the_ledger(mode: int, tmp_path: Path) -> None:
    directory = tmp_path / "kvcached-patch"
    directory.mkdir(mode=0o700)
    directory.chmod(mode)
    place = ON | {"XDG_RUNTIME_DIR": str(tmp_path)}
    fault = {
        0o755: f"found a directory of user {os.geteuid()}, mode 0755; expected a directory of",
        0o500: f"user {os.geteuid()} must not write to {directory}",
    }[mode]
    report = doctor("--static", unprivileged=True, **place)
    assert report.code == 0, "an engine runs, unbounded"
    remedy = f"make {directory} yours alone (mode 0700), or remove it"
    report.says("ledger", "note", f"ledger {directory}: {fault}", remedy)
    assert "nothing bounds it" in report.findings["ledger"]["text"]

    report = doctor("--static", unprivileged=True, KVCACHED_PATCH_LIMIT="1GiB", **place)
    assert (report.code, report.problems) == (1, {"ledger"})
    text = "vLLM does not start, since KVCACHED_PATCH_LIMIT='1GiB' cannot be kept"
    report.says("ledger", "problem", text, remedy)
    directory.chmod(0o700)
    assert doctor("--static", unprivileged=True, **place).findings["ledger"]["state"] == "ok"


NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
CONFIGURATIONS: list[tuple[list[str], dict[str, str], str, str, str]] = [
    (
        ["some/model", "--port", "80"],
        {},
        "ok",
        "nothing in these arguments keeps the KV cache in place",
        "",
    ),
    (
        ["some/model", "--enable-sleep-mode"],
        {},
        "note",
        "sleep mode: vLLM unmaps and maps the cache itself; memory once touched stays committed",
        "unset --enable-sleep-mode",
    ),
    (
        ["--kv-transfer-config", NIXL],
        {"KVCACHED_PATCH_LIMIT": "1GiB", "KVCACHED_PATCH_POOL": "host"},
        "problem",
        "KV connector NixlConnector: it registers the whole cache, by address, when it starts; "
        "vLLM does not start, since KVCACHED_PATCH_LIMIT='1GiB' and KVCACHED_PATCH_POOL='host' "
        "cannot be kept",
        "unset --kv-transfer-config, or these variables",
    ),
    (
        ["--enable-sleep-modes"],
        {},
        "problem",
        "vllm serve: unrecognized arguments: --enable-sleep-modes",
        "vllm serve --help",
    ),
]


@pytest.mark.parametrize(("arguments", "variables", "state", "text", "remedy"), CONFIGURATIONS)
def test_unsupported_feature_among_the_arguments(
    arguments: list[str], variables: dict[str, str], state: str, text: str, remedy: str
) -> None:
    report = doctor("--", *arguments, **ON, **variables)
    assert report.code == (state == "problem")
    report.says("configuration", state, text, remedy)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "a quiet engine keeps its last pages"),
        ("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "Ray's older executor passes no plans on"),
    ],
)
def test_unsupported_feature_among_the_variables(name: str, text: str) -> None:
    report = doctor("--static", **ON, **{name: "0"})
    assert report.code == 0
    report.says("variable", "note", f"{name}='0': {text}", f"unset {name}")


def test_arguments_are_not_judged_without_vllms_parser() -> None:
    report = doctor("--static", "--", "--enable-sleep-mode", **ON)
    report.says("configuration", "note", "not judged", "")


def test_gpu_pool_without_a_gpu() -> None:
    report = doctor(KVCACHED_PATCH_POOL="cuda", **ON)
    assert (report.code, report.problems) == (1, {"pool"})
    text = "KVCACHED_PATCH_POOL='cuda': vLLM here runs on device 'cpu', this memory on 'cuda'; "
    report.says("pool", "problem", text, "set KVCACHED_PATCH_POOL=auto")


def test_a_bound_on_memory_that_cannot_be_given_back() -> None:
    report = doctor(KVCACHED_PATCH_POOL="static", KVCACHED_PATCH_BUDGET="1GiB", **ON)
    assert (report.code, report.problems) == (1, {"pool"})
    text = "cannot be given back in parts: KVCACHED_PATCH_BUDGET='1GiB' is refused"
    report.says("pool", "problem", text, "unset the bound")
