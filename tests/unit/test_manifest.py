"""A seam is data: the manifests say exactly what the code does, and are checked."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.version import Version

from kvcached_patch.errors import ConfigError
from kvcached_patch.seams.manifest import (
    Manifest,
    covers,
    load_manifest,
    manifest_dir,
    parse_manifest,
)
from tests.lanes import ROOT

GOOD = """\
[target]
package = "lib"
supported = ">=1,<3"
tested = ["1.0", "2.0"]

[[seam]]
id = "first"
target = "lib.work:Worker.start"
kind = "method"
versions = ">=1"
signature = "(self, plan, *, limit=None)"
process = "worker"
runner = "v1"
wrapper = "ours.engine:start"
why = "because"
remove_when = "never"

[[seam]]
id = "second"
target = "lib.work:allocate"
kind = "function"
versions = ">=2"
signature = "(*args, **kwargs)"
calls = ["torch.zeros", "other"]
importers = [
    { module = "lib.user", versions = ">=2" },
    { module = "lib.later", versions = ">=2.5" },
]
process = "front_end"
runner = "any"
wrapper = "ours.engine:allocate"
why = "because"
remove_when = "never"
"""
USES = """
[[use]]
target = "lib.work:Queue"
versions = ">=1"
has = ["take", "count"]
methods = ["take", "give"]
why = "because"

[[use]]
target = "lib.work:length"
versions = ">=2"
signature = "(queue)"
why = "because"
"""
CLASS, FUNCTION = "test.toml [[use]] 1", "test.toml [[use]] 2"
FIRST, SECOND = "test.toml [[seam]] 1", "test.toml [[seam]] 2"
TARGET = "test.toml [target]"
LATER = f"{SECOND} importers 2"
TEXTS = ("id", "target", "signature", "wrapper", "why", "remove_when")

# (text of GOOD, what replaces it, the words that the error must have)
FAULTS = [
    *((f'{key} = "', f'{key} = 7 # "', [FIRST, key, "7", "expected a str"]) for key in TEXTS),
    *((f"{key} = ", f"x{key} = ", [FIRST, key, "None", "expected a str"]) for key in TEXTS),
    *(
        (f'{key} = "', f'{key} = " " # "', [FIRST, key, "' '", "expected some text"])
        for key in TEXTS
    ),
    ('package = "lib"', "package = true", [TARGET, "package", "True", "expected a str"]),
    ('package = "lib"', 'package = ""', [TARGET, "package", "''", "expected some text"]),
    ('package = "lib"', "", [TARGET, "package", "None", "expected a str"]),
    ('">=1,<3"', '"1 to 3"', [TARGET, "supported", "'1 to 3'", "version range"]),
    ('">=1,<3"', "[1, 3]", [TARGET, "supported", "[1, 3]", "expected a str"]),
    ('["1.0", "2.0"]', '"1.0"', [TARGET, "tested", "'1.0'", "expected a list"]),
    ('["1.0", "2.0"]', "[1.0]", [TARGET, "tested", "[1.0]", "expected a list of strings"]),
    ('tested = ["1.0", "2.0"]', "", [TARGET, "tested", "None", "expected a list"]),
    ('tested = ["', 'testd = 1\ntested = ["', [TARGET, "testd"]),
    ('kind = "method"', 'kind = "class"', [FIRST, "kind", "'class'", "function, method"]),
    ('versions = ">=1"', 'versions = "=1"', [FIRST, "versions", "'=1'", "version range"]),
    ('"worker"', '"wrker"', [FIRST, "process", "'wrker'", "front_end, engine_core, worker"]),
    ('runner = "v1"', 'runner = "V1"', [FIRST, "runner", "'V1'", "v1, v2, any"]),
    ('why = "', 'sinature = ""\nwhy = "', [FIRST, "sinature"]),
    ("lib.work:Worker.start", "lib.work.start", [FIRST, "target", "lib.work.start", "module:name"]),
    ("lib.work:Worker.start", "lib.work:", [FIRST, "target", "'lib.work:'", "module:name"]),
    ("lib.work:Worker.start", "lib.work:start", [FIRST, "target", "lib.work:start", "Class.name"]),
    ("lib.work:allocate", "lib.work:A.b", [SECOND, "target", "lib.work:A.b", "for a function"]),
    ("ours.engine:start", ":start", [FIRST, "wrapper", "':start'", "module:name"]),
    ("(self, plan, *,", "(self plan, *,", [FIRST, "signature", "(self plan, *,", "parameter list"]),
    ("limit=None)", "limit=None, *)", [FIRST, "signature", "limit=None, *)", "parameter list"]),
    ('"torch.zeros", "other"', "1", [SECOND, "calls", "[1]", "expected a list of strings"]),
    ('["torch.zeros", "other"]', "{}", [SECOND, "calls", "{}", "expected a list"]),
    ('module = "lib.later"', "module = 1", [LATER, "module", "1", "expected a str"]),
    ('module = "lib.later", ', "", [LATER, "module", "None", "expected a str"]),
    ('versions = ">=2.5"', 'versions = "2.5"', [LATER, "versions", "'2.5'", "version range"]),
    ('versions = ">=2.5"', 'versions = ">=2.5", x = 1', [LATER, "x"]),
    ('{ module = "lib.later", versions = ">=2.5" }', '"lib.later"', [LATER, "lib.later", "table"]),
    ('id = "second"', 'id = "first"', ["test.toml", "id", "'first'", "expected unique ids"]),
    ("[target]", "target = 1\n[x]", ["test.toml", "target", "1", "expected a dict"]),
    ("[target]", "[targets]", ["test.toml", "targets", "unknown key", "expected only: target"]),
    ("[target]", "[target", ["test.toml", "not TOML", "line 1"]),
    ("lib.work:Queue", "Queue", [CLASS, "target", "'Queue'", "module:name"]),
    ('["take", "count"]', "3", [CLASS, "has", "3", "expected a list"]),
    ('["take", "count"]', "[]", [CLASS, "expected signature, for a function, or has"]),
    ('["take", "give"]', '"give"', [CLASS, "methods", "'give'", "expected a list"]),
    ("(queue)", "queue", [FUNCTION, "signature", "'queue'", "parameter list"]),
    ('signature = "(queue)"', "", [FUNCTION, "expected signature, for a function, or has"]),
    ('"(queue)"', '"(queue)"\nhas = ["a"]', [FUNCTION, "expected signature, for a function"]),
]


@pytest.mark.parametrize(("old", "new", "words"), FAULTS)
def test_an_error_names_source_key_value_and_expectation(
    old: str, new: str, words: list[str]
) -> None:
    assert old in GOOD + USES
    with pytest.raises(ConfigError) as caught:
        parse_manifest((GOOD + USES).replace(old, new, 1), "test.toml")
    message = str(caught.value)
    assert message.startswith(words[0])
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("text", ["seam = 5", "seam = 'x'", "seam = [1]", "[seam]\nid = 'x'"])
def test_seams_that_are_no_array_of_tables_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^test\.toml\b.*seam"):
        parse_manifest(text + "\n" + GOOD.partition("[[seam]]")[0], "test.toml")


def test_a_misspelt_table_is_not_a_seam_less() -> None:
    with pytest.raises(ConfigError, match=r"test\.toml.*seem"):
        parse_manifest(GOOD.replace("[[seam]]", "[[seem]]", 1), "test.toml")


def test_a_manifest_says_which_seams_and_importers_a_release_has() -> None:
    manifest = parse_manifest(GOOD, "test.toml")
    first, second = manifest.seams
    assert (manifest.package, manifest.tested) == ("lib", ("1.0", "2.0"))
    assert (first.module, first.qualname) == ("lib.work", "Worker.start")
    assert (first.calls, first.importers) == ((), ())
    assert second.calls == ("torch.zeros", "other")
    assert manifest.seams_in(Version("1.9")) == (first,)
    assert manifest.seams_in(Version("2.0")) == (first, second)
    assert second.importers_in(Version("2.4")) == ("lib.user",)
    assert second.importers_in(Version("2.5rc1")) == ("lib.user", "lib.later")


def test_a_seam_may_depend_on_a_setting() -> None:
    manifest = parse_manifest(GOOD.replace("[[seam]]", '[[seam]]\nsetting = "A=b"', 1), "test.toml")
    assert [seam.setting for seam in manifest.seams] == ["A=b", ""]
    assert manifest.under(["A=b"]) == manifest
    assert manifest.under(["A=c"]).seams == manifest.seams[1:]


def test_a_manifest_says_what_is_relied_on_besides() -> None:
    manifest = parse_manifest(GOOD + USES, "test.toml")
    queue, length = manifest.uses
    assert (queue.signature, queue.has, queue.methods) == ("", ("take", "count"), ("take", "give"))
    assert (length.signature, length.has, length.methods) == ("(queue)", (), ())
    assert manifest.uses_in(Version("1.9")) == (queue,)
    assert manifest.uses_in(Version("2.0")) == (queue, length)


@pytest.mark.parametrize("name", [path.name for path in (ROOT / "manifests/seams").iterdir()])
def test_each_shipped_manifest_is_right(name: str) -> None:
    manifest = load_manifest(Path(name).stem)
    assert manifest == parse_manifest((ROOT / "manifests/seams" / name).read_text(), name)
    assert manifest.package == Path(name).stem
    assert len({seam.id for seam in manifest.seams}) == len(manifest.seams)
    assert len({(use.target, str(use.versions)) for use in manifest.uses}) == len(manifest.uses)
    for tested in map(Version, manifest.tested):
        assert covers(manifest.supported, tested)
        assert manifest.seams_in(tested)
    for seam in manifest.seams:
        assert seam.module.partition(".")[0] == manifest.package
        assert any(version in seam.versions for version in map(Version, manifest.tested))


def test_the_checkouts_own_manifests_are_read() -> None:
    assert Path(str(manifest_dir())).resolve() == ROOT / "manifests" / "seams"


def shipped() -> list[Manifest]:
    return [load_manifest(path.stem) for path in (ROOT / "manifests/seams").glob("*.toml")]


def wrappers_in(source: str) -> set[str]:
    """Public functions with wrapt's wrapper signature: (wrapped, instance, args, kwargs)."""
    return {
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and len(node.args.args) == 4
        and [node.args.args[i].arg for i in (0, 2, 3)] == ["wrapped", "args", "kwargs"]
    }


def test_code_and_manifests_name_the_same_wrappers() -> None:
    engines = ROOT / "kvcached_patch" / "engines"
    in_code = {
        f"kvcached_patch.engines.{path.stem}:{name}"
        for path in engines.glob("*.py")
        for name in wrappers_in(path.read_text(encoding="utf-8"))
    }
    assert in_code == {seam.wrapper for manifest in shipped() for seam in manifest.seams}


def test_what_our_code_imports_of_vllm_is_in_its_manifest() -> None:
    engines = ROOT / "kvcached_patch" / "engines"
    imported = {
        f"{node.module}:{alias.name}"
        for path in engines.glob("vllm_*.py")
        if path.name != "vllm_probe.py"  # the doctor's, which tells what it cannot import
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm")
        for alias in node.names
    }
    assert imported
    assert imported <= {use.target for use in load_manifest("vllm").uses}
