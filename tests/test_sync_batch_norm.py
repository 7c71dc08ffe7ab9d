"""``nn.SyncBatchNorm`` in the one graph of a model: the numbers are those of BatchNorm over the rows of all ranks."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graph_fsdp

FACTS = Facts(__name__)
GATHER = "torch.ops._c10d_functional.all_gather_into_tensor"
REDUCE = "torch.ops._c10d_functional.all_reduce"


def images() -> nn.Sequential:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(64, 5))


def features(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.ReLU(), nn.Linear(8, 1))


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        linear, norm, relu, head = self

        def first(x: Tensor) -> Tensor:
            return norm(linear(x))  # type: ignore[no-any-return]

        return head(relu(checkpoint(first, x, use_reentrant=False)))  # type: ignore[no-any-return]


class Broken(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        linear, norm, relu, head = self
        x = linear(x)
        torch._dynamo.graph_break()
        return head(relu(norm(x)))  # type: ignore[no-any-return]


def pair(make: Any, kind: Any = nn.Sequential, **options: Any) -> tuple[nn.Module, nn.Module]:
    """The same model for all rows, and sharded."""
    torch.manual_seed(0)
    whole = make()
    return whole, graph_fsdp.compile(
        nn.SyncBatchNorm.convert_sync_batchnorm(kind(*copy.deepcopy(whole))), **{"backend": "eager", **options}
    )


def texts(model: nn.Module) -> tuple[str, str]:
    """The graphs of training."""
    views = graph_fsdp.inspect(model).graphs[0].views
    return views["forward"].stages["free"].body, views["backward"].stages["free"].body


def compare_steps(pair: tuple[nn.Module, nn.Module], rows: list[int], *shape: int, **close: Any) -> None:
    """Ranks have ``rows`` of each batch. Gradients are means over ranks."""
    whole, model = pair
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for step in range(3):
        batch = torch.randn(sum(rows), *shape, generator=torch.Generator().manual_seed(step))
        own = batch.split(rows)[dist.get_rank()]
        whole(batch).square().sum().div(len(batch)).backward()
        model(own).square().sum().div(len(batch)).mul(dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found, expected = model.state_dict(), whole.state_dict()
    for name, value in expected.items():
        mine = found[name].full_tensor() if isinstance(found[name], torch.distributed.tensor.DTensor) else found[name]
        torch.testing.assert_close(mine, value, **close, msg=lambda text, name=name: f"{name}: {text}")


@FACTS
def steps_equal_batch_norm_of_all_rows() -> None:
    models = whole, model = pair(images)
    compare_steps(models, [3, 3], 3, 8, 8)
    batch = torch.ones(2, 3, 8, 8)
    torch.testing.assert_close(model.eval()(batch), whole.eval()(batch))
    forward, backward = texts(models[1])
    assert (forward.count(GATHER), forward.count(REDUCE)) == (2, 0)
    assert (backward.count(GATHER), backward.count(REDUCE)) == (0, 2)


@FACTS.long
def with_inductor() -> None:
    compare_steps(pair(images, backend="inductor"), [3, 3], 3, 8, 8)


@FACTS
def ranks_may_have_other_numbers_of_rows() -> None:
    compare_steps(pair(features), [5, 2], 6)


@FACTS
def and_none() -> None:
    compare_steps(pair(features), [5, 0], 6)


@FACTS
def lengths_may_be_symbolic() -> None:
    models = pair(features, dynamic=True)
    for rows in ([4, 4], [6, 6], [7, 7]):
        compare_steps(models, rows, 6)
    assert len(graph_fsdp.inspect(models[1]).graphs) == 1


@FACTS
def without_weights_and_statistics() -> None:
    compare_steps(pair(functools.partial(features, affine=False)), [4, 4], 6)
    whole, model = pair(functools.partial(features, track_running_stats=False))
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    own = model(batch.chunk(2)[dist.get_rank()])
    torch.testing.assert_close(own, whole(batch).chunk(2)[dist.get_rank()])


@FACTS
def with_frozen_parameters() -> None:
    def make() -> nn.Module:
        model = features()
        model[1].bias.requires_grad_(False)
        return model

    compare_steps(pair(make), [4, 4], 6)


@FACTS
def an_input_without_gradient_needs_no_reduction() -> None:
    models = pair(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1)))
    compare_steps(models, [4, 4], 6)
    assert REDUCE not in texts(models[1])[1]


@FACTS
def a_momentum_of_none_is_the_mean_of_all_steps() -> None:
    compare_steps(pair(functools.partial(features, momentum=None)), [4, 4], 6)


@FACTS
def behind_a_graph_break() -> None:
    compare_steps(pair(features, Broken, fullgraph=False), [4, 4], 6)


@FACTS
def in_a_checkpoint() -> None:
    compare_steps(pair(features, Checkpointed), [4, 4], 6)


@FACTS
def in_bfloat16_statistics_are_in_float32() -> None:
    models = pair(images, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    compare_steps(models, [3, 3], 3, 8, 8, rtol=0.05, atol=0.05)
    assert "bfloat16" in texts(models[1])[0]
    assert models[1].state_dict()["1.running_var"].dtype == torch.float32


test_on_two_ranks = FACTS.on(2)


def test_a_plan_has_it_too() -> None:
    def make() -> nn.Module:
        return nn.SyncBatchNorm.convert_sync_batchnorm(images())

    plan = graph_fsdp.plan(make, (torch.ones(2, 3, 8, 8),), mesh_shape=[8], hardware="h100", backend="eager")
    assert plan.step_seconds > 0


@pytest.mark.parametrize("checkpointing", [None, "unit", "selective", 0.1])
def test_no_collective_is_run_again(fake_group: None, checkpointing: Any) -> None:
    """What is computed again in backward may differ with a rank's number of rows: no gather may be in it."""
    model = graph_fsdp.compile(
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(features(), nn.Linear(1, 6), features())),
        auto_wrap_policy={nn.Sequential},
        activation_checkpointing=checkpointing,
        backend="eager",
    )
    model(torch.randn(4, 6)).sum().backward()
    forward, backward = texts(model)
    assert (forward.count(GATHER), backward.count(GATHER), backward.count(REDUCE)) == (2, 0, 2)


def test_a_call_of_compile_that_fails_changes_no_layer(fake_group: None) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(features())
    with pytest.raises(ValueError, match="reshard_after_forward"):
        graph_fsdp.compile(model, reshard_after_forward=3, backend="eager")
    assert "forward" not in vars(model[1])
