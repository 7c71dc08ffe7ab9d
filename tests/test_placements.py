"""``shard_placement_fn``: parameters sharded on other dimensions than the first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP
from printed import stage_text
from test_bad_input import accept, refuse
from test_train import BF16, check_same, fsdp2, ours, steps_with
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import graph_fsdp
from graph_fsdp import RankDisagreement, UnsupportedError
from graph_fsdp.planning import trace


def last_dimension(p: nn.Parameter) -> Shard | None:
    """Matrices by their columns, all else as without it."""
    return Shard(-1) if p.dim() == 2 else None


# The graphs


@functools.cache
def linear() -> Any:
    return trace(
        lambda: nn.Linear(4, 3, bias=False),
        (torch.ones(5, 4),),
        world_size=2,
        backend="eager",
        shard_placement_fn=last_dimension,
        reshard_after_forward=True,
    )


def test_the_sharded_dimension_is_gathered_first_and_put_back() -> None:
    report = linear().report
    assert_expected_inline(
        stage_text(report.capture, stage="insert_gathers"),
        """\
gather_param(weight, shape=[4, 3], float32, float32)
    movedim(weight), ...
return ...""",
    )
    assert_expected_inline(
        stage_text(report.forward, "permute", "clone"),
        """\
gather_root = all_gather_start([weight], float32, world_size=2, messages=[0, 6])
full_root = all_gather_wait(gather_root)
    permute(weight, [1, 0]), clone(weight, torch.contiguous_format), ...
free(full_root)
return ...""",
    )


def test_the_gradient_is_reduced_with_that_dimension_first() -> None:
    assert_expected_inline(
        stage_text(linear().report.backward, "permute"),
        """\
    ..., permute(mm, [1, 0])
reduce_root = reduce_scatter_start([weight: mm], float32, world_size=2)
reduced_root = reduce_wait(reduce_root)
return weight.grad, ...""",
    )


# Bad input


def test_whole_parameters_are_refused_and_evaluation_gathers(fake_group: Any) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager", shard_placement_fn=last_dimension)
    for call in (model.unshard, lambda: model.set_reshard_after_backward(False)):
        with pytest.raises(UnsupportedError, match="shard_placement_fn shards parameters"):
            call()
    with pytest.raises(UnsupportedError, match="not available on this model"), graph_fsdp.unsharded(model):
        pass
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.randn(8, 16))
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_something_that_is_no_function(fake_group: Any) -> None:
    refuse(MLP(), TypeError, "shard_placement_fn must be a function", "got Shard(", shard_placement_fn=Shard(1))


def test_something_that_is_no_shard(fake_group: Any) -> None:
    for placement in (Replicate(), Partial(), 1, "Shard(1)"):
        words = ("shard_placement_fn returned", "'blocks.0.up.weight'", "return torch.distributed.tensor.Shard(dim)")
        refuse(MLP(), TypeError, *words, shard_placement_fn=lambda p, placement=placement: placement)


def test_a_dimension_that_there_is_not(fake_group: Any) -> None:
    model = MLP()
    words = ("for parameter 'blocks.0.up.bias' of shape (32,)", "which has 1 dimensions", "return one of them")
    refuse(model, ValueError, *words, shard_placement_fn=lambda p: Shard(1))
    refuse(model, ValueError, "has 2 dimensions", shard_placement_fn=lambda p: Shard(-3) if p.dim() == 2 else None)
    accept(model, shard_placement_fn=last_dimension)


def test_columns_that_the_ranks_do_not_divide(fake_group: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 16))
    words = ("for parameter '1.weight' of shape (16, 12)", "12 is not divisible by the 8 ranks", "return Shard(0)")
    refuse(model, ValueError, *words, shard_placement_fn=last_dimension)
    accept(model, shard_placement_fn=lambda p: Shard(1) if p.shape[-1] == 16 and p.dim() == 2 else None)


# Ranks


FACTS = Facts(__name__)

SETTINGS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied weights, kept for backward": ("gpt_tied", 2, {"reshard_after_forward": False}),
    "gathered again in bfloat16": ("mlp", 1, {"reshard_after_forward": True, "mp_policy": BF16}),
}


@FACTS
def steps_equal_fsdp2_bit_for_bit() -> None:
    for setting, (name, steps, options) in SETTINGS.items():
        torch._dynamo.reset()
        theirs, own = (
            steps_with(shard, name, "adamw", 1, steps, {"shard_placement_fn": last_dimension, **options})
            for shard in (fsdp2, ours)
        )
        check_same(own, theirs, setting)


@FACTS
def placements_and_state_dicts_are_those_of_fsdp2() -> None:
    torch.manual_seed(1)
    whole = {name: value.clone() for name, value in MLP().state_dict().items()}
    torch.manual_seed(1)
    theirs = fully_shard(MLP(), shard_placement_fn=last_dimension)
    torch.manual_seed(1)
    model = ours(MLP(), shard_placement_fn=last_dimension)
    model(torch.randn(4, 16)).sum().backward()
    for (name, p), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        assert isinstance(p, DTensor) and isinstance(p.grad, DTensor)
        assert p.placements == p.grad.placements == other.placements == (Shard(p.dim() - 1 if p.dim() == 2 else 0),)
        assert torch.equal(p.to_local(), other.to_local()), name
        assert p.grad.to_local().shape == p.to_local().shape
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        assert all(torch.equal(full[name], value) for name, value in whole.items())
    doubled = {name: 2 * value for name, value in whole.items()}
    set_model_state_dict(model, dict(doubled), options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(p.full_tensor(), doubled[name]) for name, p in model.named_parameters())
    expected = nn.Module.__call__(_loaded(doubled), x := torch.randn(4, 16))
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)


def _loaded(values: dict[str, torch.Tensor]) -> MLP:
    model = MLP()
    model.load_state_dict(values)
    return model


@FACTS
def values_of_the_first_rank_arrive() -> None:
    check_values_of_the_first_rank(MLP)


@FACTS
def shards_of_one_value_arrive() -> None:
    """Such a tensor is contiguous whatever its strides are."""
    check_values_of_the_first_rank(lambda: nn.Linear(2, 1))


def check_values_of_the_first_rank(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(dist.get_rank())
    model = make()
    expected = [p.detach().clone() for p in model.parameters()]
    for value in expected:
        dist.broadcast(value, 0)
    ours(model, shard_placement_fn=last_dimension, sync_module_states=True)
    assert all(torch.equal(p.full_tensor(), value) for p, value in zip(model.parameters(), expected, strict=True))


@FACTS
def a_model_on_the_meta_device_gets_the_same_values() -> None:
    values = []
    for placement_fn in (None, last_dimension):
        torch.manual_seed(3)
        with torch.device("meta"):
            model = MLP()
        ours(model, shard_placement_fn=placement_fn)
        values.append([p.full_tensor() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*values, strict=True))


@FACTS
def replicated_parameters_are_not_sharded_on_any_dimension() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replicate",))
    model = ours(MLP(), mesh=mesh, shard_placement_fn=last_dimension)
    model(torch.randn(4, 16)).sum().backward()
    assert all(p.placements == p.grad.placements == (Replicate(),) for p in model.parameters())


@FACTS
def ranks_that_say_other_dimensions_are_told() -> None:
    dim = dist.get_rank()
    with pytest.raises(RankDisagreement, match="sharded on dimension 1"):
        ours(MLP(), shard_placement_fn=lambda p: Shard(dim) if p.dim() == 2 else None)


test_on_two_ranks = FACTS.on(2)
