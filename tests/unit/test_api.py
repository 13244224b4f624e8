"""What other programs build on: across processes, by name and device, within one version."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

from kvcached_patch import api
from kvcached_patch.ledger import Ledger, ledger_path
from tests.ledgers import TRIM, Engine

KIB, MIB = 1024, 1024**2
LEAVE = """
import time
account = ledger.join("a")
print("ready", flush=True)
while not account.asked:
    time.sleep(0.001)
    account.share()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def ledger(run: Path, device: str = "host") -> Ledger:
    return Ledger(ledger_path(run, device))


def test_version_1_has_these_names_and_fields() -> None:
    """Something that goes, or means another thing, takes another API_VERSION."""
    assert api.API_VERSION == 1
    assert set(api.__all__) == {
        "API_VERSION", "Engine", "EngineNotFound", "LedgerError", "Usage", "devices", "engines",
        "set_budget", "set_limit", "trim", "usage",
    }  # fmt: skip
    assert {field.name: field.type for field in fields(api.Engine)} == {
        "device": "str", "name": "str", "pid": "int", "model": "str", "alive": "bool",
        "age_s": "float", "reserved_bytes": "int", "committed_bytes": "int", "cached_bytes": "int",
        "wanted_bytes": "int", "free_bytes": "int", "limit_bytes": "int | None", "queries": "int",
        "hits": "int", "pages_committed": "int", "pages_released": "int", "misses": "int",
        "trimming": "bool",
    }  # fmt: skip
    assert {field.name: field.type for field in fields(api.Usage)} == {
        "device": "str", "budget_bytes": "int | None", "engines": "tuple[Engine, ...]",
    }  # fmt: skip


def test_where_no_engine_has_run_there_is_nothing(run: Path) -> None:
    assert api.devices(directory=run) == []
    assert api.engines(directory=run) == []
    assert api.usage("host", directory=run) == api.Usage("host", None, ())
    assert not run.exists(), "looking makes no file"


def test_another_process_is_seen_bounded_and_trimmed(run: Path) -> None:
    with Engine(ledger(run).path, "a", 3 * MIB, MIB, code=TRIM) as process:
        process.ready()
        assert api.devices(directory=run) == ["host"]
        (engine,) = api.engines(directory=run)
        assert (engine.device, engine.name, engine.pid) == ("host", "a", process.process.pid)
        assert (engine.committed_bytes, engine.limit_bytes, engine.alive) == (3 * MIB, None, True)
        (limited,) = api.set_limit("a", 2 * MIB, directory=run)
        assert limited == replace(engine, limit_bytes=2 * MIB, age_s=limited.age_s)
        usage = api.set_budget(8 * MIB, device="host", directory=run)
        assert (usage.budget_bytes, usage.committed_bytes) == (8 * MIB, 3 * MIB)
        assert usage.engines[0].name == "a"

        (trimmed,) = api.trim("a", wait_s=60, directory=run)
        assert process.line() == "trimmed"
        assert (trimmed.committed_bytes, trimmed.trimming) == (MIB, False)
        assert api.usage("host", directory=run).committed_bytes == MIB


def test_one_that_ended_is_in_the_usage_but_no_engine(run: Path) -> None:
    with Engine(ledger(run).path, "a", 5) as process:
        process.ready().kill()
        assert api.engines(directory=run) == []
        (ended,) = api.usage("host", directory=run).engines
        assert (ended.name, ended.alive, ended.committed_bytes) == ("a", False, 0)
        for act in (
            lambda: api.set_limit("a", 1, directory=run),
            lambda: api.trim("a", directory=run),
        ):
            with pytest.raises(api.EngineNotFound, match="found no engine 'a'; no engine is"):
                act()


def test_one_that_ends_while_it_is_waited_for_is_not_waited_for(run: Path) -> None:
    with Engine(ledger(run).path, code=LEAVE) as process:
        process.ready()
        assert api.trim("a", wait_s=600, directory=run) == []


def test_one_that_is_not_waited_for_is_still_to_do_it(run: Path) -> None:
    ledger(run).join("a")
    assert [engine.trimming for engine in api.trim("a", directory=run)] == [True]
    assert [engine.trimming for engine in api.engines(directory=run)] == [True]


def test_a_name_counts_on_every_device_unless_one_is_given(run: Path) -> None:
    accounts = [ledger(run, device).join("a") for device in ("cuda:0", "cuda:1")]
    found = api.set_limit("a", MIB, directory=run)
    assert [(each.device, each.limit_bytes) for each in found] == [
        ("cuda_0", MIB), ("cuda_1", MIB),
    ]  # fmt: skip
    (one,) = api.trim("a", device="cuda:1", directory=run)
    assert (one.device, one.trimming) == ("cuda_1", True)
    assert [each.trimming for each in api.engines(directory=run)] == [False, True]
    assert api.engines("cuda:1", directory=run)[0].device == "cuda_1"
    with pytest.raises(api.EngineNotFound, match="no engine 'a'; no engine is running"):
        api.set_limit("a", MIB, device="host", directory=run)
    assert [account.name for account in accounts] == ["a", "a"]


def test_a_ledger_that_cannot_be_read_hides_no_engine_elsewhere(run: Path) -> None:
    ledger(run).join("a")
    ledger_path(run, "bad").symlink_to("elsewhere")
    assert api.set_limit("a", KIB, directory=run)[0].limit_bytes == KIB
    with pytest.raises(api.EngineNotFound, match=r"expected one of: a; ledger .*bad.*symbolic"):
        api.set_limit("b", KIB, directory=run)
    with pytest.raises(api.LedgerError, match=r"bad\.ledger: found a symbolic link"):
        api.usage("bad", directory=run)


@pytest.mark.parametrize("nbytes", [0, -1, 2**63])
def test_a_number_that_is_no_size_is_refused(run: Path, nbytes: int) -> None:
    ledger(run).join("a")
    with pytest.raises(ValueError, match="expected"):
        api.set_limit("a", nbytes, directory=run)
    with pytest.raises(ValueError, match="expected"):
        api.set_budget(nbytes, device="host", directory=run)
    assert api.usage("host", directory=run).budget_bytes is None


def test_by_default_it_is_this_users_directory(
    run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    api.set_budget(MIB, device="host")
    assert Ledger(tmp_path / "kvcached-patch" / "host.ledger").total == MIB
    assert api.devices() == ["host"]


def test_what_it_returns_cannot_be_changed(run: Path) -> None:
    ledger(run).join("a")
    usage = api.usage("host", directory=run)
    for each, name in ((usage, "device"), (usage.engines[0], "name")):
        with pytest.raises(FrozenInstanceError):
            setattr(each, name, "b")
