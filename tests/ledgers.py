"""Engines of other processes, for tests of the ledger."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tests.fresh import environment

START = """
import sys
from pathlib import Path
from kvcached_patch.ledger import Ledger
path, *arguments = sys.argv[1:]
ledger = Ledger(Path(path))
"""
JOIN = """
account = ledger.join(arguments[0])
assert account.reserve(int(arguments[1]))
print("ready", flush=True)
sys.stdin.read()
"""
# Joins with some bytes and keeps so many of them when it is asked to trim.
TRIM = """
import time
account = ledger.join(arguments[0])
assert account.reserve(int(arguments[1]))
seen = account.generation
print("ready", flush=True)
while not account.asked:
    while account.generation == seen:
        time.sleep(0.001)
    seen = account.generation
    account.share()
account.release(account.committed - int(arguments[2]))
account.trimmed(account.asked)
print("trimmed", flush=True)
sys.stdin.read()
"""


class Engine:
    """A process running code after `START`; as a context manager it is killed at the end."""

    def __init__(self, path: Path, *arguments: object, code: str = JOIN) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START + code, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=environment(),
        )

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate()

    def line(self) -> str:
        """The next line that it prints, waited for."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ready(self) -> Engine:
        assert self.line() == "ready"
        return self

    def kill(self) -> None:
        """SIGKILL; until the end of the ``with`` block the process is a zombie."""
        self.process.kill()
        os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
