# SPDX-License-Identifier: Apache-2.0
"""What ran on which release of vLLM: read from the matrix lane's results, shown in the README.

    python -m tools.support             show what the results in out/matrix/ say
    python -m tools.support --record    also put them in manifests/matrix.json and the README
    python -m tools.support --check     also end with 1 if the record says something else

A result is pytest's JUnit file of one release, `make matrix-RELEASE` writes it. A test that stands
for a shape of cache says so by `record_property`: `shape` on a whole engine, `driven` where the
release's own classes were called without one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from packaging.version import Version

from kvcached_patch.seams.manifest import covers, load_manifest
from tools.readme import README, ReadmeError, with_part
from tools.wheels import RELEASES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "out" / "matrix"
RECORD = ROOT / "manifests" / "matrix.json"
PART, MAKER = "support", "make support"
ENGINE, DRIVEN = "engine", "classes"
V2 = ", V2 runner"  # how names of caches end that ran on whole engines of that runner
KINDS = {"shape": ENGINE, "driven": DRIVEN}  # by the property's name


class SupportError(Exception):
    """Results or a record that cannot be used: the message names file and fault."""


@dataclass
class Result:
    """One release's run: how many tests, how long (seconds), and what became of each shape.

    shapes: ENGINE; DRIVEN, with why there was no engine if one was asked for; or why neither.
    """

    passed: int
    skipped: int
    failed: int
    seconds: int
    shapes: dict[str, str] = field(default_factory=dict)


def read_result(path: Path) -> Result:
    """Read one JUnit file; raises SupportError if it is none."""
    try:
        suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    except (ElementTree.ParseError, OSError) as error:
        raise SupportError(f"{path}: expected a JUnit file of pytest: {error}") from error
    result = Result(0, 0, 0, round(sum(float(suite.get("time", 0)) for suite in suites)))
    outcomes: dict[str, list[tuple[str, str]]] = {}  # of each cache: ENGINE or DRIVEN, and why not
    for case in (case for suite in suites for case in suite.iter("testcase")):
        skipped = case.find("skipped")
        failed = case.find("failure") is not None or case.find("error") is not None
        result.failed += failed
        result.skipped += skipped is not None
        result.passed += not failed and skipped is None
        why = "" if skipped is None else skipped.get("message", "").rpartition(": ")[2]
        for name, what in _properties(case):
            if name in KINDS:
                kind = KINDS[name]
                outcomes.setdefault(what, []).append((kind, "failed" if failed else why))
    for what, found in outcomes.items():
        done = {kind for kind, problem in found if not problem}
        problems = dict.fromkeys(problem for _, problem in found if problem)
        if "failed" in problems:
            result.shapes[what] = "failed"
        elif ENGINE in done:
            result.shapes[what] = ENGINE
        elif DRIVEN in done:
            engines = [problem for kind, problem in found if kind == ENGINE]
            result.shapes[what] = ": ".join([DRIVEN, *engines])
        else:
            result.shapes[what] = "; ".join(problems)
    return result


def _properties(case: ElementTree.Element) -> Iterator[tuple[str, str]]:
    for each in case.iter("property"):
        yield each.get("name", ""), each.get("value", "")


def results() -> dict[str, Result]:
    """The results that are there, oldest release first."""
    paths = sorted(RESULTS.glob("*.xml"), key=lambda path: Version(path.stem))
    return {path.stem: read_result(path) for path in paths}


def recorded() -> dict[str, Result]:
    """The last recorded result of each release, oldest first; raises SupportError."""
    try:
        return {name: Result(**each) for name, each in json.loads(RECORD.read_text()).items()}
    except (OSError, ValueError, TypeError) as error:
        raise SupportError(f"{RECORD}: {error}; `make support` makes it") from error


def render(record: dict[str, Result]) -> str:
    """The README's tables."""
    manifest = load_manifest("vllm")
    releases = list(map(str, sorted(map(Version, {*RELEASES, *record}))))
    shapes = list(dict.fromkeys(what for each in record.values() for what in each.shapes))
    notes: dict[str, int] = {}
    lines = ["| vLLM | what ran, on a CPU | tests |", "|---|---|---|"]
    for release in releases:
        seams = manifest.seams_in(Version(release))
        if not covers(manifest.supported, Version(release)) or not seams:
            raise SupportError(f"{release}: expected a release that {manifest.package}.toml covers")
        ran = record.get(release)
        if ran is None:
            lines.append(f"| {release} | nothing: its sources match, in {len(seams)} seams | |")
        else:
            counts = f"{ran.passed} passed, {ran.skipped} skipped, {ran.seconds} s"
            v2 = any(what.endswith(V2) for what, how in ran.shapes.items() if how == ENGINE)
            runners = "V1 and V2 runner" if v2 else "V1 runner"
            lines.append(f"| {release} | whole engines, {runners} | {counts} |")
    ran_on = list(record)
    short = [release.removesuffix(".0") for release in ran_on]
    lines += ["", "<details>", "<summary>Which caches ran on which release</summary>", ""]
    lines += [f"| cache | {' | '.join(short)} |", f"|---|{'---|' * len(short)}"]
    for what in shapes:
        cells = [_cell(record[release].shapes.get(what, ""), notes) for release in ran_on]
        lines.append(f"| {what} | {' | '.join(cells)} |")
    lines += [""]
    lines += [f"{n}. {why}" for why, n in notes.items()]
    return "\n".join([*lines, "", "</details>"]) + "\n"


def _cell(outcome: str, notes: dict[str, int]) -> str:
    if outcome in ("", ENGINE, DRIVEN):
        return outcome
    kind, _, why = outcome.partition(": ") if outcome.startswith(DRIVEN) else ("", "", outcome)
    return f"{kind} ({notes.setdefault(why, len(notes) + 1)})".strip()


def readme_with(tables: str, readme: str) -> str:
    """The README's text with these tables; raises ReadmeError if it has no place for them."""
    return with_part(readme, PART, MAKER, tables)


def differences(now: dict[str, Result], record: dict[str, Result]) -> list[str]:
    """What these results say of shapes that the record does not say."""
    found = []
    for release, result in now.items():
        before = record[release].shapes if release in record else {}
        for what in dict.fromkeys([*result.shapes, *before]):
            was, is_now = before.get(what, "nothing"), result.shapes.get(what, "nothing")
            if _what(was) != _what(is_now):
                found.append(f"{release}: {what}: recorded {was!r}; found {is_now!r}")
    return found


def _what(outcome: str) -> str:
    """What became of a shape; not in which words a reason was given when it was recorded."""
    if outcome in ("nothing", "failed", ENGINE):
        return outcome
    return DRIVEN if outcome.startswith(DRIVEN) else "neither"


def show(now: dict[str, Result]) -> None:
    """Print what ran, and how long."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="matrix: what ran on which vLLM")
    for title in ("vLLM", "passed", "skipped", "failed", "seconds", "caches on engines", "driven"):
        table.add_column(title, justify="right")
    for release, each in now.items():
        outcomes = list(each.shapes.values())
        counts = [each.passed, each.skipped, each.failed, each.seconds]
        counts += [outcomes.count(ENGINE), outcomes.count(DRIVEN)]
        table.add_row(release, *map(str, counts))
    Console(width=100, highlight=False).print(table)


def main() -> int:
    """Command line."""
    if sys.argv[1:] not in ([], ["--record"], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        now = results()
        show(now)
        if sys.argv[1:] == ["--record"]:
            record = {**recorded(), **now} if RECORD.exists() else now
            record = {name: record[name] for name in sorted(record, key=Version)}
            if failed := [name for name, each in record.items() if each.failed]:
                raise SupportError(f"tests failed on {', '.join(failed)}: nothing is recorded")
            text = json.dumps({name: asdict(each) for name, each in record.items()}, indent=1)
            RECORD.write_text(text + "\n")
            README.write_text(readme_with(render(record), README.read_text()))
        if sys.argv[1:] == ["--check"]:
            found = differences(now, recorded())
            print(*found, sep="\n")
            return 1 if found else 0
    except (SupportError, ReadmeError) as error:
        print(f"support: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
