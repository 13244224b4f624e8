"""``kvcached-patch doctor`` where MaxText and tpu-inference are installed."""

from __future__ import annotations

import json

from packaging.version import Version

from kvcached_patch.seams.manifest import load_manifest
from tests.fresh import python
from tools.maxtext.environment import ENVIRONMENT

SEAMS = len(load_manifest("maxtext").seams_in(Version("0.2.5")))


def test_active_and_right() -> None:
    done = python("-m", "kvcached_patch", "doctor", "--json", KVCACHED_PATCH="1", **ENVIRONMENT)
    report = json.loads(done.stdout)
    assert (done.returncode, report["active"]) == (0, True)
    text = {finding["name"]: finding["text"] for finding in report["findings"]}
    assert "left as it is: tpu_inference is installed and runs in the place" in text["vLLM"]
    assert "left as it is: tpu_inference 0.32.0 needs no patch" in text["tpu-inference"]
    assert text["seams MaxText"] == f"all {SEAMS} match"
    assert text["import of MaxText"] == f"all {SEAMS} seams in place"
    assert [seam["ok"] for seam in report["seams"]] == [True] * SEAMS
