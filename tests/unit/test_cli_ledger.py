"""The ledger's commands show every engine, change bounds, and say what is wrong in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvcached_patch.api import Engine, Usage
from kvcached_patch.cli_ledger import (
    HEADINGS,
    Report,
    budget,
    limit,
    plain,
    read,
    redraw,
    top,
    trim,
)
from kvcached_patch.core.totals import Totals
from kvcached_patch.ledger import Ledger, ledger_path
from tests import ledgers
from tests.fresh import environment
from tests.lanes import ROOT

KIB, MIB, GIB = 1024, 1024**2, 1024**3
A = Engine(
    device="host", name="a", pid=12, model="/models/org/gemma-3n/", alive=True, age_s=0.5,
    reserved_bytes=8 * GIB, committed_bytes=3 * GIB // 2, cached_bytes=512 * MIB, wanted_bytes=0,
    free_bytes=0, limit_bytes=2 * GIB, queries=3, hits=2, pages_committed=0, pages_released=0,
    misses=0, trimming=False,
)  # fmt: skip
DEAD = replace(
    A, name="b[red]", pid=1234, model="", alive=False, reserved_bytes=0, committed_bytes=0,
    cached_bytes=0,
)  # fmt: skip
HEADS = "DEVICE  NAME            PID  MODEL     RESERVED  COMMITTED  CACHED  LIMIT  FREE  HIT RATE"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def host(run: Path, device: str = "host") -> Ledger:
    return Ledger(ledger_path(run, device))


@pytest.fixture(autouse=True)
def _as_wide_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that run tests side by side are given a width."""
    monkeypatch.delenv("COLUMNS", raising=False)


def outcome(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


# top


def shown(*engines: Engine) -> list[list[str]]:
    """The table's rows below its headings, by cell."""
    table = plain([Report(Usage("host", None, engines))]).splitlines()
    return [row.split() for row in table[1 : 1 + len(engines)]]


def test_a_row_has_what_an_engine_is_known_by() -> None:
    row = ["host", "a", "12", "gemma-3n", "8GiB", "1.5GiB", "512MiB", "2GiB", "0B", "66.7%"]
    assert shown(A) == [row]
    assert len(HEADINGS) == len(row)


def test_before_the_first_query_there_is_no_hit_rate() -> None:
    assert shown(replace(A, queries=0, hits=0))[0][-1] == "-"


def test_a_dead_engine_is_shown_as_dead_without_bytes() -> None:
    assert shown(DEAD) == [["host", "b[red]", "(dead)", "1234", *"-------"]]


def test_a_long_model_name_is_shortened() -> None:
    assert shown(replace(A, model="org/" + "m" * 40))[0][3] == "m" * 31 + "…"


FOUND = [
    Report(Usage("host", 8 * GIB, (A, DEAD))),
    Report(Usage("cuda_0", 4 * GIB, ())),
    Report(Usage("cuda_1", None, ())),
    Report(Usage("x", None, ()), "ledger /x: broken"),
]
SUMMARY = [
    "host: 1.5GiB committed, budget 8GiB",
    "cuda_0: 0B committed, budget 4GiB",
    "x: ledger /x: broken",
]


def test_the_table_is_aligned_and_ends_with_a_line_per_device() -> None:
    assert plain(FOUND).splitlines() == [
        HEADS,
        "host    a                12  gemma-3n      8GiB     1.5GiB  512MiB   2GiB    0B     66.7%",
        "host    b[red] (dead)  1234  -                -          -       -      -     -         -",
        *SUMMARY,
    ]
    assert plain(FOUND, len(HEADS)) == plain(FOUND)


def test_a_narrow_terminal_gets_a_paragraph_for_each_engine() -> None:
    assert plain(FOUND, 80).splitlines() == [
        "device host, name a, pid 12, model gemma-3n, reserved 8GiB, committed 1.5GiB,",
        "  cached 512MiB, limit 2GiB, free 0B, hit rate 66.7%",
        "device host, name b[red] (dead), pid 1234, model -, reserved -, committed -,",
        "  cached -, limit -, free -, hit rate -",
        *SUMMARY,
    ]


def test_what_is_to_be_copied_is_never_broken() -> None:
    name = "n" * 64
    lines = plain([Report(Usage("host", None, (replace(A, name=name),)))], 40).splitlines()
    assert [line for line in lines if len(line) > 40] == [f"  {name},"]


def test_nobody_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top(run, once=True, as_json=False) == 0
    assert outcome(capsys) == (f"no engine is running (looked in {run})\n", "")
    assert top(run, once=True, as_json=True) == 0
    assert json.loads(outcome(capsys)[0]) == {"api_version": 1, "devices": []}
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
    assert outcome(capsys) == (f"no engine is running (looked in {run})\n", "")


def test_json_has_every_number(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).set_total(8 * GIB)
    account = host(run).join("a", model="org/m", reserved=GIB)
    account.reserve(MIB)
    account.want(3)
    totals = Totals(committed=7, released=5, misses=6)
    account.publish(cached=1, free=2, queries=4, hits=1, totals=totals)
    host(run).trim("a")
    assert top(run, once=False, as_json=True) == 0
    (device,) = json.loads(outcome(capsys)[0])["devices"]
    (engine,) = device.pop("engines")
    assert engine.pop("age_s") >= 0
    assert device == {
        "device": "host", "budget_bytes": 8 * GIB, "committed_bytes": MIB, "problem": None,
    }  # fmt: skip
    assert engine == {
        "device": "host", "name": "a", "pid": os.getpid(), "model": "org/m", "alive": True,
        "reserved_bytes": GIB, "committed_bytes": MIB, "cached_bytes": 1, "wanted_bytes": 3,
        "free_bytes": 2, "limit_bytes": None, "queries": 4, "hits": 1, "hit_rate": 0.25,
        "pages_committed": 7, "pages_released": 5, "misses": 6, "trimming": True,
    }  # fmt: skip


def test_an_engine_that_just_died_is_shown(run: Path) -> None:
    with ledgers.Engine(host(run).path, "a", 5) as engine:
        engine.ready().kill()
        (report,) = read(run)
        assert [(each.name, each.alive) for each in report.usage.engines] == [("a", False)]
        assert plain([report]).endswith("no engine is running")


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
    found = [host(run, device) for device in ("cuda:0", "cuda:1", "host")]
    for ledger, name in zip(found, ("a", "a", "b"), strict=True):
        ledger.join(name).reserve(3 * MIB)
    assert limit(run, "a", 2 * MIB) == 0
    assert outcome(capsys) == (
        "a on cuda_0: limit 2MiB, 3MiB committed\na on cuda_1: limit 2MiB, 3MiB committed\n", "",
    )  # fmt: skip
    assert [each.engines()[0].limit for each in found] == [2 * MIB, 2 * MIB, None]
    assert limit(run, "a", None, device="cuda:1") == 0
    assert outcome(capsys) == ("a on cuda_1: limit none, 3MiB committed\n", "")
    assert [each.engines()[0].limit for each in found] == [2 * MIB, None, None]


def test_the_budget_is_set(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host(run).join("a").reserve(MIB)
    assert budget(run, 8 * GIB) == 0
    assert outcome(capsys) == ("host: 1MiB committed, budget 8GiB\n", "")
    assert host(run).total == 8 * GIB
    assert budget(run, None) == 0
    assert outcome(capsys) == ("host: 1MiB committed, no budget\n", "")
    assert host(run).total is None


def test_the_budget_needs_a_device_where_that_is_in_doubt(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert budget(run, 8 * GIB) == 1
    assert "found 0 devices; expected --device with one of: host for CPUs" in outcome(capsys)[1]
    assert budget(run, 8 * GIB, device="host") == 0
    assert budget(run, 9 * GIB, device="GPU-0") == 0
    assert outcome(capsys)[0].splitlines()[1] == "GPU-0: 0B committed, budget 9GiB"
    assert budget(run, GIB) == 1
    assert "found 2 devices; expected --device with one of: GPU-0, host" in outcome(capsys)[1]
    assert (host(run).total, host(run, "GPU-0").total) == (8 * GIB, 9 * GIB)


def test_a_budget_of_no_such_device_is_not_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert budget(run, GIB, device="hots") == 1
    assert "found no device 'hots'; expected --device with one of: host" in outcome(capsys)[1]
    assert not run.exists()


def test_an_unknown_engine_is_answered_with_the_known_ones(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert limit(run, "x", GIB) == 1
    assert outcome(capsys)[1].endswith("found no engine 'x'; no engine is running\n")
    host(run).join("a")
    host(run, "cuda:0").join("b")
    ledger_path(run, "z").symlink_to("elsewhere")
    assert limit(run, "x", GIB) == 1
    err = outcome(capsys)[1]
    assert "found no engine 'x'; expected one of: b, a; ledger" in err
    assert "found a symbolic link" in err


# trim


def test_what_was_given_back_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ledgers.Engine(host(run).path, "a", 3 * MIB, MIB, code=ledgers.TRIM) as engine:
        engine.ready()
        assert trim(run, "a", wait_s=60) == 0
        assert outcome(capsys) == ("a on host: 1MiB committed, 3MiB before\n", "")


def test_an_engine_that_does_not_answer_is_said(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host(run).join("a").reserve(MIB)
    assert trim(run, "a", wait_s=0.02) == 1
    assert outcome(capsys) == (
        "a on host: 1MiB committed, 1MiB before\n",
        "kvcached-patch trim: a on host: asked, not done in 0.02 s\n",
    )
    assert trim(run, "b", wait_s=0) == 1
    assert outcome(capsys)[1] == ("kvcached-patch trim: found no engine 'b'; expected one of: a\n")
