"""What a rank's own batch leaves of its memory decides what it spends, and never which collectives it starts."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from models import MLP
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import Link, default_pipeline, find_hardware

MEMORY = 1 << 24
FILLING = 1 << 14  # rows of 16 float32, which blocks of an MLP save several times


def in_flight(shape: tuple[int, ...], filled: int, first: int) -> list[str]:
    """Train three steps from ``first`` on; but for step 0, the batches of rank ``filled`` fill its device. Return what
    is said of the reductions of each graph."""
    torch.manual_seed(0)
    link = Link(1e8, 1e-7)
    hardware = dataclasses.replace(
        find_hardware("cpu"), name="beside", overlaps=True, memory=MEMORY, island=8, intra=link, collective_launch=0.0
    )
    model = MLP(depth=4)
    reference = copy.deepcopy(model)
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    passes = default_pipeline(hardware=hardware)
    graph_fsdp.compile(model, mesh, backend="eager", passes=passes, mp_policy=policy, dynamic=False)
    for step in range(first, first + 3):
        for rank in range(dist.get_world_size()):
            rows = FILLING if rank == filled and step else 4
            x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            (reference(x).square().mean() / dist.get_world_size()).backward()
            if rank == dist.get_rank():
                model(x).square().mean().backward()
    for p, plain in zip(model.parameters(), reference.parameters(), strict=True):
        assert p.grad is not None and plain.grad is not None
        grad: Any = p.grad
        torch.testing.assert_close(grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-6)
    summaries = (captured.stages["backward"]["prefetch"].summary for captured in graph_fsdp.inspect(model).graphs)
    return [str(summary).removeprefix("gathers auto ahead, ") for summary in summaries]


@pytest.mark.parametrize(("shape", "filled", "first"), [((2,), 1, 0), ((2,), 0, 1), ((2, 2), 1, 1)])
def test_ranks_with_and_without_room_train_as_one_process(shape: tuple[int, ...], filled: int, first: int) -> None:
    """Whichever of them decides the order of collectives."""
    said = run_ranks(in_flight, 2 ** len(shape), shape, filled, first)
    many = 2 if len(shape) == 1 else 1  # with replicas, the wait for a reduction starts the next stage
    assert [of_rank[-1] for of_rank in said] == [
        f"at most {1 if rank == filled else many} reductions in flight" for rank in range(2 ** len(shape))
    ]
