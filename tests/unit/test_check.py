"""The decision for all seams of an installed release, from its sources alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from kvcached_patch.errors import SeamMismatch
from kvcached_patch.seams.check import Verdict, check, locate, read_version
from tests.trees import installed, manifest, seam, use, write

WORK = """\
import torch

class Worker:
    def start(self, plan, *, limit=None):
        return plan

def allocate(plan, device="cpu", /, *rest, layout: int = 1, **options) -> None:
    buffer = torch.zeros(1)
    return helpers.shape(buffer)
"""
START = seam("lib.work:Worker.start", "(self, plan, *, limit=None)")
ALLOCATE = seam(
    signature="(plan, device='cpu', /, *rest, layout=1, **options)",
    calls=["torch.zeros", "helpers.shape"],
    importers=["lib.user", ("lib.later", ">=2")],
)
FILES = {
    "__init__.py": "",
    "work.py": WORK,
    "user.py": "from lib.work import allocate\n",
    "later.py": "from .work import allocate\n",
}


def verdict(tmp_path: Path, version: str = "1.0", **changed: str) -> Verdict:
    files = FILES | {f"{name}.py": text for name, text in changed.items()}
    lib = installed(tmp_path, files, version)
    return check(manifest(START, ALLOCATE, tested=("1.0", "2.0")), lib)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_tree_that_matches(tmp_path: Path, version: str) -> None:
    found = verdict(tmp_path, version)
    assert (found.problem, found.tested, found.seams) == ("", True, (START, ALLOCATE))
    for status in found.statuses:
        assert (status.ok, status.found) == (True, status.expected)


def test_spelling_and_annotations_do_not_matter(tmp_path: Path) -> None:
    work = WORK.replace("(self, plan,", "(\n        self,\n        plan: 'Plan',  # ,\n       ")
    work = work.replace('"cpu"', "'cpu'").replace("layout: int = 1", "layout = 0x1")
    assert verdict(tmp_path, work=work).problem == ""


ANY = "(*args, **kwargs)"


@pytest.mark.parametrize("signature", ["()", "(a, b=1)", "(*a, **b)", ANY])
def test_a_seam_for_any_signature(tmp_path: Path, signature: str) -> None:
    anything = manifest(seam(signature=ANY))
    lib = installed(tmp_path, {"work.py": f"def allocate{signature}: pass"})
    assert check(anything, lib).problem == ""
    lib = installed(tmp_path, {"work.py": ""})
    assert "found no allocate in lib.work" in check(anything, lib).problem


# What changes in work.py: the seam that differs, and what is found there.
CHANGES = {
    "name": (("self, plan", "self, plans"), START, "(self, plans, *, limit=None)"),
    "order": (("self, plan", "plan, self"), START, "(plan, self, *, limit=None)"),
    "one more": (("limit=None)", "limit=None, x)"), START, "(self, plan, *, limit=None, x)"),
    "one less": (("self, plan, *, ", "self, *, "), START, "(self, *, limit=None)"),
    "default": (("limit=None", "limit=0"), START, "(self, plan, *, limit=0)"),
    "no default": (("limit=None", "limit"), START, "(self, plan, *, limit)"),
    "kind": (("*, limit", "limit"), START, "(self, plan, limit=None)"),
    "positional-only": (('"cpu", /,', '"cpu",'), ALLOCATE, "(plan, device='cpu', *rest, layout=1"),
    "no varargs": (("*rest", "*"), ALLOCATE, "device='cpu', /, *, layout=1, **options)"),
    "no keywords": ((", **options", ""), ALLOCATE, "layout=1)"),
    "varargs' name": (("*rest", "*others"), ALLOCATE, "*others,"),
    "async function": (("def allocate", "async def allocate"), ALLOCATE, "async"),
    "async method": (("def start", "async def start"), START, "async"),
    "function renamed": (("def allocate", "def allocated"), ALLOCATE, "no allocate in lib.work"),
    "function nested": (("def allocate", "if x:\n  def allocate"), ALLOCATE, "no allocate in"),
    "method renamed": (("def start", "def begin"), START, "no Worker.start in lib.work"),
    "class renamed": (("class Worker", "class Workers"), START, "no Worker.start in lib.work"),
    "class inherited": (("def start", "x = 1\nclass W(Worker):\n    def start"), START, "no Work"),
    "call renamed": (("torch.zeros", "torch.empty"), ALLOCATE, "no call of torch.zeros in its"),
    "call not made": (("torch.zeros(1)", "torch.zeros"), ALLOCATE, "no call of torch.zeros"),
    "call shortened": (("helpers.shape", "shape"), ALLOCATE, "no call of helpers.shape"),
    "call elsewhere": (
        ("helpers.shape(buffer)", "0\n\ndef other(): helpers.shape(0)"),
        ALLOCATE,
        "no call of helpers.shape",
    ),
    "no Python": (("torch.zeros(1)", "torch.zeros(1"), ALLOCATE, "no allocate in lib.work"),
}


@pytest.mark.parametrize(("change", "differs", "found"), CHANGES.values(), ids=CHANGES)
def test_one_change_refuses_all(
    tmp_path: Path, change: tuple[str, str], differs: object, found: str
) -> None:
    assert change[0] in WORK
    result = verdict(tmp_path, work=WORK.replace(*change))
    (bad,) = [status for status in result.statuses if not status.ok]
    assert bad.seam is differs
    assert found in bad.found
    assert result.problem == (
        f"lib 1.0: seam {bad.seam.id} differs ({bad.seam.target}): "
        f"expected {bad.expected}; found {bad.found}"
    )
    assert "\n" not in result.problem


def test_all_problems_of_all_seams_are_told_at_once(tmp_path: Path) -> None:
    changed = {"user": "import lib.work\n", "later": "", "work": WORK.replace("torch.", "np.")}
    changed["work"] = changed["work"].replace("plan,", "plans,")
    first, second = verdict(tmp_path, "2.0", **changed).problem.splitlines()
    assert first.endswith("; found (self, plans, *, limit=None)")
    for words in ("found (plans, device", "; no call of torch.zeros in its body"):
        assert words in second
    for module in ("lib.user", "lib.later"):
        assert f"; no from-import of it in {module}" in second


QUEUE = """
class Queue:
    size: int

    def __init__(self) -> None:
        self.count = 0

    def take(self):
        def inner(): pass

    async def give(self): pass
"""
USED = {
    "as it is": (("", ""), ""),
    "a method less": (("def take", "def fetch"), "found no take, a new method fetch"),
    "a method more": (("    async", "    def peek(self): pass\n    async"), "a new method peek"),
    "an attribute less": (("self.count =", "count ="), "found no count"),
    "a field less": (("size: int", "pass"), "found no size"),
    "no such class": (("class Queue", "class Queues"), "found none, or several"),
    "two of them": (("class Queue:", "class Queue: pass\nclass Queue:"), "found none, or several"),
}


@pytest.mark.parametrize(("change", "fault"), USED.values(), ids=USED)
def test_a_class_that_is_relied_on(tmp_path: Path, change: tuple[str, str], fault: str) -> None:
    relied = use("lib.queue:Queue", has=("take", "count", "size"), methods=("take", "give"))
    lib = installed(tmp_path, {**FILES, "queue.py": QUEUE.replace(*change)})
    problem = check(manifest(START, uses=(relied,)), lib).problem
    assert bool(problem) is bool(fault)
    if fault:
        assert problem.startswith("lib 1.0: lib.queue:Queue differs, which is relied on: expected ")
        assert problem.endswith(fault)


@pytest.mark.parametrize(
    ("source", "versions", "fault"),
    [
        ("def length(queue):\n    pass\n", "", ""),
        ("def length(queue, unit):\n    pass\n", "", "found (queue, unit)"),
        ("", "", "found nothing"),
        ("", ">=2", ""),
    ],
)
def test_a_function_that_is_relied_on(
    tmp_path: Path, source: str, versions: str, fault: str
) -> None:
    relied = use("lib.queue:length", versions, signature="(queue)")
    lib = installed(tmp_path, {**FILES, "queue.py": source})
    problem = check(manifest(START, uses=(relied,)), lib).problem
    assert bool(problem) is bool(fault)
    assert problem.endswith(fault)


def test_missing_modules(tmp_path: Path) -> None:
    found = check(manifest(START, ALLOCATE), installed(tmp_path, {"user.py": FILES["user.py"]}))
    assert [status.found for status in found.statuses] == [
        "no Worker.start in lib.work",
        "no allocate in lib.work",
    ]
    write(tmp_path / "lib", {"work.py": WORK})
    found = check(manifest(START, ALLOCATE), installed(tmp_path, {}, "2.0"))
    assert found.statuses[1].found.endswith("**options); no from-import of it in lib.later")


def test_an_importer_is_required_only_in_its_range(tmp_path: Path) -> None:
    assert verdict(tmp_path, "1.9", later="").problem == ""
    assert "no from-import of it in lib.later" in verdict(tmp_path, "2.0", later="").problem


# version: the seams it has, whether it is tested; "" where it is refused
VERSIONS = {
    "0.27.9": ("", False),
    "0.28.0": ("old", True),
    "0.28.0+cpu": ("old", True),
    "0.28.0.post1": ("old", True),
    "0.28.0.post1.dev2": ("old", False),
    "0.28.1.dev3+gabc": ("old", False),
    "0.28.9": ("old", False),
    "0.29.0rc1": ("new", False),
    "0.29.0.dev0": ("new", False),
    "0.32.0": ("new", True),
    "0.32.0+cpu": ("new", True),
    "0.32.0rc1": ("new", False),
    "0.32.1": ("new", False),
    "0.99": ("new", False),
    "1.0": ("", False),
    "1.0.dev1": ("", False),
    "1!0.32": ("", False),
}


@pytest.mark.parametrize(("version", "expected"), VERSIONS.items(), ids=VERSIONS)
def test_a_release_has_the_seams_of_its_range(
    tmp_path: Path, version: str, expected: tuple[str, bool]
) -> None:
    ranged = manifest(
        seam("lib.work:old", "()", versions=">=0.28,<0.29"),
        seam("lib.work:new", "()", versions=">=0.29,<1"),
        supported=">=0.28,<1",
        tested=("0.28.0", "0.32.0"),
    )
    work = "def old(): pass\ndef new(): pass\n"
    stated = {"work.py": work, "_version.py": f"__version__ = version = '{version}'\n"}
    root = installed(tmp_path, stated).root
    found = check(ranged, installed(tmp_path, {}, str(read_version("lib", root))))
    assert [s.qualname for s in found.seams] == ([expected[0]] if expected[0] else [])
    assert found.tested is expected[1]
    if not expected[0]:
        assert f"lib {Version(version)}: no seams are known" in found.problem
        assert "expected lib <1,>=0.28" in found.problem


def test_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = manifest(START, ALLOCATE)
    lib = installed(tmp_path, FILES)
    assert check(expected, lib).problem == ""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert check(expected, lib).problem == "lib 1.0: this system is darwin; expected linux"
    assert check(expected, lib, alone=True).problem == "", "a wheel's sources"


def test_a_supported_release_without_any_seam_is_refused(tmp_path: Path) -> None:
    found = check(manifest(seam(versions="<1")), installed(tmp_path, {"work.py": ""}, "1.5"))
    assert "no seams are known" in found.problem


@pytest.mark.parametrize(
    "text",
    [
        '__version__ = version = "1.2.3"',
        "__version__ = '1.2.3'",
        "# v\n__version__: str\nversion: str\n\n__version__ = version = '1.2.3'\nx = (1, 2)\n",
    ],
)
def test_a_tree_states_its_version(tmp_path: Path, text: str) -> None:
    assert read_version("lib", write(tmp_path, {"_version.py": text})) == Version("1.2.3")


@pytest.mark.parametrize("files", [{}, {"_version.py": "version = compute()\n"}])
def test_else_its_distribution_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    metadata = "Metadata-Version: 2.1\nName: kept-lib\nVersion: 3.1.post2\n"
    write(tmp_path / "site", {"kept_lib-3.1.post2.dist-info/METADATA": metadata})
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert read_version("kept-lib", write(tmp_path / "kept_lib", files)) == Version("3.1.post2")


@pytest.mark.parametrize("value", ["dev", "0.28.x", "v?", "unknown"])
def test_no_pep_440_version_is_refused(tmp_path: Path, value: str) -> None:
    write(tmp_path, {"_version.py": f"__version__ = '{value}'\n"})
    with pytest.raises(
        SeamMismatch, match=f"^lib version '{re.escape(value)}': expected a PEP 440"
    ):
        read_version("lib", tmp_path)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SeamMismatch, match=r"^no-such-lib in .*: version unknown; expected"):
        read_version("no-such-lib", tmp_path)


def test_nothing_of_the_target_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boom = "raise RuntimeError('imported')\n"
    files = {name: boom + text for name, text in FILES.items()}
    write(tmp_path / "lib_that_raises", files | {"_version.py": boom + "__version__ = '1.0'\n"})
    monkeypatch.syspath_prepend(tmp_path)
    found = locate("lib_that_raises")
    assert found is not None
    assert (found.root, found.version) == (tmp_path / "lib_that_raises", Version("1.0"))
    verdict = check(manifest(START, ALLOCATE), found)
    assert [status.ok for status in verdict.statuses] == [True, True]
    assert not [name for name in sys.modules if name.startswith("lib_that_raises")]


@pytest.mark.parametrize("name", ["no_such_library", "json.decoder", "sys"])
def test_what_is_no_installed_package_is_not_located(name: str) -> None:
    assert locate(name) is None
