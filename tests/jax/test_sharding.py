"""Each cache leaves a step with the sharding it came in with, on whichever tpu-inference."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from packaging.version import Version
from wrapt import FunctionWrapper

from kvcached_patch.engines.tpu_inference import get_flax_model
from kvcached_patch.seams.apply import armed
from tools.maxtext.models import Model
from tools.maxtext.served import mesh, vllm_config

ALREADY_RIGHT = Version(version("tpu-inference")) >= Version("0.30")
ARCHITECTURE = "CountingForCausalLM"


class Counting(nnx.Module):
    """A model that adds one to whatever caches it is given."""

    _self_manages_sharding = True

    def __init__(self, vllm_config: Any, rng_key: Any, mesh: Any) -> None:
        self.one = nnx.Param(jnp.ones(()))

    def __call__(self, kv_caches: Any, input_ids: Any, attention_metadata: Any, *_: Any) -> Any:
        updated = jax.tree.map(lambda cache: cache + self.one.get_value(), kv_caches)
        return updated, jnp.zeros((input_ids.shape[0], 8)), [], None

    def compute_logits(self, hidden_states: Any) -> Any:
        """VLLM wants it of a model that generates."""


def caches(on: Any) -> list[Any]:
    """A conv and an SSM state as the manager shards them, an attention cache, a replicated one."""
    head = ("model", "expert")
    specs = [PartitionSpec(None, None, head), PartitionSpec(None, head)]
    conv, ssm = (jax.device_put(jnp.zeros((4, 2, 8)), NamedSharding(on, s)) for s in specs)
    attention = PartitionSpec(None, None, head)
    return [
        (conv, ssm),
        jax.device_put(jnp.zeros((4, 8, 4, 1, 128)), NamedSharding(on, attention)),
        jax.device_put(jnp.zeros((4, 8, 4)), NamedSharding(on, PartitionSpec())),
    ]


def same_shardings(interface: Any, on: Any, *arguments: Any) -> list[bool]:
    """Of each leaf, after two steps on two devices."""
    given = caches(on)
    before = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(given)]
    ids = jnp.zeros(4, jnp.int32)
    for _ in range(2):
        held = given
        given, *_ = interface.model_fn(
            interface.state_leaves, held, ids, *arguments, shared_attention_metadata=1
        )
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))
    leaves = jax.tree.leaves(given)
    assert all(bool(jnp.all(leaf == 2)) for leaf in leaves)
    return [
        leaf.sharding.is_equivalent_to(sharding, len(shape))
        for leaf, (shape, sharding) in zip(leaves, before, strict=True)
    ]


MAIN = (None, None, jnp.zeros(4, jnp.int32), (("layer.0", 0),), None, None, True, True)
DRAFT = (jnp.zeros((4, 8)), None, (("layer.0", 0),))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.skipif(not ALREADY_RIGHT, reason="too old for the vLLM that is installed here")
def test_a_tpu_inference_that_is_right_keeps_each_sharding() -> None:
    from tpu_inference.models.common import model_loader

    model_loader.register_model(ARCHITECTURE, Counting)
    on = mesh(devices=2)
    config = vllm_config(Model("", 2, hf={"architectures": [ARCHITECTURE]}), devices=2)
    interface = model_loader.get_model(config, jax.random.key(0), on)
    assert same_shardings(interface, on, *MAIN) == [True] * 4


def loaded(vllm_config: Any, rng: Any, mesh: Any, is_draft_model: bool = False) -> Any:
    """What ``get_flax_model`` returns before 0.30, whose one sharding has no place for `conv`."""
    from tpu_inference.models.common.interface import ModelInterface

    model = Counting(vllm_config, rng, mesh)
    model.step_fn_no_options = None
    _, state = nnx.split(model)
    given = dict.fromkeys(field.name for field in dataclasses.fields(ModelInterface))
    return ModelInterface(
        **given | {"model": model, "state": state, "state_leaves": tuple(jax.tree.leaves(state))}
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("draft", "arguments"), [(False, MAIN), (True, DRAFT)])
def test_our_step_functions_keep_each_sharding(draft: bool, arguments: tuple[Any, ...]) -> None:
    on = mesh(devices=2)
    interface = get_flax_model(loaded, None, (None, None, on), {"is_draft_model": draft})
    assert same_shardings(interface, on, *arguments) == [True] * 4
    step = interface.model.step_fn_no_options
    fused = jax.jit(lambda held: step(interface.state_leaves, held, MAIN[2], *arguments)[0])
    assert jax.tree.structure(fused(caches(on))) == jax.tree.structure(caches(on))


def test_only_a_tpu_inference_that_is_not_right_is_patched() -> None:
    from tpu_inference.models.common import model_loader

    ours = [e for e in armed() if e.package == "tpu_inference" and not e.seam.setting]
    assert [entry.applied for entry in ours] == [True] * (not ALREADY_RIGHT)
    assert isinstance(model_loader.get_flax_model, FunctionWrapper) is not ALREADY_RIGHT
