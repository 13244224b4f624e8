"""Run the GPU tests without pytest: one line each, then what was measured, as JSON."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
import unittest

from tests.gpu import measured
from tests.lanes import listed


def main() -> int:
    """0 if all that ran passed, 1 if not."""
    failed = 0
    files = [path for path, lanes in listed().items() if lanes == ["gpu"]]
    for path in files:
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        for name, test in vars(module).items():
            if not name.startswith("test_"):
                continue
            start = time.monotonic()
            try:
                test()
                outcome = "passed"
            except unittest.SkipTest as reason:
                outcome = f"skipped: {reason}"
            except Exception:
                traceback.print_exc()
                outcome, failed = "FAILED", failed + 1
            print(f"{name}: {outcome} ({time.monotonic() - start:.1f} s)", flush=True)
    print(json.dumps(measured.FOUND, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
