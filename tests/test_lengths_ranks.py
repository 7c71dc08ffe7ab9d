"""Ranks whose batches have other lengths start the same collectives, and train as one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp.passes import default_pipeline

FACTS = Facts(__name__)


def trains_as_one_process(model: nn.Module, lengths: list[tuple[int, ...]], width: int, **options: Any) -> None:
    """``lengths``: of each rank's sequences, per step."""
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, backend="eager", **options)
    for step, of_ranks in enumerate(lengths):
        for rank, length in enumerate(of_ranks):
            x = torch.randn(4, length, width, generator=torch.Generator().manual_seed(10 * step + rank))
            (reference(x).square().mean() / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                model(x).square().mean().backward()
    for p, plain in zip(model.parameters(), reference.parameters(), strict=True):
        if not plain.requires_grad:
            continue
        assert p.grad is not None and plain.grad is not None
        grad: Any = p.grad
        torch.testing.assert_close(grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@FACTS
def kernels_that_fuse_elsewhere_leave_the_order_as_it_is_planned() -> None:
    """The first rank reduces behind what its kernels fuse, where the other one has a wait stand earlier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(2)), nn.LayerNorm(32), nn.Linear(32, 50))
    trains_as_one_process(model, [(16, 64), (64, 16), (2, 100)], 32, passes=default_pipeline(bucket="none"))


class Positions(nn.Module):
    """One unit adds them to what others compute: for backward, saving the sum is cheap for a short sequence, and adding
    again for a long one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, width))

    def forward(self, parts: list[Tensor], length: int) -> Tensor:
        total = self.weight[:length]
        for part in parts:
            total = total + part[:, None]
        return F.gelu(total)


class Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 16) for _ in range(6))
        self.positions = Positions(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.positions([part(x[:, 0]) for part in self.parts], x.shape[1])


class Floor(nn.Module):
    """The gradient is that of a value where it is above the floor. For backward, saving the comparison is cheap for a
    short sequence, and comparing again for a long one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, width), requires_grad=False)

    def forward(self, h: Tensor, length: int) -> Tensor:
        return torch.maximum(h[:, None], self.weight[:length])


class Floored(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.linear, self.floor, self.checkpointed = nn.Linear(8, 16), Floor(16), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h, length = self.linear(x[:, 0]), x.shape[1]
        return checkpoint(self.floor, h, length, use_reentrant=False) if self.checkpointed else self.floor(h, length)


@FACTS
def sizes_do_not_decide_what_backward_gathers() -> None:
    """Also where a rank has compiled anew for sizes that change, and in the middle of training."""
    for lengths in ([(64, 2), (2, 64), (7, 7)], [(64, 64), (64, 64), (64, 2)]):
        torch.manual_seed(0)
        policy = {nn.Linear, Positions}
        trains_as_one_process(Added(), lengths, 8, auto_wrap_policy=policy, reshard_after_forward=True)


@FACTS
def what_gradients_compare_with_a_parameter_is_compared_in_backward() -> None:
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = Floored(checkpointed)
        policy = {nn.Linear, Floor}
        trains_as_one_process(model, [(64, 1), (1, 64)], 8, auto_wrap_policy=policy, reshard_after_forward=True)


test_on_two_ranks = FACTS.on(2)


def gathered_in_backward(model: nn.Module, *sizes: int, dynamic: bool | None = None) -> list[list[str]]:
    """Of each graph that is compiled for sequences of these ``sizes``."""
    policy = {nn.Linear, Positions, Floor}
    graph_fsdp.compile(model, backend="eager", auto_wrap_policy=policy, reshard_after_forward=True, dynamic=dynamic)
    for size in sizes:
        model(torch.randn(4, size, 8)).sum().backward()
    graphs = [captured.views["backward"].graph for captured in graph_fsdp.inspect(model).graphs]
    return [[bucket for role, bucket in graph.collectives if "gather" in role] for graph in graphs if graph is not None]


@pytest.mark.usefixtures("fake_group")
def test_a_bucket_that_no_gradient_reads_is_not_gathered_again_for_any_size() -> None:
    assert gathered_in_backward(Added(), 2, 64) == [[], []]
    assert gathered_in_backward(Added(), 64, dynamic=True) == [[]]


@pytest.mark.usefixtures("fake_group")
def test_what_is_computed_for_gradients_alone_is_computed_in_backward() -> None:
    assert gathered_in_backward(Floored(), 1, 64) == [["floor"], ["floor"]]
    assert gathered_in_backward(Floored(checkpointed=True), 1) == [["floor"]]
