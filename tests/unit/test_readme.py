"""What the README tells a reader to do works, and what it names is there."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcached_patch import api
from kvcached_patch.cli import main
from kvcached_patch.config import BUDGET, TOGGLE, VARIABLES, load
from kvcached_patch.core.sizes import parse_bytes
from kvcached_patch.engines.vllm_static import ELASTIC_CONNECTORS, STATIC_CONNECTORS
from kvcached_patch.ledger import Ledger, ledger_path
from tests.fresh import run
from tests.lanes import ROOT
from tests.ledgers import TRIM, Engine
from tests.unit.test_wheel import wheel
from tools import readme

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MIB = 2**20

INSTALL = "tests/install/test_install.py::test_each_way_works_and_leaves_no_trace"
SERVE = "tests/engine/test_serve.py::test_each_process_says_one_line"
METRICS = "tests/engine/test_serve.py::test_metrics_say_what_is_held"
DOCTOR = "tests/engine/test_doctor.py::test_active_and_right"
STATIC = "tests/engine/test_doctor_setups.py::test_no_permission_on_the_ledger"
JUDGED = "tests/engine/test_doctor_setups.py::test_unsupported_feature_among_the_arguments"
# Commands that other tests run: by which one, and words of the command that are in its file.
ELSEWHERE = {
    "pip install kvcached-patch": (INSTALL, ("pip(", '"install"')),
    f"{TOGGLE}=1 vllm serve MODEL": (SERVE, (f'"{TOGGLE}": "1"', "Server(")),
    f"{TOGGLE}=1 {BUDGET}=8GiB vllm serve MODEL": (SERVE, (f'"{BUDGET}"', "Server(")),
    "curl -s http://localhost:8000/metrics | grep ^kvcached_patch_": (
        METRICS,
        ("/metrics", "kvcached_patch_"),
    ),
    f"{TOGGLE}=1 kvcached-patch doctor": (DOCTOR, ('"doctor"',)),
    f"{TOGGLE}=1 kvcached-patch doctor --static": (STATIC, ('doctor("--static"',)),
    f"{TOGGLE}=1 kvcached-patch doctor -- MODEL --enable-sleep-mode": (
        JUDGED,
        ('doctor("--"', '"--enable-sleep-mode"'),
    ),
}


def commands() -> list[str]:
    """Every line of the shell, without its comment."""
    lines = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines]


COMMANDS = list(dict.fromkeys(commands()))
TARGETS = sorted({line.removeprefix("make ") for line in COMMANDS if re.match(r"make [a-z]", line)})


def block(kind: str) -> str:
    (text,) = [text for each, text in BLOCKS if each == kind]
    return text


# Commands


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command looks for ledgers: that of a runtime directory of the test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "kvcached-patch"


def on_an_engine(line: str, directory: Path, tmp_path: Path) -> None:
    """`top`, `limit` and `trim`, while an engine called NAME runs."""
    path = ledger_path(directory, "host")
    with Engine(path, "NAME", 3 * MIB, MIB, code=TRIM) as engine:
        engine.ready()
        _, *arguments = shlex.split(line)
        assert main(arguments) == 0


def on_a_wheel(line: str, directory: Path, tmp_path: Path) -> None:
    _, *arguments = shlex.split(line.replace("FILE", str(wheel(tmp_path))))
    assert main(arguments) == 0


def from_installed(line: str, directory: Path, tmp_path: Path) -> None:
    """Pip finds all that the extra asks for: it is in this environment."""
    (extra,) = re.findall(r"\[(\w+)\]", line)
    flags = ("--dry-run", "--no-index", "--no-build-isolation", "--quiet")
    done = run(sys.executable, "-m", "pip", "install", *flags, f"{ROOT}[{extra}]")
    assert done.returncode == 0, done.stderr


def cloned(line: str, directory: Path, tmp_path: Path) -> None:
    """Both lines: a clone, in which the target is known."""
    clone, make = COMMANDS[COMMANDS.index(line) :][:2]
    done = run(*clone.replace("REPOSITORY", str(ROOT)).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(*make.replace("make", "make -n", 1).split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bench.reclaim" in done.stdout


HERE: dict[str, Callable[[str, Path, Path], None]] = {
    "kvcached-patch top --once": on_an_engine,
    "kvcached-patch limit NAME 2GiB": on_an_engine,
    "kvcached-patch limit NAME none": on_an_engine,
    "kvcached-patch limit --total 8GiB": on_an_engine,
    "kvcached-patch trim NAME": on_an_engine,
    "kvcached-patch seams --wheel FILE": on_a_wheel,
    "pip install 'kvcached-patch[cuda]'": from_installed,
    "git clone REPOSITORY kvcached-patch": cloned,
}
WITH_THE_CLONE = "make -C kvcached-patch figure"


def test_every_command_is_run_by_a_test() -> None:
    made = {f"make {target}" for target in TARGETS}
    assert {*ELSEWHERE, *HERE, *made, WITH_THE_CLONE} == set(COMMANDS)


@pytest.mark.parametrize("line", HERE)
def test_a_command_that_is_run_here(line: str, directory: Path, tmp_path: Path) -> None:
    HERE[line](line, directory, tmp_path)


@pytest.mark.parametrize("line", ELSEWHERE)
def test_a_command_that_is_run_elsewhere(line: str) -> None:
    place, words = ELSEWHERE[line]
    path, _, name = place.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_one(target: str) -> None:
    done = run("make", "-n", target, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_targets_and_modules_in_the_text_are_there() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", PROSE)) <= targets
    for module in re.findall(r"`python -m ((?:bench|tools)\.\w+)`", PROSE):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists()


def test_every_command_of_ours_in_the_text_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"`kvcached-patch ([a-z]+)", PROSE))
    assert {"doctor", "limit", "seams"} <= named
    for name in named:
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0


def test_the_api_is_used_as_shown(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = ledger_path(directory, "host")
    with Engine(path, "NAME", 3 * MIB, MIB, code=TRIM) as engine:
        engine.ready()
        exec(compile(block("python"), "README.md", "exec"), {})
        assert capsys.readouterr().out == f"host NAME {3 * MIB}\n"
        (found,) = api.engines()
        assert (found.limit_bytes, found.committed_bytes) == (2 << 30, MIB)
        assert Ledger(path).total == 8 << 30


# Parts that are made, and names


def test_its_tables_are_those_of_the_settings_and_of_what_was_measured() -> None:
    assert readme.made(README) == README, "stale: `make readme` mends it"


def test_pools_keep_programs_flat_and_copy_nothing() -> None:
    for path in readme.RESULTS.glob("scanning-*.json"):
        rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
        pools = [row for row in rows if row["scan"] == "pool"]
        assert {row["layers"] for row in pools} == {8, 32, 64}
        for key in ("seconds", "StableHLO", "temporaries"):
            for model in {row["model"] for row in pools}:
                each = [row[key] for row in pools if row["model"] == model]
                assert max(each) <= 1.15 * min(each), (path.name, model, key)
        assert {(row["copied"], row["donated"]) for row in pools} == {(0, 1.0)}


def test_every_variable_of_ours_that_is_named_is_one() -> None:
    assert set(re.findall(rf"\b{TOGGLE}(?:_[A-Z]+)?\b", README)) == set(VARIABLES)


def test_every_metric_is_named() -> None:
    source = (ROOT / "kvcached_patch/engines/vllm_metrics.py").read_text(encoding="utf-8")
    names = re.findall(r'^    "(\w+)": \($', source, re.MULTILINE)
    counters = {name for name in names if name.startswith(("pages_", "scheduling_"))}
    gauges = {*names} - counters | {*re.findall(r'f?"kvcached_patch_(\w+)",', source)}
    expected = {f"{name}_total" for name in counters} | gauges | {"info"}
    assert set(re.findall(r"`kvcached_patch_(\w+)`", README)) == expected


def test_every_connector_is_named_with_its_reason() -> None:
    rows = re.findall(r"^\| (`\w+?`(?:, `\w+`)*) \| (.+) \|$", README, re.MULTILINE)
    told = {name: why for names, why in rows for name in re.findall(r"\w+", names)}
    assert {name: told.get(name) for name in STATIC_CONNECTORS} == dict(STATIC_CONNECTORS)
    assert all(f"`{name}`" in README for name in ELASTIC_CONNECTORS)


def test_every_file_that_is_named_is_there() -> None:
    """Those of kvcached begin with its own package."""
    roots = "kvcached_patch|tests|tools|bench|manifests|docs"
    named = set(re.findall(rf"`((?:{roots})/[\w./-]+?)(?:::\w+)?/?`", PROSE))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_every_link_leads_somewhere() -> None:
    headings = re.findall(r"^##+ (.+)$", PROSE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    links = re.findall(r"\]\(([^)]+)\)", PROSE)
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= anchors
    files = {link for link in links if not link.startswith(("#", "https://"))}
    assert files
    assert [path for path in files if not (ROOT / path).exists()] == []


def test_the_first_screen_is_one() -> None:
    before, contents, _ = README.partition("\n**Contents.**")
    assert contents
    assert len(before.splitlines()) <= 45


# Containers, of which none is started


def test_the_image() -> None:
    origin, *lines = block("dockerfile").splitlines()
    assert origin.startswith("FROM vllm/vllm-openai:v")
    assert lines == ["RUN pip install 'kvcached-patch[cuda]'", f"ENV {TOGGLE}=1"]


def test_the_pod() -> None:
    """Its variables are ours, and both engines have one ledger and can see each other live."""
    pod = block("yaml")
    containers = pod.partition("\n  volumes:")[0].split("\n    - name: ")[1:]
    assert len(containers) == 2
    for text in containers:
        env = dict(re.findall(r'\{name: ([A-Z_]+), value: "?([^"}]+)"?\}', text))
        assert env.pop("XDG_RUNTIME_DIR") == re.findall(r"mountPath: ([\w/]+)\}", text)[0]
        assert load(env).mode.value == "on"
        assert load(env).budget == (parse_bytes(env[BUDGET]) if BUDGET in env else None)
    assert "\n  shareProcessNamespace: true\n" in pod
    (volume,) = re.findall(r"^  volumes:\n    - name: (\w+)\n      emptyDir: ", pod, re.MULTILINE)
    assert pod.count(f"{{name: {volume}, mountPath: ") == 2
