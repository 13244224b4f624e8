"""``kvcached-patch doctor`` with arguments of ``vllm serve``, which each release parses itself."""

from __future__ import annotations

import json

import pytest

from tests.fresh import python

NIXL = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'


@pytest.mark.parametrize(
    ("arguments", "state", "text"),
    [
        (["some/model", "--enforce-eager", "--port=80"], "ok", "nothing in these arguments"),
        (["some/model", "--kv-transfer-config", NIXL], "note", "KV connector NixlConnector: "),
        (["some/model", "--enable-elastic-ep"], "note", "elastic expert parallelism: "),
        (["--enforce-eagerly"], "problem", "unrecognized arguments: --enforce-eagerly"),
    ],
)
def test_arguments(arguments: list[str], state: str, text: str) -> None:
    command = ("-m", "kvcached_patch", "doctor", "--json", "--", *arguments)
    done = python(*command, KVCACHED_PATCH="1")
    report = json.loads(done.stdout)
    assert (done.returncode, report["active"]) == ((1, False) if state == "problem" else (0, True))
    found = {each["name"]: each for each in report["findings"]}
    assert found["configuration"]["state"] == state
    assert text in found["configuration"]["text"]
