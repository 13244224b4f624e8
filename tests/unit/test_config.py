"""Every variable takes what is allowed and refuses the rest by name."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator, Mapping

import pytest

from kvcached_patch.config import (
    BUDGET,
    LIMIT,
    POOL,
    POOL_KINDS,
    RETAIN,
    RETAIN_FORMS,
    SCAN,
    SCAN_KINDS,
    SIZE_FORMS,
    TOGGLE,
    VARIABLES,
    Config,
    Mode,
    load,
    raw,
)
from kvcached_patch.config import parse_switch as parse
from kvcached_patch.errors import ConfigError
from tests.lanes import ROOT

WORDS = {"": "off", "0": "off", "off": "off", "1": "on", "on": "on", "auto": "auto"}
SWITCH = ("0", "off", "1", "on", "auto")
# Per variable: what is allowed, and one bad value of every kind.
BAD = {
    TOGGLE: (
        SWITCH,
        ["2", "-1", "01", "0.0", "true", "yes", "no", "o n", "on,auto", "ÖN"],
    ),
    RETAIN: (
        RETAIN_FORMS,
        ["1GB", "-1", "60sec", "1d", "all,none", "s", "nan s", "1e3", "60 s 5", "auto", "²s"],
    ),
    LIMIT: (SIZE_FORMS, ["0", "0B", "1GB", "-1", "none", "60s", "2 GiB 1", "1e9"]),
    BUDGET: (SIZE_FORMS, ["0", "0KiB", "1GB", "-1", "all", "60s", "GiB"]),
    SCAN: (SCAN_KINDS, ["1", "on", "pools", "layer", "unrolled"]),
    POOL: (POOL_KINDS, ["1", "on", "hosts", "host,static", "ho st", "gpu", "ÄUTO", "'host'"]),
}


class OnlyToggle(Mapping[str, str]):
    """An environment in which looking at anything but the toggle is an error."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __getitem__(self, name: str) -> str:
        assert name == TOGGLE
        return self.value

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("listed the environment")

    def __len__(self) -> int:
        raise AssertionError("counted the environment")


def refused(env: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> None:
    """The one error names the variable, its value as it stands and each allowed value."""
    with pytest.raises(ConfigError) as caught:
        load(env)
    message = str(caught.value)
    assert message.startswith(f"{name}={env[name]!r}: ")
    assert message.endswith(f"expected one of: {', '.join(allowed)}")


def spellings(word: str) -> list[str]:
    return [word, word.upper(), word.title(), f"  {word}", f"{word}\n", f"\t{word} "]


@pytest.mark.parametrize(
    ("value", "mode"), [(text, mode) for word, mode in WORDS.items() for text in spellings(word)]
)
def test_the_toggle_ignores_case_and_surrounding_space(value: str, mode: str) -> None:
    assert load({TOGGLE: value}).mode is Mode(mode)


def test_unset_is_off() -> None:
    assert load({}) == Config(mode=Mode.OFF, pool="auto")


@pytest.mark.parametrize("value", [text for kind in POOL_KINDS for text in spellings(kind)])
def test_the_pool_ignores_case_and_surrounding_space(value: str) -> None:
    assert load({TOGGLE: "1", POOL: value}).pool == value.strip().lower()


@pytest.mark.parametrize("empty", [{}, {POOL: ""}, {POOL: " \t"}])
def test_an_empty_pool_is_an_unset_one(empty: dict[str, str]) -> None:
    assert load({TOGGLE: "on"} | empty) == Config(mode=Mode.ON, pool="auto")


def test_every_variable_has_its_bad_values() -> None:
    assert BAD.keys() == set(VARIABLES)


@pytest.mark.parametrize("mode", ["1", "auto"])
@pytest.mark.parametrize(("name", "value"), [(name, bad) for name in BAD for bad in BAD[name][1]])
def test_a_bad_value_is_refused(name: str, value: str, mode: str) -> None:
    refused({TOGGLE: mode} | {name: value}, name, BAD[name][0])


@pytest.mark.parametrize("name", ["KVCACHED_PATCH_", "KVCACHED_PATCH_POLL", "KVCACHED_PATCH_pool"])
def test_a_misspelt_variable_is_refused(name: str) -> None:
    refused({TOGGLE: "auto", name: "host"}, name, VARIABLES)


def test_other_peoples_variables_are_left_alone() -> None:
    env = {TOGGLE: "1", "KVCACHED_PATCHED": "x", "KVCACHED": "x", "MY_KVCACHED_PATCH_POLL": "x"}
    assert load(env) == Config(mode=Mode.ON)


@pytest.mark.parametrize("value", ["", " ", "0", "off", " OFF "])
def test_when_off_nothing_else_is_looked_at(value: str) -> None:
    assert load(OnlyToggle(value)) == Config()
    assert load({TOGGLE: value, POOL: "nonsense", "KVCACHED_PATCH_POLL": "x"}) == Config()


def test_a_plain_switch_has_no_auto() -> None:
    with pytest.raises(ConfigError, match=r"^NAME='auto': .*: 0, off, 1, on$"):
        parse("NAME", "auto")
    assert parse("NAME", "on") is Mode.ON


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(TOGGLE)]:
        monkeypatch.delenv(name)
    assert (load(), raw(TOGGLE)) == (Config(), None)
    monkeypatch.setenv(TOGGLE, " AUTO")
    monkeypatch.setenv(POOL, "static")
    assert load() == Config(mode=Mode.AUTO, pool="static")
    assert (raw(TOGGLE), raw(POOL), raw(TOGGLE, {})) == (" AUTO", "static", None)


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().pool = "host"  # type: ignore[misc]


def readers_of_the_environment(source: str) -> set[str]:
    """The ways in which a module reads or writes the environment."""
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
    return found & names


def test_config_is_the_only_reader_of_the_environment() -> None:
    package = ROOT / "kvcached_patch"
    readers = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if readers_of_the_environment(path.read_text(encoding="utf-8"))
    }
    assert readers == {"config.py"}
