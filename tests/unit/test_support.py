"""The README's table of what runs is what ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcached_patch.seams.manifest import load_manifest
from tools import support
from tools.readme import README, ReadmeError, markers
from tools.support import Result, SupportError
from tools.wheels import RELEASES

JUNIT = """<testsuites><testsuite time="41.6">
<testcase name="a" />
<testcase name="b"><properties><property name="shape" value="full" /></properties></testcase>
<testcase name="c"><properties><property name="driven" value="packed" /></properties></testcase>
<testcase name="d"><properties><property name="shape" value="latent" /></properties>
 <skipped message="stock vLLM 0.9 does not run it on a CPU: TypeError">here</skipped></testcase>
<testcase name="e"><properties><property name="shape" value="sliding" /></properties>
 {failure}</testcase>
</testsuite></testsuites>
"""
SHAPES = {"full": "engine", "packed": "classes", "latent": "TypeError"}


def result(tmp_path: Path, failure: str = "") -> Result:
    path = tmp_path / "0.9.0.xml"
    path.write_text(JUNIT.format(failure=failure))
    return support.read_result(path)


def test_the_readme_says_what_is_recorded() -> None:
    readme = README.read_text(encoding="utf-8")
    tables = support.render(support.recorded())
    assert readme == support.readme_with(tables, readme), "stale: `make support` mends it"


def test_a_release_is_called_tested_if_all_its_tests_passed() -> None:
    record = support.recorded()
    assert list(record) == list(load_manifest("vllm").tested)
    assert all(each.passed and not each.failed for each in record.values())
    assert set(record) <= set(RELEASES)


def test_every_shape_is_recorded_for_every_release() -> None:
    first, *others = (each.shapes.keys() for each in support.recorded().values())
    assert first
    assert [shapes for shapes in others if shapes != first] == []


def test_a_result_is_read(tmp_path: Path) -> None:
    good = {**SHAPES, "sliding": "engine"}
    assert result(tmp_path) == Result(passed=4, skipped=1, failed=0, seconds=42, shapes=good)
    failed = result(tmp_path, "<failure />")
    assert (failed.passed, failed.failed, failed.shapes["sliding"]) == (3, 1, "failed")
    assert result(tmp_path, "<error />") == failed


@pytest.mark.parametrize("text", ["", "<testsuite", "{}"])
def test_what_is_no_result_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "0.9.0.xml"
    path.write_text(text)
    with pytest.raises(SupportError, match=rf"{path}: expected a JUnit file"):
        support.read_result(path)


def test_results_that_differ_from_the_record_are_told(tmp_path: Path) -> None:
    now = {"0.9.0": result(tmp_path)}
    assert support.differences(now, now) == []
    reworded = Result(4, 1, 0, 42, {**result(tmp_path).shapes, "latent": "it has no such kernel"})
    assert support.differences(now, {"0.9.0": reworded}) == []
    before = Result(4, 1, 0, 42, {**SHAPES, "latent": "engine", "old": "engine"})
    assert support.differences(now, {"0.9.0": before}) == [
        "0.9.0: latent: recorded 'engine'; found 'TypeError'",
        "0.9.0: sliding: recorded 'nothing'; found 'engine'",
        "0.9.0: old: recorded 'engine'; found 'nothing'",
    ]


def test_the_tables(tmp_path: Path) -> None:
    tables = support.render({"0.28.0": result(tmp_path), "0.32.0": Result(2, 0, 0, 9, SHAPES)})
    lines = tables.splitlines()
    assert "| 0.28.0 | whole engines, V1 runner | 4 passed, 1 skipped, 42 s |" in lines
    assert any(line.startswith("| 0.27.1 | nothing: its sources match, in ") for line in lines)
    assert "| cache | 0.28 | 0.32 |" in lines
    assert "| packed | classes | classes |" in lines
    assert "| latent | (1) | (1) |" in lines
    assert "| sliding | engine |  |" in lines
    assert lines[-3:] == ["1. TypeError", "", "</details>"]


def test_a_release_that_the_manifest_does_not_cover_has_no_place_in_it() -> None:
    with pytest.raises(SupportError, match=r"0\.9\.0: expected a release that vllm\.toml covers"):
        support.render({"0.9.0": Result(1, 0, 0, 1)})


def test_a_readme_without_a_place_for_them() -> None:
    begin, _ = markers(support.PART, support.MAKER)
    with pytest.raises(ReadmeError, match="expected the lines"):
        support.readme_with("table\n", f"text\n{begin}more\n")
