"""The ledger's commands show every engine, change bounds, and say what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from kvcached_patch.cli_ledger import HEADINGS, Device, limit, plain, read, redraw, rows, top
from kvcached_patch.core.totals import Totals
from kvcached_patch.ledger import EngineRecord, Ledger, ledger_path
from tests.fresh import environment
from tests.lanes import ROOT
from tests.ledgers import Engine

KIB, MIB, GIB = 1024, 1024**2, 1024**3
A = EngineRecord(
    name="a", pid=12, model="/models/org/gemma-3n/", reserved=8 * GIB, committed=3 * GIB // 2,
    cached=512 * MIB, wanted=0, limit=2 * GIB, free=0, queries=3, hits=2, age_s=0.5, alive=True,
)  # fmt: skip
DEAD = EngineRecord("b[red]", 1234, "", 0, 0, 0, 0, GIB, 0, 9, 9, 3.0, False)
ROW = ["host", "a", "12", "gemma-3n", "8GiB", "1.5GiB", "512MiB", "2GiB", "0B", "66.7%"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def host(run: Path, device: str = "host") -> Ledger:
    return Ledger(ledger_path(run, device))


def outcome(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


# top


def test_a_row_has_what_an_engine_is_known_by() -> None:
    assert rows([Device("host", None, (A,))]) == [ROW]
    assert len(HEADINGS) == len(ROW)


def test_a_dead_engine_is_shown_as_dead_without_bytes() -> None:
    assert rows([Device("host", None, (DEAD,))]) == [
        ["host", "b[red] (dead)", "1234", "-", "-", "-", "-", "-", "-", "-"]
    ]


def test_a_long_model_name_is_shortened() -> None:
    long = EngineRecord("a", 1, "org/" + "m" * 40, 0, 0, 0, 0, None, 0, 0, 0, 0.0, True)
    assert rows([Device("host", None, (long,))])[0][3:] == [
        "m" * 31 + "…", "0B", "0B", "0B", "-", "0B", "-",
    ]  # fmt: skip


def test_the_table_is_aligned_and_ends_with_a_line_per_device() -> None:
    found = [
        Device("host", 8 * GIB, (A, DEAD)),
        Device("cuda_0", 4 * GIB),
        Device("cuda_1"),
        Device("x", problem="ledger /x: broken"),
    ]
    assert plain(found).splitlines() == [
        "DEVICE  NAME            PID  MODEL     RESERVED  COMMITTED  CACHED  LIMIT  FREE  HIT RATE",
        "host    a                12  gemma-3n      8GiB     1.5GiB  512MiB   2GiB    0B     66.7%",
        "host    b[red] (dead)  1234  -                -          -       -      -     -         -",
        "host: 1.5GiB committed, budget 8GiB",
        "cuda_0: 0B committed, budget 4GiB",
        "x: ledger /x: broken",
    ]


def test_nobody_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top(run, once=True, as_json=False) == 0
    assert outcome(capsys) == ("no engine is running\n", "")
    assert top(run, once=True, as_json=True) == 0
    assert json.loads(outcome(capsys)[0]) == {"devices": []}
    assert not run.exists()


def test_once_shows_every_device(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).join("a", limit=GIB).reserve(MIB)
    host(run, "cuda:0").join("b")
    assert top(run, once=True, as_json=False) == 0
    lines = [line.split() for line in outcome(capsys)[0].splitlines()]
    me = str(os.getpid())
    assert lines[1:3] == [
        ["cuda_0", "b", me, "-", "0B", "0B", "0B", "-", "0B", "-"],
        ["host", "a", me, "-", "0B", "1MiB", "0B", "1GiB", "0B", "-"],
    ]
    assert lines[4] == ["host:", "1MiB", "committed,", "no", "budget"]


def test_an_output_that_is_no_terminal_gets_one_state(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert top(run, once=False, as_json=False) == 0
    assert outcome(capsys) == ("no engine is running\n", "")


def test_json_has_every_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).set_total(8 * GIB)
    account = host(run).join("a", model="org/m", reserved=GIB)
    account.reserve(MIB)
    account.want(3)
    account.publish(cached=1, free=2, queries=4, hits=1, totals=Totals(pages_committed=7))
    assert top(run, once=False, as_json=True) == 0
    (device,) = json.loads(outcome(capsys)[0])["devices"]
    (engine,) = device.pop("engines")
    assert engine.pop("age_s") >= 0
    assert device == {
        "device": "host", "total_bytes": 8 * GIB, "committed_bytes": MIB, "problem": None,
    }  # fmt: skip
    assert engine == {
        "name": "a", "pid": os.getpid(), "model": "org/m", "reserved_bytes": GIB,
        "committed_bytes": MIB, "cached_bytes": 1, "wanted_bytes": 3, "limit_bytes": None,
        "free_bytes": 2, "queries": 4, "hits": 1, "hit_rate": 0.25, "alive": True,
        "totals": asdict(Totals(pages_committed=7)), "trimming": False,
    }  # fmt: skip


def test_an_engine_that_just_died_is_shown(run: Path) -> None:
    with Engine(host(run).path, "a", 5) as engine:
        engine.ready().kill()
        (device,) = read(run)
        assert [(each.name, each.alive) for each in device.engines] == [("a", False)]
        assert plain([device]).endswith("no engine is running")


def test_a_ledger_that_cannot_be_read_does_not_hide_the_others(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host(run).join("a")
    ledger_path(run, "bad").symlink_to("elsewhere")
    assert top(run, once=True, as_json=False) == 1
    lines = outcome(capsys)[0].splitlines()
    assert lines[1].split()[:2] == ["host", "a"]
    assert lines[2].startswith(f"bad: ledger {run}/bad.ledger: found a symbolic link")


def test_a_directory_that_is_not_ours_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.mkdir()
    run.chmod(0o755)
    assert top(run, once=True, as_json=False) == 1
    assert f"-: ledger {run}: found a directory" in outcome(capsys)[0]


def test_redrawing_ends_well_with_an_interrupt() -> None:
    drawn: list[int] = []

    def draw() -> None:
        drawn.append(1)
        if len(drawn) == 3:
            raise KeyboardInterrupt

    assert redraw(draw, wait=lambda seconds: None) == 0
    assert len(drawn) == 3


def test_without_rich_a_terminal_is_told_what_to_install(run: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from kvcached_patch.cli_ledger import top
sys.exit(top(Path({str(run)!r}), once=False, as_json=False))
"""
    terminal, end = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            stdout=end,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=environment(),
        )
    finally:
        os.close(end)
        os.close(terminal)
    assert done.returncode == 1
    assert done.stderr == (
        "kvcached-patch top: redrawing needs rich: pip install 'kvcached-patch[cli]';"
        " --once and --json do without\n"
    )


# limit


def test_an_engines_limit_is_set_on_every_device_that_has_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ledgers = [host(run, device) for device in ("cuda:0", "cuda:1", "host")]
    for ledger, name in zip(ledgers, ("a", "a", "b"), strict=True):
        ledger.join(name).reserve(3 * MIB)
    assert limit(run, "a", "2MiB", False) == 0
    assert outcome(capsys) == (
        "a on cuda_0: limit 2MiB, 3MiB committed\na on cuda_1: limit 2MiB, 3MiB committed\n", "",
    )  # fmt: skip
    assert [each.engines()[0].limit for each in ledgers] == [2 * MIB, 2 * MIB, None]
    assert limit(run, "a", "None", False, device="cuda:1") == 0
    assert outcome(capsys) == ("a on cuda:1: limit none, 3MiB committed\n", "")
    assert [each.engines()[0].limit for each in ledgers] == [2 * MIB, None, None]


def test_the_budget_is_set(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).join("a").reserve(MIB)
    assert limit(run, None, "8GiB", True) == 0
    assert outcome(capsys) == ("host: 1MiB committed, budget 8GiB\n", "")
    assert host(run).total == 8 * GIB
    assert limit(run, None, "none", True) == 0
    assert outcome(capsys) == ("host: 1MiB committed, no budget\n", "")
    assert host(run).total is None


def test_the_budget_needs_a_device_where_that_is_in_doubt(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert limit(run, None, "8GiB", True) == 1
    assert "found 0 devices; expected --device" in outcome(capsys)[1]
    assert limit(run, None, "8GiB", True, device="host") == 0
    assert limit(run, None, "9GiB", True, device="cuda:0") == 0
    assert outcome(capsys)[0].splitlines()[1] == "cuda:0: 0B committed, budget 9GiB"
    assert limit(run, None, "1GiB", True) == 1
    assert "found 2 devices; expected --device with one of: cuda_0, host" in outcome(capsys)[1]
    assert (host(run).total, host(run, "cuda:0").total) == (8 * GIB, 9 * GIB)


@pytest.mark.parametrize("value", ["", "2GB", "-1", "two"])
def test_a_bad_size_is_refused(run: Path, capsys: pytest.CaptureFixture[str], value: str) -> None:
    host(run).join("a")
    assert limit(run, "a", value, False) == 1
    out, err = outcome(capsys)
    assert out == ""
    assert err.startswith(f"kvcached-patch limit: {value!r}: not a size; expected")


def test_a_limit_of_nothing_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).join("a")
    assert limit(run, "a", "0", False) == 1
    assert outcome(capsys)[1] == (
        "kvcached-patch limit: '0': expected at least 1 byte, or none to remove the limit\n"
    )


def test_an_unknown_engine_is_answered_with_the_known_ones(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert limit(run, "x", "1G", False) == 1
    assert outcome(capsys)[1].endswith("found no engine 'x'; no engine is running\n")
    host(run).join("a")
    host(run, "cuda:0").join("b")
    ledger_path(run, "z").symlink_to("elsewhere")
    assert limit(run, "x", "1G", False) == 1
    err = outcome(capsys)[1]
    assert "found no engine 'x'; expected one of: b, a; ledger" in err
    assert "found a symbolic link" in err


@pytest.mark.parametrize(("name", "total"), [("a", True), (None, False)])
def test_either_an_engine_or_all(
    run: Path, capsys: pytest.CaptureFixture[str], name: str | None, total: bool
) -> None:
    assert limit(run, name, "1G", total) == 2
    assert "expected either NAME SIZE or --total SIZE" in outcome(capsys)[1]
