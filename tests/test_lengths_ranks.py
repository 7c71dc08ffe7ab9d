"""Ranks whose batches have other lengths start the same collectives, and train as one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts
from torch import Tensor, nn

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
    """The first rank reduces behind what its kernels fuse; the other one's cost model has a wait come earlier."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), *(Block(32) for _ in range(2)), nn.LayerNorm(32), nn.Linear(32, 50))
    trains_as_one_process(model, [(16, 64), (64, 16), (2, 100)], 32, passes=default_pipeline(bucket="none"))


test_on_two_ranks = FACTS.on(2)
