"""All or nothing: a vLLM that differs, another tool on a seam, a newer release."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from kvcached_patch.seams.manifest import load_manifest
from tests.fresh import python
from tests.overlay import overlay
from tests.parity import assert_same, run

UTILS = "v1/worker/utils.py"
ABSTRACT = "v1/executor/abstract.py"
CHANGED = {
    UTILS: (
        "    device: torch.device,\n    layout: KVCacheLayout,",
        "    layout: KVCacheLayout,\n    device: torch.device,",
    ),
}
IMPORT_TWICE = """
import sys
for attempt in range(2):
    try:
        import vllm.v1.worker.gpu_worker
    except Exception as error:
        print(type(error).__name__, str(error), sep="|")
    else:
        print("imported")
"""
PATCHED = """
import vllm.v1.worker.gpu_worker as w, vllm.v1.worker.utils as u, vllm.v1.executor.abstract as e
from kvcached_patch.seams.apply import armed
names = [w.Worker.__dict__["initialize_from_config"], u.allocate_kv_cache,
         e.Executor.__dict__["initialize_from_config"]]
print([type(n).__name__ for n in names], len(armed()))
"""
STOCK = "['function', 'function', 'function'] 0"
SEAMS = len(load_manifest("vllm").seams_in(Version("0.32.0")))
OURS = f"['FunctionWrapper', 'FunctionWrapper', 'FunctionWrapper'] {SEAMS}"


def warnings(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if "kvcached-patch: " in line]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return overlay(tmp_path_factory.mktemp("changed"), CHANGED)


def test_kvcached_358_a_changed_signature_is_refused_at_every_import(changed: Path) -> None:
    done = python("-c", IMPORT_TWICE, PYTHONPATH=str(changed), KVCACHED_PATCH="1")
    first, second = done.stdout.splitlines()
    assert first == second
    assert first == (
        "SeamMismatch|vllm 0.32.0: seam allocate differs (vllm.v1.worker.utils:allocate_kv_cache): "
        "expected (kv_cache_config, device, layout, kernel_block_sizes=None); "
        "found (kv_cache_config, layout, device, kernel_block_sizes=None)"
    )


def test_changed_signature_with_auto_runs_stock_and_warns_once(changed: Path) -> None:
    done = python("-c", PATCHED, PYTHONPATH=str(changed), KVCACHED_PATCH="auto")
    assert done.stdout.splitlines()[-1] == STOCK
    (warning,) = warnings(done.stderr)
    assert "vLLM runs unpatched: vllm 0.32.0: seam allocate differs" in warning


def test_of_a_changed_newer_release_the_same_is_said(tmp_path: Path) -> None:
    newer = {**CHANGED, "_version.py": ("'0.32.0'", "'0.99.0'")}
    tree = overlay(tmp_path, newer)
    done = python("-c", IMPORT_TWICE, PYTHONPATH=str(tree), KVCACHED_PATCH="1")
    first, second = [line for line in done.stdout.splitlines() if line.startswith("SeamMismatch|")]
    assert first == second
    assert first.startswith("SeamMismatch|vllm 0.99.0: seam allocate differs")
    done = python("-c", PATCHED, PYTHONPATH=str(tree), KVCACHED_PATCH="auto")
    assert done.stdout.splitlines()[-1] == STOCK
    (warning,) = warnings(done.stderr)
    assert "vLLM runs unpatched: vllm 0.99.0: seam allocate differs" in warning


def test_its_child_processes_do_not_say_it_again(changed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\n"
        "import vllm.v1.worker.utils as u\n"
        "def child():\n    print('child', type(u.allocate_kv_cache).__name__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n    process.join()\n"
    )
    done = python(str(script), PYTHONPATH=str(changed), KVCACHED_PATCH="auto")
    assert done.stdout.splitlines()[-1] == "child function"
    assert len(warnings(done.stderr)) == 1


def test_kvcached_185_nothing_is_patched_before_all_is_checked(changed: Path) -> None:
    code = IMPORT_TWICE + "from kvcached_patch.seams.apply import armed; print(armed())"
    done = python("-c", code, PYTHONPATH=str(changed), KVCACHED_PATCH="on")
    assert done.stdout.splitlines()[-1] == "()"


def test_matching_seams_are_patched_silently() -> None:
    done = python("-c", PATCHED, KVCACHED_PATCH="1")
    assert done.stdout.splitlines()[-1] == OURS
    assert warnings(done.stderr) == []


@pytest.mark.parametrize("version", ["0.32.1", "0.33.0rc1", "0.99.0.dev7+gabc"])
def test_untested_release_with_matching_seams_warns_once(version: str, tmp_path: Path) -> None:
    tree = overlay(tmp_path, {"_version.py": ("'0.32.0'", f"'{version}'")})
    done = python("-c", PATCHED, PYTHONPATH=str(tree), KVCACHED_PATCH="1")
    assert done.stdout.splitlines()[-1] == OURS
    (warning,) = warnings(done.stderr)
    assert f"vllm {version} is untested; all its seams match" in warning


def test_an_untested_release_with_matching_seams_runs(tmp_path: Path) -> None:
    tree = overlay(tmp_path, {"_version.py": ("'0.32.0'", "'0.99.0'")})
    stock = run("untested", "gemma3n", patched=False)
    patched = run("untested", "gemma3n", patched=True, env={"PYTHONPATH": str(tree)})
    assert_same(stock, patched)
    assert len(patched.active_lines()) == 3
    assert patched.log.count("vllm 0.99.0 is untested; all its seams match") == 1


@pytest.mark.parametrize("version", ["0.32.0.post2", "0.32.0+cpu", "0.32.0+cu130"])
def test_kvcached_193_builds_of_a_tested_release_are_that_release(
    version: str, tmp_path: Path
) -> None:
    tree = overlay(tmp_path, {"_version.py": ("'0.32.0'", f"'{version}'")})
    done = python("-c", PATCHED, PYTHONPATH=str(tree), KVCACHED_PATCH="1")
    assert done.stdout.splitlines()[-1] == OURS
    assert warnings(done.stderr) == []


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.20.2", "no seams are known for this release; expected vllm >=0.22"),
        ("0.28.0", "seam v1-allocate differs"),
        ("nonsense", "vllm version 'nonsense': expected a PEP 440 version"),
    ],
)
def test_other_versions_are_refused(version: str, message: str, tmp_path: Path) -> None:
    tree = overlay(tmp_path, {"_version.py": ("'0.32.0'", f"'{version}'")})
    done = python("-c", IMPORT_TWICE, PYTHONPATH=str(tree), KVCACHED_PATCH="1")
    first, second = [line for line in done.stdout.splitlines() if line.startswith("SeamMismatch|")]
    assert first == second
    assert message in first


def test_a_changed_name_that_is_relied_on_is_refused_too(tmp_path: Path) -> None:
    """A new verb of vLLM's free queue would work on its linked list, past the blocks ours holds."""
    verb = "    def steal(self):\n        return self.fake_free_list_head\n\n    def append("
    tree = overlay(tmp_path, {"v1/core/kv_cache_utils.py": ("    def append(", verb)})
    done = python("-c", IMPORT_TWICE, PYTHONPATH=str(tree), KVCACHED_PATCH="1")
    first, second = [line for line in done.stdout.splitlines() if line.startswith("SeamMismatch|")]
    assert first == second
    assert "FreeKVCacheBlockQueue differs, which is relied on" in first
    assert "found a new method steal" in first


FOREIGN = """
import functools
import vllm.v1.worker.utils as u

original = u.allocate_kv_cache

@functools.wraps(original)
def allocate_kv_cache(*args, **kwargs):
    return original(*args, **kwargs)

u.allocate_kv_cache = allocate_kv_cache
"""


def test_another_tool_on_a_seam_is_named_and_refused(tmp_path: Path) -> None:
    """kvcached and tpu-inference replace such functions; one seam has one owner."""
    (tmp_path / "other_tool.py").write_text(FOREIGN)
    code = (
        "import os, vllm, other_tool\n"
        "os.environ['KVCACHED_PATCH'] = '1'\n"
        "from vllm.plugins import load_general_plugins\n"
        "try:\n    load_general_plugins()\n"
        "except Exception as error:\n    print(type(error).__name__, error, sep='|')\n" + PATCHED
    )
    done = python("-c", code, PYTHONPATH=str(tmp_path))
    *_, refusal = [line for line in done.stdout.splitlines() if line.startswith("SeamMismatch|")]
    assert "seam allocate" in refusal
    assert "wrapped by other_tool" in refusal


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"KVCACHED_PATCH": "yes"}, "KVCACHED_PATCH='yes': bad value; expected one of: 0, off, 1"),
        (
            {"KVCACHED_PATCH": "1", "KVCACHED_PATCH_POOL": "disk"},
            "KVCACHED_PATCH_POOL='disk': bad value; expected one of: auto, host, cuda, static",
        ),
        (
            {"KVCACHED_PATCH": "1", "KVCACHED_PATCH_POOLS": "host"},
            "KVCACHED_PATCH_POOLS='host': unknown variable; expected one of: KVCACHED_PATCH,",
        ),
    ],
)
def test_bad_settings_are_refused_when_vllm_is_imported(
    variables: dict[str, str], message: str
) -> None:
    done = python("-c", IMPORT_TWICE, **variables)
    first, second = [line for line in done.stdout.splitlines() if line.startswith("ConfigError|")]
    assert first == second
    assert message in first
