"""FSDP2's methods on gradients, on gloo ranks: the same calls on both, and the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from marks import mostly_long, selected
from models import CASES, loss_of
from reference import OPTIMIZERS, RANK_SEED, gradients_of, parameters_of, rows_of
from test_train import check_same, fsdp2, ours
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

ROWS, MICROBATCHES, STEPS = 4, 3, 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)

Calls = Callable[[nn.Module, int], None]  # of a model, before each microbatch


def sync_last(model: nn.Module, microbatch: int) -> None:
    model.set_requires_gradient_sync(microbatch == MICROBATCHES - 1)  # type: ignore[operator]


def replicate_last(model: nn.Module, microbatch: int) -> None:
    model.set_requires_all_reduce(microbatch == MICROBATCHES - 1)  # type: ignore[operator]


def sync_then_replicate(model: nn.Module, microbatch: int) -> None:
    """Kept whole, then over the ranks that shard, then over all."""
    model.set_requires_gradient_sync(microbatch > 0)  # type: ignore[operator]
    if microbatch < 2:
        model.set_requires_all_reduce(False)  # type: ignore[operator]


def every_unit(name: str, *arguments: Any) -> Calls:
    """These methods are for one unit."""

    def call(model: nn.Module, microbatch: int) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                getattr(module, name)(*arguments)

    return call


def some_units(model: nn.Module, microbatch: int) -> None:
    model.blocks[0].set_requires_gradient_sync(microbatch == MICROBATCHES - 1)  # type: ignore[index,union-attr,operator]


def factor_and_sync(model: nn.Module, microbatch: int) -> None:
    every_unit("set_force_sum_reduction_for_comms", True)(model, microbatch)
    every_unit("set_gradient_divide_factor", 3.0)(model, microbatch)
    sync_last(model, microbatch)


def three_under_way_and_a_hook(model: nn.Module, microbatch: int) -> None:
    every_unit("set_all_reduce_hook", halve)(model, microbatch)
    if hasattr(model, "set_reduce_scatter_max_input_buffers"):  # FSDP2 has it since torch 2.13
        model.set_reduce_scatter_max_input_buffers(3)


def own_group_at_times(model: nn.Module, microbatch: int) -> None:
    if hasattr(model, "set_separate_reduce_scatter_group"):  # FSDP2 has it since torch 2.13
        model.set_separate_reduce_scatter_group(microbatch != 1)


def sums_hook_and_own_group(model: nn.Module, microbatch: int) -> None:
    every_unit("set_force_sum_reduction_for_comms", True)(model, microbatch)
    every_unit("set_all_reduce_hook", halve)(model, microbatch)
    own_group_at_times(model, microbatch)


def freeze_last(model: nn.Module, microbatch: int) -> None:
    """What is kept of a parameter is reduced with the others, also where it was frozen before the last microbatch."""
    sync_last(model, microbatch)
    for module in (model.blocks[0], model.blocks[1].up):  # type: ignore[index,union-attr]
        module.requires_grad_(microbatch < MICROBATCHES - 1)  # type: ignore[union-attr]


def halve(reduced: Tensor) -> None:
    reduced.mul_(0.5)


SETTINGS: dict[str, tuple[str, tuple[int, ...], dict[str, Any], Calls]] = {
    "mlp, one reduction": ("mlp", (2,), {}, sync_last),
    "mlp, bfloat16, kept for backward": ("mlp", (2,), {"mp_policy": BF16, "reshard_after_forward": False}, sync_last),
    "reduced in float16": ("one_block", (2,), {"mp_policy": FP16}, sync_last),
    "tied weights": ("gpt_tied", (2,), {}, sync_last),
    "frozen parameters": ("frozen", (2,), {}, sync_last),
    "frozen before the last": ("mlp", (2,), {}, freeze_last),
    "some units": ("mlp", (2,), {}, some_units),
    "sums": ("mlp", (2,), {}, every_unit("set_force_sum_reduction_for_comms", True)),
    "a factor and one reduction": ("one_block", (2,), {}, factor_and_sync),
    "three reductions under way, with a hook": ("mlp", (2,), {}, three_under_way_and_a_hook),
    "a group of reductions": ("mlp", (2,), {}, own_group_at_times),
}
SETTINGS_ON_FOUR: dict[str, tuple[str, tuple[int, ...], dict[str, Any], Calls]] = {
    "one reduction, bfloat16": ("mlp", (2, 2), {"mp_policy": BF16}, sync_last),
    "one all-reduce": ("mlp", (2, 2), {}, replicate_last),
    "whole, then shards": ("one_block", (2, 2), {}, sync_then_replicate),
    "sums, a hook and a group of reductions": ("mlp", (2, 2), {}, sums_hook_and_own_group),
}


def train(shard: Callable[..., nn.Module], name: str, shape: tuple[int, ...], options: Any, calls: Calls) -> Any:
    """Losses, gradients of the last step, and parameters after it."""
    case, rank, world_size = CASES[name], dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])
    model = shard(case.model(), mesh=mesh, **options)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    torch.manual_seed(RANK_SEED + rank)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for microbatch in range(MICROBATCHES):
            calls(model, microbatch)
            batch = case.batch(world_size * ROWS, step * MICROBATCHES + microbatch)
            loss = loss_of(model, rows_of(batch, rank, ROWS))
            loss.backward()
            losses.append(loss.detach())
        gradients = gradients_of(model)
        optimizer.step()
    return {"losses": losses, "gradients": gradients, "parameters": parameters_of(model)}


def compare(which: str, keys: list[str]) -> dict[str, list[Any]]:
    """On a rank: the results of both for each setting."""
    settings = {"two": SETTINGS, "four": SETTINGS_ON_FOUR}[which]
    torch.set_num_threads(1)
    results = {}
    for key in keys:
        torch._dynamo.reset()
        results[key] = [train(shard, *settings[key]) for shard in (fsdp2, ours)]
    return results


@pytest.fixture(scope="module")
def two() -> list[dict[str, list[Any]]]:
    return run_ranks(compare, 2, "two", selected(SETTINGS, __name__, "setting"))


@pytest.fixture(scope="module")
def four() -> list[dict[str, list[Any]]]:
    return run_ranks(compare, 4, "four", selected(SETTINGS_ON_FOUR, __name__, "on_four"))


def check_equal(both: list[dict[str, list[Any]]], setting: str) -> None:
    for results in both:
        theirs, own = results[setting]
        check_same(own, theirs, setting)


SHORT = [
    *("reduced in float16", "frozen parameters", "frozen before the last", "some units", "a factor and one reduction"),
    *("three reductions under way, with a hook", "a group of reductions"),
]


@pytest.mark.parametrize("setting", mostly_long(SETTINGS, SHORT))
def test_two_ranks_equal_fsdp2_bit_for_bit(two: list[dict[str, list[Any]]], setting: str) -> None:
    check_equal(two, setting)


@pytest.mark.parametrize("on_four", mostly_long(SETTINGS_ON_FOUR, ["whole, then shards"]))
def test_replicas_equal_fsdp2_bit_for_bit(four: list[dict[str, list[Any]]], on_four: str) -> None:
    check_equal(four, on_four)
