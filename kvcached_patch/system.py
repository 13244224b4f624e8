"""What is asked of Linux: files of this user alone, processes that still run."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kvcached_patch.errors import LedgerError


def private_directory(path: Path) -> int:
    """Open a directory that is this user's alone; returns the descriptor, the caller closes it.

    Raises LedgerError if it is a link, another user's, or open to others, FileNotFoundError if
    there is none.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    return _checked(path, flags, stat.S_IFDIR, 0o700)


def private_file(path: Path) -> int:
    """Open a file that is this user's alone for reading and writing, made with its directory.

    Raises LedgerError if either is a link, another user's, or open to others; OSError if the
    system refuses.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path.parent, 0o700)
    directory = private_directory(path.parent)
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return _checked(path, flags, stat.S_IFREG, 0o600, directory)
    finally:
        os.close(directory)


def _checked(path: Path, flags: int, kind: int, mode: int, directory: int | None = None) -> int:
    name = path if directory is None else path.name
    try:
        fd = os.open(name, flags, mode, dir_fd=directory)
    except FileNotFoundError:
        raise
    except OSError as error:
        found = os.lstat(path)
        if _private(found, kind):
            raise LedgerError(f"ledger {path}: {error.strerror}") from error
        raise LedgerError(_refusal(path, found, kind, mode)) from error
    found = os.fstat(fd)
    if not _private(found, kind):
        os.close(fd)
        raise LedgerError(_refusal(path, found, kind, mode))
    return fd


def _private(found: os.stat_result, kind: int) -> bool:
    mine = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
    return mine and stat.S_IFMT(found.st_mode) == kind


_KINDS = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory", stat.S_IFREG: "a file"}


def _refusal(path: Path, found: os.stat_result, kind: int, mode: int) -> str:
    what = _KINDS.get(stat.S_IFMT(found.st_mode), "a special file")
    return (
        f"ledger {path}: found {what} of user {found.st_uid},"
        f" mode {stat.S_IMODE(found.st_mode):04o}; expected {_KINDS[kind]} of user {os.geteuid()},"
        f" mode {mode:04o}"
    )


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none or it is a zombie.

    Field 22 of /proc/PID/stat; the name in field 2 can hold anything, also spaces and brackets.
    Raises LedgerError if the system does not say.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X", b"x") else int(fields[19])


def descends(pid: int, ancestor: int) -> bool:
    """Whether a process is `ancestor` itself, its child, a child of that, and so on.

    Raises LedgerError if the system does not say.
    """
    while pid != ancestor:
        fields = _stat(pid)
        if fields is None:  # init's parent is 0
            return False
        pid = int(fields[1])
    return True


def _stat(pid: int) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the third on; None if there is no such process."""
    path = f"/proc/{pid}/stat"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, 4096).rpartition(b")")[2].split()
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; cannot tell whether it runs") from error


def alive(pid: int, start: int) -> bool:
    """Whether the process that started then still runs."""
    return started(pid) == start


def default_dir(xdg_runtime_dir: str | None, tmp: Path, uid: int) -> Path:
    """Where the ledgers of a user are, the directory itself need not exist.

    In `xdg_runtime_dir` (the variable's value) if that is this user's and can be written, else in
    `tmp`, the system's directory for temporary files.
    """
    if xdg_runtime_dir and os.path.isabs(xdg_runtime_dir):
        runtime = Path(xdg_runtime_dir)
        usable = runtime.is_dir() and os.access(runtime, os.W_OK | os.X_OK)
        if usable and runtime.stat().st_uid == uid:
            return runtime / "kvcached-patch"
    return tmp / f"kvcached-patch-{uid}"
