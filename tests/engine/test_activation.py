"""The ways to switch on, in every process vLLM makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.fresh import python, run
from tests.parity import OUT
from tools.tiny_model import write_model

ROOT = Path(__file__).resolve().parents[2]
STATE = """
def state():
    import vllm.v1.worker.gpu_model_runner as g, vllm.v1.worker.utils as u
    import vllm.v1.worker.gpu_worker as w
    return [type(f).__name__ for f in (g.allocate_kv_cache, u.allocate_kv_cache,
            vars(w.Worker)["initialize_from_config"])]
"""
OURS = str(["FunctionWrapper"] * 3)
STOCK = str(["function"] * 3)
PLUGINS = "from vllm.plugins import load_general_plugins; load_general_plugins()\n"


def last(done: object) -> str:
    lines = done.stdout.splitlines()  # type: ignore[attr-defined]
    assert lines, done.stderr  # type: ignore[attr-defined]
    return str(lines[-1])


@pytest.mark.parametrize(("value", "expected"), [("1", OURS), ("auto", OURS), ("0", STOCK)])
def test_toggle_in_the_environment(value: str, expected: str) -> None:
    assert last(python("-c", STATE + "print(state())", KVCACHED_PATCH=value)) == expected


def test_toggle_set_in_the_script_before_vllm_loads() -> None:
    code = STATE + "import os; os.environ['KVCACHED_PATCH'] = '1'\nimport vllm\n"
    assert last(python("-c", code + PLUGINS + "print(state())")) == OURS


def test_zero_set_in_the_script_wins_over_the_environment() -> None:
    code = STATE + "import os; os.environ['KVCACHED_PATCH'] = '0'\nprint(state())"
    assert last(python("-c", code, KVCACHED_PATCH="1")) == STOCK


def test_zero_set_after_vllm_was_imported_takes_everything_back() -> None:
    code = STATE + "before = state()\nimport os; os.environ['KVCACHED_PATCH'] = '0'\n"
    done = python("-c", code + PLUGINS + "print(before, state())", KVCACHED_PATCH="1")
    assert last(done) == f"{OURS} {STOCK}"


def test_vllm_ascend_15815_from_imports_taken_before_end_up_patched() -> None:
    code = (
        STATE
        + "import vllm.v1.worker.gpu_model_runner, vllm.v1.worker.gpu.attn_utils as a\n"
        + "import os; os.environ['KVCACHED_PATCH'] = '1'\nbefore = state()\n"
        + PLUGINS
        + "print(before, state(), type(a.allocate_kv_cache).__name__)"
    )
    assert last(python("-c", code)) == f"{STOCK} {OURS} FunctionWrapper"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_vllm_18326_children_are_patched(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        STATE
        + "def child(queue):\n    queue.put(state())\n"
        + "if __name__ == '__main__':\n"
        + "    import multiprocessing, vllm\n"
        + f"    context = multiprocessing.get_context({method!r})\n"
        + "    queue = context.Queue()\n"
        + "    process = context.Process(target=child, args=(queue,))\n"
        + "    process.start()\n    print(queue.get())\n    process.join()\n"
    )
    assert last(python(script, KVCACHED_PATCH="1")) == OURS


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation of the package by ``pip install --target``."""
    folder = tmp_path_factory.mktemp("target")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, ROOT]
    done = run(*pip)
    assert done.returncode == 0, done.stderr
    return folder


def test_installed_with_target_and_pythonpath(target: Path) -> None:
    """No ``.pth`` is read from a directory on PYTHONPATH: vLLM's plugin door is the only one."""
    code = STATE + PLUGINS + "import kvcached_patch\nprint(kvcached_patch.__file__, state())"
    found, _, state = last(
        python("-c", code, KVCACHED_PATCH="1", PYTHONPATH=str(target))
    ).partition(" ")
    assert Path(found).is_relative_to(target)
    assert state == OURS


def test_engine_switched_on_in_the_script(tmp_path: Path) -> None:
    """All three processes of an engine, with the toggle set by the script itself."""
    model = write_model("gemma3n", OUT / "models")
    script = tmp_path / "serve.py"
    script.write_text(
        "import os\nos.environ['KVCACHED_PATCH'] = '1'\n"
        "if __name__ == '__main__':\n"
        "    from vllm import LLM, SamplingParams\n"
        f"    llm = LLM({str(model)!r}, skip_tokenizer_init=True, enforce_eager=True,\n"
        "              max_model_len=128, dtype='float32')\n"
        "    params = SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True)\n"
        "    out = llm.generate([{'prompt_token_ids': [5, 6, 7]}], params)\n"
        "    print('TOKENS', len(out[0].outputs[0].token_ids))\n"
    )
    done = run(sys.executable, script, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    assert "TOKENS 4" in done.stdout, done.stderr[-2000:]
    said = [
        line.split("active: ")[1].split(",")[0]
        for line in (done.stdout + done.stderr).splitlines()
        if "kvcached-patch" in line and "active: " in line
    ]
    assert sorted(said) == ["EngineCore", "front end", "worker"]
