"""Muon on tensor-parallel matrices, whose owners get them whole, steps as one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp import RankDisagreement, UnsupportedError, compat
from graph_fsdp.optimizers import owners
from graph_fsdp.runtime.ranks import agreement

# Rows and columns that two and four ranks do not divide evenly, and fewer of them than ranks.
SIZES = ((33, 20), (20, 33), (16, 16), (64, 3), (3, 64), (2, 48), (24, 24), (17, 17))
STYLES: tuple[type[ParallelStyle] | None, ...] = (ColwiseParallel, RowwiseParallel, None)
STEPS = 3


class Net(nn.Module):
    """Each size three times: divided by rows, by columns, and not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        linear = [nn.Linear(columns, rows, bias=False) for rows, columns in SIZES for _ in STYLES]
        self.layers = nn.ModuleList(linear)

    def plan(self) -> dict[str, ParallelStyle]:
        styles = STYLES * len(SIZES)
        return {f"layers.{i}": style() for i, style in enumerate(styles) if style is not None}


def part_of(whole: Tensor, p: Any) -> Tensor:
    """This rank's part of a tensor that is placed as ``p``."""
    for dim, (size, begin) in enumerate(zip(*compat.local_shape_and_offset(p), strict=True)):
        whole = whole.narrow(dim, min(begin, whole.shape[dim]), size)
    return whole


def made(params: Any) -> optim.Optimizer:
    first, *others = params
    groups = [{"params": [first], "lr": 0.1, "nesterov": False, "weight_decay": 0.0}, {"params": others}]
    return optim.Muon(groups, lr=0.02)


def gradients_of(step: int, without: int | None) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(step)
    found = [torch.randn(p.shape, generator=generator) for p in Net().parameters()]
    return [None if step == 1 and i == without else gradient for i, gradient in enumerate(found)]


def compiled(mesh: DeviceMesh, **options: Any) -> nn.Module:
    """On the dimensions of a mesh but its last, "tp"."""
    model, names = Net(), mesh.mesh_dim_names
    assert names is not None
    parallelize_module(model, mesh["tp"], model.plan())
    rest = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    return graph_fsdp.compile(model, rest, backend="eager", **options)


def agree_with_one_process(model: nn.Module, without: int | None = None) -> None:
    expected = Net()
    optimizer, other = graph_fsdp.distribute_optimizer(made(model.parameters())), made(expected.parameters())
    for step in range(STEPS):
        for p, q, gradient in zip(model.parameters(), expected.parameters(), gradients_of(step, without), strict=True):
            q.grad = gradient
            p.grad = None if gradient is None else compat.make_dtensor(part_of(gradient, p).clone(), p)
        for each in (optimizer, other):
            each.step()
            each.zero_grad()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(compat.local_part(p), part_of(q, p), rtol=1e-6, atol=1e-6)
        momentum, reference = (o.state[x]["momentum_buffer"] for o, x in ((optimizer, p), (other, q)))
        assert isinstance(momentum, DTensor) and isinstance(p, DTensor) and momentum.placements == p.placements
        torch.testing.assert_close(compat.local_part(momentum), part_of(reference, p), rtol=1e-6, atol=1e-6)


def on_a_mesh(*shape: int) -> None:
    torch.set_num_threads(1)
    agree_with_one_process(compiled(init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))), without=4)


def on_four_ranks() -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    agree_with_one_process(compiled(mesh), without=4)
    agree_with_one_process(compiled(mesh, shard_placement_fn=columns))
    owners.BUCKET_NBYTES = 1  # several buckets, of which some are under way at once
    agree_with_one_process(compiled(mesh))


def columns(p: nn.Parameter) -> Shard | None:
    whole_columns = p.shape[1] % 4 == 0
    return Shard(1) if whole_columns else None


def on_eight_ranks() -> None:
    """Replicas of ranks that divide matrices in two ways: each steps by itself."""
    torch.set_num_threads(1)
    names = ("dp_replicate", "dp_shard", "tp")
    agree_with_one_process(compiled(init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)), without=0)


def one_rank_without_a_gradient() -> None:
    """It is a tensor-parallel neighbour of the first rank: ranks of FSDP alone would not see it."""
    torch.set_num_threads(1)
    agreement.PATIENCE_SECONDS = 0.3
    model = compiled(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    optimizer = graph_fsdp.distribute_optimizer(made(model.parameters()))
    for i, (p, gradient) in enumerate(zip(model.parameters(), gradients_of(0, None), strict=True)):
        assert gradient is not None
        without = i == 0 and dist.get_rank() == 1
        p.grad = None if without else compat.make_dtensor(part_of(gradient, p).clone(), p)
    with pytest.raises(RankDisagreement, match=r"step exchange of an optimizer"):
        optimizer.step()


def test_ranks_that_step_other_matrices_are_told() -> None:
    run_ranks(one_rank_without_a_gradient, 4)


def test_matrices_of_three_dimensions_are_refused_by_name(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "a", "b"))
    model = nn.Linear(16, 16, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["a", "b"], [Shard(0), Shard(1)]))
    graph_fsdp.compile(model, mesh["dp"], backend="eager")
    with pytest.raises(UnsupportedError, match=r"optimizer: parameter 'weight' is placed as .* one or two dimensions"):
        graph_fsdp.distribute_optimizer(optim.Muon(model.parameters(), lr=0.02))


def test_matrices_of_two_dimensions_are_stepped_as_in_one_process() -> None:
    run_ranks(on_four_ranks, 4)


@pytest.mark.parametrize("shape", [(1, 4), (4, 1)])
def test_a_dimension_of_one_rank(shape: tuple[int, ...]) -> None:
    run_ranks(on_a_mesh, 4, *shape)


def test_beside_replicas() -> None:
    run_ranks(on_eight_ranks, 8)
