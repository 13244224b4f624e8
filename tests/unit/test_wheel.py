"""``kvcached-patch seams --wheel``: whether a release holds, from its wheel alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from kvcached_patch.cli import main

LOADER = "tpu_inference/models/common/model_loader.py"
DEFINED = "def get_flax_model(vllm_config, rng, mesh, is_draft_model=False):\n    pass\n"
IMPORTED = "from tpu_inference.models.common.model_loader import get_flax_model\n"


def wheel(folder: Path, version: str = "0.28.0", **files: str) -> Path:
    """A wheel of tpu-inference, whose manifest has a single seam: files by name, `/` as `__`."""
    path = folder / f"tpu_inference-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("tpu_inference/__init__.py", "")
        archive.writestr(LOADER, files.pop("loader", DEFINED))
        metadata = files.pop("metadata", f"Name: tpu-inference\nVersion: {version}\n")
        if metadata:
            archive.writestr(f"tpu_inference-{version}.dist-info/METADATA", metadata)
        for name, text in files.items():
            archive.writestr(f"tpu_inference/{name.replace('__', '/')}.py", text)
    return path


def report(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["seams", "--json", "--wheel", str(path)])
    (found,) = json.loads(capsys.readouterr().out)["releases"]
    return code, found


def test_a_release_that_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(wheel(tmp_path), capsys)
    assert (code, found["ok"], found["package"]) == (0, True, "tpu_inference")
    assert [seam["id"] for seam in found["seams"]] == ["step-functions"]
    assert main(["seams", "--wheel", str(wheel(tmp_path))]) == 0
    assert capsys.readouterr().out == "tpu_inference 0.28.0: 1 of 1 seams match; tested\n"


def test_a_changed_signature(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = wheel(tmp_path, "0.29.7", loader="def get_flax_model(config):\n    pass\n")
    code, found = report(path, capsys)
    assert (code, found["ok"], found["tested"]) == (1, False, False)
    assert "0.29.7: seam step-functions differs" in found["problem"]
    assert main(["seams", "--wheel", str(path)]) == 1
    text = capsys.readouterr().out
    assert "0 of 1 seams match; not tested with whole engines" in text
    assert "found (config)" in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (IMPORTED, True),
        ("from ..models.common.model_loader import get_flax_model\n", True),
        (f"def late():\n    {IMPORTED}", False),
        ("from tpu_inference.models.common import model_loader\n", False),
    ],
)
def test_an_importer_that_no_manifest_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, found: bool
) -> None:
    path = wheel(tmp_path, runner__work=text)
    code, result = report(path, capsys)
    expected = [["step-functions", "tpu_inference.runner.work"]] if found else []
    assert (code, result["unlisted_importers"]) == (int(found), expected)
    main(["seams", "--wheel", str(path)])
    assert ("tpu_inference.runner.work imports it by value" in capsys.readouterr().out) is found


def test_a_release_that_needs_no_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seams", "--wheel", str(wheel(tmp_path, "0.30.0"))]) == 0
    assert "left as it is: tpu_inference 0.30.0 needs no patch" in capsys.readouterr().out


def test_a_setting_that_needs_more_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHED_PATCH", "1")
    monkeypatch.setenv("KVCACHED_PATCH_SCAN", "pool")
    assert main(["seams", "--wheel", str(wheel(tmp_path, "0.32.0"))]) == 1
    assert "0.32.0: seam kv-caches differs" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("KVCACHED_PATCH_SCAN", "pools")
    assert main(["seams", "--wheel", str(wheel(tmp_path, "0.32.0"))]) == 1
    assert "KVCACHED_PATCH_SCAN='pools'" in capsys.readouterr().err


def test_several_wheels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = wheel(tmp_path, "0.26.0")
    assert main(["seams", "--wheel", str(wheel(tmp_path)), str(older)]) == 1
    text = capsys.readouterr().out
    assert "tpu_inference 0.28.0: 1 of 1" in text
    assert "0.26.0: no seams are known for this release" in text


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("", "expected the metadata of a wheel"),
        ("Name: x\n", "METADATA: expected a PEP 440 version"),
        ("Version: new\n", "METADATA: expected a PEP 440 version"),
    ],
)
def test_a_wheel_without_a_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metadata: str, message: str
) -> None:
    assert main(["seams", "--wheel", str(wheel(tmp_path, metadata=metadata))]) == 1
    assert message in capsys.readouterr().err


def test_what_is_no_wheel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, other = tmp_path / "text.whl", tmp_path / "other.whl"
    text.write_text("no archive")
    with ZipFile(other, "w") as archive:
        archive.writestr("six/__init__.py", "")
    for path, message in (
        (text, "expected a wheel: File is not a zip file"),
        (other, "found none of the packages vllm, tpu_inference, maxtext"),
        (tmp_path / "missing.whl", "expected a wheel: "),
    ):
        assert main(["seams", "--wheel", str(path)]) == 1
        error = capsys.readouterr().err
        assert message in error
        assert str(path) in error
