"""Owners are counted, sharing layers are aliased, and errors name the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_patch.core.layers import LayerPlan, alias_sharing, plan_layers
from kvcached_patch.errors import LayerPlanError

# Gemma 3n in small: layers 3 and 4 read the cache of 2, which lies in another group.
SCHEDULER = [["0", "1"], ["2"]]
SHARING = {"3": "2", "4": "2"}
STORED = [["0", "2"], ["1"]]


@dataclass
class Model:
    """A random model: the scheduler's groups, and the same ones as vLLM's worker extends them."""

    scheduler: list[list[str]]
    worker: list[list[str]]
    stored: list[list[str]]
    sharing: dict[str, str]
    encoder_only: list[str]


@st.composite
def models(draw: st.DrawFn) -> Model:
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    names = draw(st.permutations([f"layer.{i}" for i in range(sum(sizes))]))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    scheduler = [list(names[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    targets = draw(st.lists(st.sampled_from(names), max_size=8)) if names else []
    sharing = {f"sharing.{i}": target for i, target in enumerate(targets)}
    encoder_only = [f"encoder.{i}" for i in range(draw(st.integers(0, 3)))]
    worker = [[*group, *(n for n, t in sharing.items() if t in group)] for group in scheduler]
    if worker and draw(st.booleans()):
        worker[0].extend(encoder_only)  # among the owners
    elif encoder_only:
        worker.append(list(encoder_only))  # a group of its own, as vLLM makes it
    packed = [[n for n in pool if n] for pool in zip_longest(*scheduler)]
    return Model(scheduler, worker, draw(st.permutations(packed)), sharing, encoder_only)


@given(models())
def test_the_extended_worker_view_is_planned_like_the_schedulers(model: Model) -> None:
    before = plan_layers(model.scheduler, model.stored)
    after = plan_layers(
        model.worker,
        model.stored,
        runner_only={*model.sharing, *model.encoder_only},
        sharing=model.sharing,
    )
    assert [list(names) for names in before.owners] == model.scheduler  # order kept
    assert tuple(filter(None, after.owners)) == before.owners
    assert after.pool_count == before.pool_count == max(map(len, model.scheduler), default=0)
    assert (before.aliases, after.aliases) == ({}, model.sharing)


@given(models())
def test_the_v2_runner_needs_no_runner_only_layers(model: Model) -> None:
    plan = plan_layers(model.scheduler, model.stored, sharing=model.sharing)
    assert plan.pool_count == plan_layers(model.scheduler, model.stored).pool_count
    assert plan.aliases == model.sharing


@given(models())
def test_every_sharing_layers_cache_is_its_targets_object(model: Model) -> None:
    caches: dict[str, Any] = {name: [object()] for names in model.scheduler for name in names}
    bound = dict(caches)
    for _ in range(2):  # vLLM aliases again; that changes nothing
        alias_sharing(caches, model.sharing)
        assert caches.keys() == bound.keys() | model.sharing.keys()
        assert all(caches[name] is bound[name] for name in bound)
        assert all(caches[name] is bound[target] for name, target in model.sharing.items())


def test_sharing_names_appended_do_not_count() -> None:
    group = ["0", "1", "2"]
    count = plan_layers([group], [[name] for name in group]).pool_count
    appended = [*group, *SHARING]
    plan = plan_layers([appended], [group], runner_only=set(SHARING), sharing=SHARING)
    assert len(appended) == 5
    assert plan.pool_count == count == 3
    assert plan.owners == (("0", "1", "2"),)


def test_encoder_only_layers_own_nothing_and_alias_nothing() -> None:
    plan = plan_layers([["0", "encoder"]], [["0"]], runner_only=["encoder"])
    assert plan == LayerPlan(owners=(("0",),), aliases={})
    alone = plan_layers([["encoder"]], [], runner_only=["encoder"])
    assert (alone.owners, alone.pool_count) == (((),), 0)


def test_nothing_needs_nothing() -> None:
    assert plan_layers([], []) == LayerPlan(owners=(), aliases={})
    assert plan_layers([], []).pool_count == 0


def test_groups_may_be_iterated_once_and_inputs_stay_as_they_are() -> None:
    groups, sharing = [list(names) for names in SCHEDULER], dict(SHARING)
    plan = plan_layers(iter(groups), iter(STORED), sharing=sharing)
    assert (groups, sharing) == (SCHEDULER, SHARING)
    sharing.clear()
    assert plan.aliases == SHARING


ERRORS = {
    "unknown layer": ([["0", "1", "odd"], ["2"]], STORED, (), SHARING, ["neither", "odd"]),
    "no storage": (SCHEDULER, [["0", "2"]], (), {}, ["neither", "1"]),
    "several": ([["0", "y", "x"]], [["0"]], (), {}, ["neither", "x, y"]),
    "sharing layer with storage": (SCHEDULER, [*STORED, ["3"]], (), SHARING, ["shares", "3"]),
    "encoder with storage": ([["0", "e"]], [["0", "e"]], ("e",), {}, ["needs none", "e"]),
    "storage in no group": (SCHEDULER, [*STORED, ["9"]], (), {}, ["no KV cache group", "9"]),
    "in two groups": ([["0", "1"], ["1"]], [["0"], ["1"]], (), {}, ["more than one", "1"]),
    "twice in a group": ([["0", "0"]], [["0"]], (), {}, ["more than one", "0"]),
    "chain": (SCHEDULER, STORED, (), {"3": "4", "4": "2"}, ["chain", "3 -> 4 -> 2"]),
    "circle": (SCHEDULER, STORED, (), {"3": "4", "4": "3"}, ["3 -> 4 -> 3", "4 -> 3 -> 4"]),
    "itself": (SCHEDULER, STORED, (), {"3": "3"}, ["chain", "3 -> 3 -> 3"]),
    "absent target": (SCHEDULER, STORED, (), {"3": "7"}, ["no cache", "3 -> 7"]),
    "storeless target": ([["0", "e"]], [["0"]], ("e",), {"3": "e"}, ["no cache", "3 -> e"]),
}


@pytest.mark.parametrize("case", ERRORS.values(), ids=ERRORS)
def test_an_error_names_the_layers_and_leaves_nothing_behind(
    case: tuple[list[list[str]], list[list[str]], Sequence[str], Mapping[str, str], list[str]],
) -> None:
    groups, stored, runner_only, sharing, words = case
    with pytest.raises(LayerPlanError) as caught:
        plan_layers(groups, stored, runner_only=runner_only, sharing=sharing)
    assert str(caught.value).startswith("KV cache layers ")
    assert all(word in str(caught.value) for word in words)
    plan = plan_layers(SCHEDULER, STORED, runner_only=SHARING, sharing=SHARING)
    assert plan == LayerPlan(owners=(("0", "1"), ("2",)), aliases=SHARING)


def test_an_unbound_target_changes_no_cache() -> None:
    state = [object(), object()]  # a Mamba layer's cache is a list of states
    caches: dict[str, object] = {"0": state}
    with pytest.raises(LayerPlanError, match="not bound: 3 -> 2"):
        alias_sharing(caches, {"9": "0", "3": "2"})
    assert caches == {"0": state}
    alias_sharing(caches, {"9": "0"})
    assert caches["9"] is caches["0"] is state
