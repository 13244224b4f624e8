"""The matrix lane runs patched: the toggle is set before vLLM is imported."""

import os

from kvcached_patch import _startup

os.environ["KVCACHED_PATCH"] = "1"
_startup.install()
