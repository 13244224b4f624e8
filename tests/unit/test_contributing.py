"""What CONTRIBUTING.md and the pre-commit hooks name is there, and all rooms are on the map."""

from __future__ import annotations

import re

import pytest

from tests.fresh import python
from tests.lanes import LANES, ROOT
from tests.unit.test_imports import ALLOWED

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([^`\n]+)`", TEXT)))
FILES = re.compile(r"[\w.-]+(/[\w.-]*)+|Makefile|\w+\.(md|pth)")
PATHS = [name for name in NAMED if FILES.fullmatch(name)]
MADE_LATER = (".venvs/", "requirements/vllm-X.txt")


def test_every_target_it_names_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"`make ([\w-]+)", TEXT))
    assert len(named) > 8
    assert named <= targets


@pytest.mark.parametrize("path", [path for path in PATHS if not path.startswith(MADE_LATER)])
def test_every_file_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_module_has_its_room() -> None:
    for path in (ROOT / "kvcached_patch").iterdir():
        inside = path.suffix == ".py" or (path / "__init__.py").exists()
        if inside and path.name not in ("__init__.py", "__main__.py", "errors.py"):
            room = path.relative_to(ROOT).as_posix() + ("" if path.suffix else "/")
            assert room in NAMED


def test_every_lane_is_in_the_table() -> None:
    assert sorted(re.findall(r"^\| `(\w+)` \| ", TEXT, re.MULTILINE)) == sorted(LANES)


def test_an_arrow_of_the_drawing_is_an_import_that_is_allowed() -> None:
    arrows = re.findall(r"^    (\w+) --> (\w+)$", TEXT, re.MULTILINE)
    assert len(arrows) > 12
    for importer, imported in arrows:
        of_room = (ALLOWED[name] for name in ALLOWED if name.partition(".")[0] == importer)
        assert imported in {word for words in of_room for word in words.split()}, importer


def test_what_a_release_needs_is_where_it_says() -> None:
    """The names that the five steps tell a reader to change."""
    for path, name in (
        ("tools/wheels.py", "RELEASES = ("),
        ("tools/venv.py", "COMPILED = {"),
        ("Makefile", "MATRIX ?= "),
        ("manifests/seams/vllm.toml", "tested = ["),
    ):
        assert f"\n{name}" in (ROOT / path).read_text(encoding="utf-8")
    shown = python(ROOT / "tools" / "venv.py", "vllm", "--help")
    assert "--freeze" in shown.stdout


def test_the_hooks_are_what_lint_runs() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^lint: dev\n((?:\t.+\n)+)", MAKEFILE, re.MULTILINE)
    lines = [line.strip().replace("$(DEV)", ".venvs/dev") for line in recipe.splitlines()]
    assert re.findall(r"entry: (.+)", hooks) == lines
    assert re.findall(r"repo: (.+)", hooks) == ["local"]
