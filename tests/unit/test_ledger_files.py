"""A file that is not the user's own is refused, one that is broken is begun anew."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_patch.errors import LedgerError
from kvcached_patch.ledger import Ledger, devices, ledger_path
from kvcached_patch.ledger_file import MAGIC, RECORD, SIZE, VERSION, LedgerFile
from kvcached_patch.system import started
from tests.ledgers import Engine

ME = os.geteuid()


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(ledger_path(tmp_path / "run", "host"))


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def of_version(version: int, pid: int = 0, start: int = 0) -> bytes:
    """A ledger of another version: three records of 40 bytes, the last in use."""
    header = struct.pack("=8s4I", MAGIC, version, 32, 40, 3).ljust(32, b"\1")
    return header + bytes(80) + struct.pack("=3Q", 1, pid, start).ljust(40, b"\1")


# Privacy


@pytest.mark.usefixtures("no_umask")
def test_what_is_made_is_private(ledger: Ledger) -> None:
    ledger.join("a")
    assert (mode(ledger.path.parent), mode(ledger.path)) == (0o700, 0o600)
    ledger.path.write_bytes(b"garbage")
    ledger.set_total(1)
    assert {mode(path) for path in ledger.path.parent.iterdir()} == {0o600}
    assert len(list(ledger.path.parent.iterdir())) == 2


def refused(ledger: Ledger, path: Path, found: str, expected: str) -> None:
    """Each call names the path, what was found, what is expected; nothing is changed."""
    before = path.lstat()
    calls = (
        lambda: ledger.join("a"),
        ledger.engines,
        lambda: ledger.set_total(1),
        lambda: ledger.total,
    )
    for call in calls:
        with pytest.raises(LedgerError) as caught:
            call()
        assert str(caught.value) == f"ledger {path}: found {found}; expected {expected}"
    after = path.lstat()
    assert (after.st_ino, after.st_mode, after.st_size) == (
        before.st_ino, before.st_mode, before.st_size,
    )  # fmt: skip


A_FILE = f"a file of user {ME}, mode 0600"
A_DIRECTORY = f"a directory of user {ME}, mode 0700"


@pytest.mark.parametrize("bits", [0o620, 0o602, 0o640, 0o604, 0o666, 0o777])
def test_a_file_open_to_others_is_refused(ledger: Ledger, bits: int) -> None:
    ledger.set_total(1)
    ledger.path.chmod(bits)
    refused(ledger, ledger.path, f"a file of user {ME}, mode {bits:04o}", A_FILE)


@pytest.mark.parametrize("bits", [0o720, 0o702, 0o755, 0o1777])
def test_a_directory_open_to_others_is_refused(ledger: Ledger, bits: int) -> None:
    ledger.set_total(1)
    ledger.path.parent.chmod(bits)
    found = f"a directory of user {ME}, mode {bits:04o}"
    refused(ledger, ledger.path.parent, found, A_DIRECTORY)
    with pytest.raises(LedgerError, match="found a directory of user"):
        devices(ledger.path.parent)


@pytest.mark.parametrize("target", ["ledger", "absent"])
def test_a_symlinked_file_is_refused(ledger: Ledger, tmp_path: Path, target: str) -> None:
    Ledger(tmp_path / "other" / "ledger").set_total(7)
    ledger.path.parent.mkdir(0o700)
    ledger.path.symlink_to(tmp_path / "other" / target)
    refused(ledger, ledger.path, f"a symbolic link of user {ME}, mode 0777", A_FILE)
    assert Ledger(tmp_path / "other" / "ledger").total == 7
    assert len(list((tmp_path / "other").iterdir())) == 1


def test_a_symlinked_directory_is_refused(ledger: Ledger, tmp_path: Path) -> None:
    Ledger(tmp_path / "other" / ledger.path.name).set_total(7)
    ledger.path.parent.symlink_to(tmp_path / "other")
    found = f"a symbolic link of user {ME}, mode 0777"
    refused(ledger, ledger.path.parent, found, A_DIRECTORY)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(ledger: Ledger, make: object) -> None:
    ledger.path.parent.mkdir(0o700)
    make(ledger.path, 0o700)
    what = "a directory" if ledger.path.is_dir() else "a special file"
    refused(ledger, ledger.path, f"{what} of user {ME}, mode 0700", A_FILE)


def test_a_file_in_place_of_the_directory_is_refused(ledger: Ledger) -> None:
    ledger.path.parent.touch(0o600)
    with pytest.raises(LedgerError, match=f"found a file of user {ME}, mode 0600; expected a dir"):
        ledger.join("a")


@pytest.mark.parametrize("what", ["file", "directory"])
def test_another_users_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    ledger.set_total(1)
    monkeypatch.setattr(os, "geteuid", lambda: ME + 1)
    path = ledger.path.parent
    if what == "file" and ME == 0:  # only root can give things away
        monkeypatch.undo()
        path = ledger.path
        os.chown(path, ME + 1, -1)
        refused(ledger, path, f"a file of user {ME + 1}, mode 0600", A_FILE)
    else:
        expected = f"a directory of user {ME + 1}, mode 0700"
        refused(ledger, path, f"a directory of user {ME}, mode 0700", expected)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="No such file or directory"):
        Ledger(tmp_path / "absent" / "run" / "host.ledger").join("a")
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="Not a directory"):
        Ledger(tmp_path / "file" / "run" / "host.ledger").join("a")


# Broken files

GARBAGE = {
    "text": (b"hello, world\n" * 3000, r"no ledger (begins with b'hello, w')"),
    "one byte": (b"x", r"no ledger (begins with b'x')"),
    "zeros, then text": (bytes(100) + b"x", "no ledger"),
    "magic alone": (MAGIC, r"no ledger (begins with b'KVLEDGER')"),
    "older": (of_version(VERSION - 1), f"format {VERSION - 1} with 3 records of 40 bytes"),
    "newer": (of_version(VERSION + 1), f"format {VERSION + 1} with 3 records of 40 bytes"),
    "newer, its engine dead": (of_version(VERSION + 1, os.getpid(), 1), "with 3 records of 40"),
    "other sizes": (of_version(VERSION), f"format {VERSION} with 3 records of 40 bytes"),
    "no sizes": (struct.pack("=8s4I", MAGIC, 9, 0, 0, 0), "format 9 with 0 records of 0 bytes"),
    "huge sizes": (struct.pack("=8s4I", MAGIC, 9, 2**32 - 1, 2**32 - 1, 2**32 - 1), "format 9"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "found"), GARBAGE.values(), ids=GARBAGE)
def test_what_is_no_ledger_is_moved_aside_with_one_warning(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, content: bytes, found: str
) -> None:
    ledger.path.parent.mkdir(0o700)
    ledger.path.write_bytes(content)
    ledger.path.chmod(0o600)
    account = ledger.join("a")
    assert account.reserve(5)
    assert [engine.committed for engine in ledger.engines()] == [5]
    ((name, _, message),) = caplog.record_tuples
    assert name == "vllm.kvcached_patch"
    assert found in message
    assert Path(f"{ledger.path}.bad").read_bytes() == content
    assert devices(ledger.path.parent) == ["host"]


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_versions_ledger_is_left_alone_while_in_use(ledger: Ledger, version: int) -> None:
    content = of_version(version, os.getpid(), started(os.getpid()) or 0)
    ledger.path.parent.mkdir(0o700)
    ledger.path.write_bytes(content)
    ledger.path.chmod(0o600)
    for call in (lambda: ledger.join("a"), ledger.engines, lambda: ledger.set_total(1)):
        with pytest.raises(LedgerError, match=f"format {version} .*process {os.getpid()}"):
            call()
    assert ledger.path.read_bytes() == content


@pytest.mark.parametrize("content", [b"", bytes(10), bytes(SIZE)])
def test_a_file_without_content_is_begun_in_silence(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    ledger.path.parent.mkdir(0o700)
    ledger.path.write_bytes(content)
    ledger.path.chmod(0o600)
    assert ledger.join("a").reserve(5)
    assert ledger.path.stat().st_size == SIZE
    assert caplog.messages == []


@pytest.mark.parametrize("length", [30, 64, 64 + 100, 64 + RECORD, 64 + 3 * RECORD - 1, SIZE - 1])
def test_a_file_cut_short_keeps_what_is_left(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, length: int
) -> None:
    ledger.set_total(100)
    with Engine(ledger.path, "a", 10) as a:
        a.ready()
        with Engine(ledger.path, "b", 10) as b:
            b.ready()
            os.truncate(ledger.path, length)
            kept = max(length - 64, 0) // RECORD
            assert [each.name for each in ledger.engines()] == ["a", "b"][:kept]
            assert ledger.total == (100 if length >= 64 else None)
            assert len(caplog.messages) == 1
            assert f"cut short, {length} bytes of {SIZE}" in caplog.text


def test_an_error_under_the_lock_frees_it(ledger: Ledger) -> None:
    file = LedgerFile(ledger.path)
    with pytest.raises(RuntimeError), file:
        raise RuntimeError
    with pytest.raises(LedgerError, match=f"ledger {ledger.path}: No space left"), file:
        raise OSError(28, "No space left")
    with file as table:
        assert table.live() == []
