"""The command speaks to people without colour in 80 columns, to programs by status and JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvcached_patch.cli import main
from kvcached_patch.ledger import Ledger, ledger_path
from tests.fresh import environment
from tests.lanes import ROOT
from tests.unit.test_wheel import wheel

COMMANDS = ("doctor", "seams", "top", "limit", "trim")
MIB = 1024**2


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """That of the host, in a directory which the command takes for this user's."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return Ledger(ledger_path(tmp_path / "kvcached-patch", "host"))


def status(*arguments: str) -> int:
    """What the command ends with, on whichever way."""
    try:
        return main(arguments)
    except SystemExit as end:
        return int(end.code or 0)


def on_a_terminal(*arguments: str, columns: int = 80, **variables: str) -> str:
    """What the command, which must end well, writes to a terminal."""
    terminal, end = os.openpty()
    command = (sys.executable, "-m", "kvcached_patch", *arguments)
    variables = {"COLUMNS": str(columns), "TERM": "xterm-256color", **variables}
    try:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment(**variables), stdin=end, stdout=end, stderr=end
        ) as process:
            os.close(end)
            written = b"".join(iter(lambda: _read(terminal), b""))
            assert process.wait() == 0, written
    finally:
        os.close(terminal)
    return written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # EIO: nobody has the other end any more
        return b""


# People


@pytest.mark.parametrize("arguments", [(), *((command,) for command in COMMANDS)])
def test_help_says_the_exit_status_in_80_columns(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert status(*arguments, "--help") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    (*_, title, well, ill, wrong) = text.splitlines()
    assert title == "exit status:"
    assert (well[:5], ill[:5], wrong) == ("  0  ", "  1  ", "  2  the command line is wrong")


def test_a_report_is_folded_to_80_columns_of_a_terminal_without_colour(ledger: Ledger) -> None:
    account = ledger.join("a-long-name-" * 5, model="org/" + "m" * 32, reserved=2**40)
    runtime = {"XDG_RUNTIME_DIR": str(ledger.path.parents[1])}
    for variables in ({}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}):
        text = on_a_terminal("top", "--once", **runtime, **variables)
        assert max(map(len, text.splitlines())) <= 80
        assert "\x1b" not in text
        assert f"name {account.name}," in text
        assert "reserved 1TiB" in text
    assert "RESERVED" in on_a_terminal("top", "--once", columns=200, **runtime)


def test_what_is_no_terminal_gets_whole_lines(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    ledger.join("a-long-name-" * 5, model="org/" + "m" * 32)
    assert main(["top"]) == 0
    heading, row, total = capsys.readouterr().out.splitlines()
    assert len(heading) > 80
    assert len(row.split()) == 10
    assert total == "host: 0B committed, no budget"


def test_doctor_is_folded_at_spaces_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("KVCACHED_PATCH_POOOL", "x" * 90)
    monkeypatch.setenv("KVCACHED_PATCH", "1")
    main(["doctor", "--static"])
    lines = capsys.readouterr().out.splitlines()
    assert any("x" * 90 in line for line in lines)
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)
    assert len([line for line in lines if line.startswith(" " * 25)]) >= 2


# Programs


def test_exit_status_0_when_all_is_well(ledger: Ledger) -> None:
    account = ledger.join("a")
    assert status("top") == 0
    assert status("limit", "a", "2MiB") == 0
    assert status("limit", "--total", "8MiB") == 0
    assert (ledger.engines()[0].limit, ledger.total) == (2 * MIB, 8 * MIB)
    assert status("limit", "a", "None", "--device", "host") == 0
    assert status("limit", "--total", "none") == 0
    assert (ledger.engines()[0].limit, ledger.total) == (None, None)
    account.close()


def test_exit_status_1_when_it_is_not(ledger: Ledger, tmp_path: Path) -> None:
    ledger.join("a")
    assert status("limit", "b", "2MiB") == 1
    assert status("trim", "b") == 1
    assert status("trim", "a", "--wait", "0") == 1
    assert status("seams", "--wheel", str(tmp_path / "none.whl")) == 1
    assert status("doctor", "--static") == 1, "no vLLM is installed here"
    ledger_path(ledger.path.parent, "bad").symlink_to("elsewhere")
    assert status("top") == 1


@pytest.mark.parametrize(
    "line",
    ["", "topp", "top x", "limit", "limit a", "limit a 1G --total", "limit --total", "trim",
     "limit a 2GB", "limit a 0", "limit a two", "limit a -1", "trim a --wait soon",
     "trim a --wait nan", "trim a --wait -1", "limit --total 1G --device GPU-0",
     "doctor MODEL", "doctor --static MODEL -- --seed=1"],
)  # fmt: skip
def test_exit_status_2_when_the_command_line_is_wrong(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    ledger.join("a")
    assert status(*line.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err[:21]) == ("", "usage: kvcached-patch")
    assert ledger.engines()[0].limit is None


def test_what_is_for_vllm_serve_follows_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("doctor", "MODEL") == 2
    assert "put the arguments of vllm serve after --: doctor -- MODEL" in capsys.readouterr().err


def test_a_gpu_is_known_by_its_uuid(ledger: Ledger) -> None:
    of_gpu = "7e5d5b4c-0d43-4ce2-9d8f-1b1c2f3a4b5c"
    for prefix in ("GPU", "MIG"):  # as nvidia-smi -L prints them
        assert status("limit", "--total", "8MiB", "--device", f"{prefix}-{of_gpu.upper()}") == 0
    assert [path.name for path in ledger.path.parent.iterdir()] == [f"GPU-{of_gpu}.ledger"]


@pytest.mark.parametrize("arguments", ["top --json", "--version", "limit --help"])
def test_nobody_reads_on(ledger: Ledger, arguments: str) -> None:
    command = f"{sys.executable} -m kvcached_patch {arguments}; echo $? >&2"
    runtime = {"XDG_RUNTIME_DIR": str(ledger.path.parents[1])}
    pipe = ("bash", "-c", f"({command}) | (exec <&-; sleep 0.1)")
    done = subprocess.run(
        pipe, cwd=ROOT, env=environment(**runtime), stderr=subprocess.PIPE, text=True, check=True
    )
    assert done.stderr == "141\n"


def test_an_interrupt_is_no_traceback(
    ledger: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    ledger.join("a")
    monkeypatch.setattr("kvcached_patch.api.time.sleep", interrupted)
    assert status("trim", "a") == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("2GB", "'2GB': not a size; expected bytes, or a number with K, M, G"),
        ("0", "'0': expected at least 1 byte, or none to remove the limit"),
    ],
)
def test_a_bad_size_is_answered_with_a_good_one(
    capsys: pytest.CaptureFixture[str], size: str, message: str
) -> None:
    assert status("limit", "a", size) == 2
    assert f"kvcached-patch limit: error: argument size: {message}" in capsys.readouterr().err


# The keys of each report and the types of their values; a list has items of one schema.
SEAM = {
    "id": str, "target": str, "process": str, "runner": str, "ok": bool, "expected": str,
    "found": str,
}  # fmt: skip
DOCTOR = {
    "api_version": int,
    "version": str,
    "active": bool,
    "findings": [{"name": str, "state": str, "text": str, "remedy": str}],
    "seams": [SEAM],
}
SEAMS = {
    "api_version": int,
    "releases": [
        {
            "package": str,
            "version": str,
            "ok": bool,
            "tested": bool,
            "aside": str,
            "problem": str,
            "seams": [SEAM],
            "unlisted_importers": [[str]],
        }
    ],
}
ENGINE = {
    "device": str, "name": str, "pid": int, "model": str, "alive": bool, "age_s": float,
    "reserved_bytes": int, "committed_bytes": int, "cached_bytes": int, "wanted_bytes": int,
    "free_bytes": int, "limit_bytes": (int, None), "queries": int, "hits": int,
    "hit_rate": (float, None), "pages_committed": int, "pages_released": int, "misses": int,
    "trimming": bool,
}  # fmt: skip
TOP = {
    "api_version": int,
    "devices": [
        {
            "device": str,
            "budget_bytes": (int, None),
            "committed_bytes": int,
            "problem": (str, None),
            "engines": [ENGINE],
        }
    ],
}


def deviations(found: Any, schema: Any, where: str = "") -> list[str]:
    """Where data and schema differ, each way; what a list is empty of is not looked at."""
    if isinstance(schema, dict):
        if not isinstance(found, dict) or found.keys() != schema.keys():
            return [f"{where}: {found}"]
        each = [deviations(found[key], schema[key], f"{where}.{key}") for key in schema]
        return [line for lines in each for line in lines]
    if isinstance(schema, list):
        each = [deviations(item, schema[0], f"{where}[]") for item in found]
        return [line for lines in each for line in lines]
    kinds = schema if isinstance(schema, tuple) else (schema,)
    return [] if (found if found is None else type(found)) in kinds else [f"{where}: {found!r}"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_the_json_of_top(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    account = ledger.join("a", limit=MIB)
    ledger_path(ledger.path.parent, "bad").symlink_to("elsewhere")
    first = printed(capsys, "top")
    assert [device["problem"] is None for device in first["devices"]] == [False, True]
    account.publish(queries=2, hits=1)
    ledger.set_limit("a", None)
    ledger.set_total(MIB)
    second = printed(capsys, "top")
    assert second["devices"][1]["engines"][0]["hit_rate"] == 0.5
    assert deviations(first, TOP) == deviations(second, TOP) == []


def test_the_json_of_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(capsys, "doctor", "--static")
    assert {finding["state"] for finding in found["findings"]} <= {"ok", "note", "problem"}
    assert deviations(found, DOCTOR) == []


def test_the_json_of_seams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    importer = "from tpu_inference.models.common.model_loader import get_flax_model\n"
    found = printed(capsys, "seams", "--wheel", str(wheel(tmp_path, runner__work=importer)))
    (report,) = found["releases"]
    assert report["seams"]
    assert report["unlisted_importers"]
    assert deviations(found, SEAMS) == []


def test_a_deviation_is_found() -> None:
    good = {"a": 1, "b": [{"c": None}]}
    schema = {"a": int, "b": [{"c": (str, None)}]}
    assert deviations(good, schema) == []
    for bad in ({"a": 1}, {"a": 1, "b": [{"c": 1}]}, {**good, "a": True}, {**good, "d": 1}):
        assert deviations(bad, schema)
