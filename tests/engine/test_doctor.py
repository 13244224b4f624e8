"""``kvcached-patch doctor`` where vLLM is installed; what is broken is in test_doctor_setups.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from packaging.version import Version

from kvcached_patch.seams.manifest import load_manifest
from tests.fresh import python

SEAMS = len(load_manifest("vllm").seams_in(Version("0.32.0")))
DOCTOR = ("-m", "kvcached_patch", "doctor")


def doctor(*options: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = python(*DOCTOR, "--json", *options, **variables)
    return done.returncode, json.loads(done.stdout)


def text_of(report: dict[str, Any], name: str) -> str:
    return next(f["text"] for f in report["findings"] if f["name"] == name)


def test_active_and_right() -> None:
    code, report = doctor(KVCACHED_PATCH="1")
    assert (code, report["active"]) == (0, True)
    assert text_of(report, "import of vLLM") == f"all {SEAMS} seams in place"
    assert text_of(report, "runner").startswith("V1")
    assert text_of(report, "pool") == "host memory for device cpu"
    assert text_of(report, "door: .pth").endswith("kvcached_patch.pth")
    assert "vllm.general_plugins" in text_of(report, "door: plugin")
    assert [seam["ok"] for seam in report["seams"]] == [True] * SEAMS
    assert all(seam["expected"] and seam["found"] for seam in report["seams"])


def test_text_says_the_same() -> None:
    done = python(*DOCTOR, "--static", KVCACHED_PATCH="1")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "active: yes"
    seam = "ok       seam allocate: vllm.v1.worker.utils:allocate_kv_cache (worker)"
    assert seam in done.stdout.splitlines()
    assert "expected  " not in done.stdout


def test_text_says_what_to_do() -> None:
    assert "to do: set KVCACHED_PATCH=1\n" in python(*DOCTOR, "--static").stdout


@pytest.mark.parametrize(
    ("variables", "name", "message"),
    [
        ({}, "toggle", "KVCACHED_PATCH is not set"),
        ({"KVCACHED_PATCH": "off"}, "toggle", "'off' (from the environment): vLLM runs unpatched"),
    ],
)
def test_inactive(variables: dict[str, str], name: str, message: str) -> None:
    code, report = doctor("--static", **variables)
    assert (code, report["active"]) == (1, False)
    assert message in text_of(report, name)


def test_plugin_left_out_by_the_allowlist_is_told() -> None:
    code, report = doctor("--static", KVCACHED_PATCH="1", VLLM_PLUGINS="other")
    assert code == 0, "the .pth is enough"
    assert "VLLM_PLUGINS='other' leaves kvcached_patch out" in text_of(report, "door: plugin")


def test_bad_usage() -> None:
    done = python(*DOCTOR, "--nonsense")
    assert done.returncode == 2
    assert "unrecognized arguments: --nonsense" in done.stderr
