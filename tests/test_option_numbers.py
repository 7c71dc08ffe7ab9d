"""Options that change the schedule do not change the numbers: bit for bit, on two ranks; some of them on four too."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from marks import mostly_long, selected
from models import MLP
from torch import Tensor, nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp.passes import Hardware, Link, default_pipeline, find_hardware

# A message costs nothing: every parameter has one of its own and lands in place.
CHEAP_MESSAGES = Hardware(
    **{**vars(find_hardware("cpu")), "name": "free messages", "intra": Link(1e9, 0.0), "collective_launch": 0.0}
)

# What is gathered first in backward, and so a block more, is kept; everything is gathered far ahead.
SLOW_LINK = Hardware(**{**vars(find_hardware("h100")), "name": "slow link", "intra": Link(1e7, 0.0)})

OPTIONS = {
    "default": {},
    "ZeRO-3 for every unit": {"reshard_after_forward": True},
    "ZeRO-2, units by size": {
        "reshard_after_forward": False,
        "auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=600),
    },
    "serial": {"passes": default_pipeline(prefetch=0, reductions_in_flight=1)},
    "three ahead": {"passes": default_pipeline(prefetch=3, reductions_in_flight=4)},
    "two buckets' weight gradients delayed": {"passes": default_pipeline(delay_wgrad=2)},
    "a unit per Linear": {"auto_wrap_policy": {nn.Linear}},
    "one unit": {"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={MLP})},
    "dynamic shapes": {"dynamic": True},
    "a bucket per parameter, BACKWARD_POST": {
        "passes": default_pipeline(bucket="none", prefetch=BackwardPrefetch.BACKWARD_POST)
    },
    "buckets of 700 bytes": {"passes": default_pipeline(bucket=700)},
    "buckets of 10,000 bytes": {"passes": default_pipeline(bucket=10_000)},
    "automatic buckets, no backward prefetch, forward prefetch": {
        "passes": default_pipeline(bucket="auto", prefetch=None, forward_prefetch=2)
    },
    "messages of their own": {"passes": default_pipeline(hardware=CHEAP_MESSAGES)},
    "a block more kept on a slow link": {"passes": default_pipeline(hardware=SLOW_LINK)},
    "one message": {"passes": default_pipeline(hardware=CHEAP_MESSAGES, messages="one")},
    "BACKWARD_PRE": {"passes": default_pipeline(prefetch=BackwardPrefetch.BACKWARD_PRE)},
    "two ahead within a budget": {"passes": default_pipeline(prefetch=2, budget=10_000)},
    "automatic within a budget": {"passes": default_pipeline(budget=10_000)},
    "kept within a budget": {"passes": default_pipeline(budget=11_000), "reshard_after_forward": "auto"},
}


IGNORED = {"a parameter": lambda model: [model.head.weight], "a module": lambda model: {model.head}}
SHORT = [
    *("ZeRO-3 for every unit", "ZeRO-2, units by size", "a bucket per parameter, BACKWARD_POST"),
    *("automatic buckets, no backward prefetch, forward prefetch", "two ahead within a budget"),
    *("two buckets' weight gradients delayed", "kept within a budget"),
    "a block more kept on a slow link",
]
# Where sums of more than two numbers, and other rows of shards, could make a difference.
ON_FOUR = ["three ahead", "one unit", "messages of their own"]
ON_TWO = [key for key in OPTIONS if key not in ("default", *ON_FOUR)]


def parameters_after_three_steps(names: list[str]) -> dict[str, dict[str, Tensor]]:
    """On a rank: option → parameters."""
    results = {}
    for key in ["default", *names]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = graph_fsdp.compile(MLP(depth=3), backend="eager", **OPTIONS[key])
        results[key] = _train(model)
    return results


def parameters_of(names: list[str]) -> dict[str, dict[str, Tensor]]:
    """On a rank: option → parameters, with those that are ignored."""
    results = parameters_after_three_steps([name for name in names if name in OPTIONS])
    for name in names:
        if name in IGNORED:
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = MLP(depth=3)
            graph_fsdp.compile(model, backend="eager", ignored_params=IGNORED[name](model))
            results[name] = _train(model)
    return results


def _train(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = {name: p.detach() for name, p in model.named_parameters()}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in values.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(parameters_of, 2, selected([*ON_TWO, *IGNORED], __name__, "option"))


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, dict[str, Tensor]]]:
    return run_ranks(parameters_after_three_steps, 4, ON_FOUR)


# What is reduced together: three or more numbers are summed in an order that depends on where in a message they are.
OTHER_BUCKETS = {"one unit"}


@pytest.mark.parametrize("option", mostly_long(ON_TWO, SHORT))
def test_the_schedule_does_not_change_the_numbers(ranks: list[dict[str, dict[str, Tensor]]], option: str) -> None:
    for results in ranks:
        for name, expected in results["default"].items():
            assert torch.equal(results[option][name], expected), name


@pytest.mark.long
@pytest.mark.parametrize("option", ON_FOUR)
def test_nor_does_it_on_four_ranks(four_ranks: list[dict[str, dict[str, Tensor]]], option: str) -> None:
    for results in four_ranks:
        for name, expected in results["default"].items():
            if option in OTHER_BUCKETS:
                torch.testing.assert_close(results[option][name], expected, rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(results[option][name], expected), name


DIFFERENT = {"a parameter": ["head.weight"], "a module": ["head.weight", "head.bias"]}


@pytest.mark.parametrize("option", mostly_long(IGNORED, ["a module"]))
def test_ignored_parameters_follow_their_own_rank(ranks: list[dict[str, dict[str, Tensor]]], option: str) -> None:
    first, second = (results[option] for results in ranks)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert different == DIFFERENT[option], "each rank has its own gradient of what is ignored"
