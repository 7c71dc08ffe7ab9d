"""Tensor parallelism beside meshes that replicate, and parameters resharded to smaller groups, on four ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from facts import Facts, shared_folder
from reference import check_close, fsdp2, gradients_of, parameters_of, whole
from tensor_parallel import Transformer, batch, ours, train, with_matrices, with_sequences
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graph_fsdp
from graph_fsdp import ParameterChangedError, checkpoint
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)


@FACTS
def two_replicas_of_tensor_parallel_ranks_equal_one_process() -> None:
    """Every rank holds its part of each matrix whole; gradients are all-reduced over the replicas."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = ours(with_matrices(Transformer(attention=False), mesh["tp"]), mesh)
    found = train(model, "sgd", 2, mesh["dp_replicate"].get_local_rank(), 2)
    expected = train(Transformer(attention=False), "sgd", 2)
    for kind in ("gradients", "parameters"):
        check_close(found[kind], expected[kind], 1e-4, kind)
    counts = engine_of(model).counter.collectives
    assert "all_gather" not in counts and counts["reduce"] > 0


@FACTS
def resharded_to_pairs_of_ranks_equal_one_process() -> None:
    """Backward gathers from two ranks what forward gathered from four."""
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    model = ours(with_sequences(Transformer(attention=False), mesh["tp"]), mesh["dp"], reshard_after_forward=2)
    found = train(model, "sgd", 2, mesh["dp"].get_local_rank(), 4)
    expected = train(Transformer(attention=False), "sgd", 2)
    for kind in ("gradients", "parameters"):
        check_close(found[kind], expected[kind], 1e-4, kind)
    assert "keep_shard" in graph_fsdp.inspect(model).forward.stages["free"].body


@FACTS
def whole_units_equal_fsdp2_bit_for_bit() -> None:
    """Rows that the ranks cannot divide equally, gathered by ``unshard()`` and kept over two backwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found, gathers = [], []
    for shard in (fsdp2, ours):
        model = shard(Uneven(mesh["tp"]), mesh=mesh["dp"])
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for step in range(2):
            for unit in units:
                unit.unshard() if step else unit.set_reshard_after_backward(False)
            for microbatch in range(2 - step):
                model(rows_for(mesh["dp"].get_local_rank(), microbatch)).square().mean().backward()
                for unit in units:
                    unit.set_reshard_after_backward(True)
            if shard is ours:
                gathers.append(engine_of(model).counter.collectives["all_gather"])
        found.append(gradients_of(model))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())
    buckets = len(engine_of(model).spec.buckets)
    assert gathers == [buckets, 2 * buckets]


@FACTS
def a_block_sees_and_writes_whole_parameters() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    one = Uneven(None)
    model = ours(Uneven(mesh["tp"]), mesh["dp"])
    x = rows_for(0, 0)
    with graph_fsdp.unsharded(model), torch.no_grad():
        check_close({k: whole(v) for k, v in model.state_dict().items()}, one.state_dict(), 0.0, "in the block")
        assert model.blocks[0].up.weight.placements == (Shard(0),)
        for p in (*model.parameters(), *one.parameters()):
            p.mul_(2)
        torch.testing.assert_close(model.blocks[0](x), one.blocks[0](x))
        torch.testing.assert_close(model(x), one(x))
    check_close(parameters_of(model), one.state_dict(), 0.0, "after it")
    model.blocks[0].unshard()
    model.blocks[0].up.weight = nn.Parameter(torch.ones(4, 10))
    with pytest.raises(ParameterChangedError, match=r"a DTensor over its tensor-parallel ranks of shape \([34], 10\)"):
        model(x)


@FACTS
def a_scaler_skips_a_step_on_all_ranks_or_none() -> None:
    """The ranks of the first parameter are not all that the matrices' gradients lie on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = ours(with_matrices(Transformer(attention=False), mesh["tp"]), mesh["dp"])
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for infinite, scale in ((True, 512.0), (False, 512.0)):
        before = parameters_of(model)
        optimizer.zero_grad()
        scaler.scale(model(batch(0, mesh["dp"].get_local_rank(), 2)[:, :-1]).square().mean()).backward()
        if infinite and dist.get_rank() == 3:
            model.blocks[0].mlp.up.weight.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(model).items()) is infinite


@FACTS
def ranks_that_share_no_mesh_save_and_load_together() -> None:
    """Rank 0 has meshes with ranks 1 and 2, and rank 3 with these: no rank knows all of them."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "ep"))
    model, path = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), shared_folder() / "one"
    for layer, dimension in zip(model, ("tp", "ep"), strict=True):
        parallelize_module(layer, mesh[dimension], ColwiseParallel())
    ours(model, mesh["dp"])
    saved = parameters_of(model)
    checkpoint.save(path, model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    checkpoint.load(path, model)
    assert all(torch.equal(value, saved[name]) for name, value in parameters_of(model).items())


class Uneven(nn.Module):
    """Two blocks of 10 → 7 → 10, divided over ``mesh``."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential() for _ in range(2))
        for block in self.blocks:
            block.up, block.act, block.down = nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 10)
            if mesh is not None:
                parallelize_module(
                    block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
                )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows_for(rank: int, microbatch: int) -> Tensor:
    return torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * microbatch + rank))


test_on_four_ranks = FACTS.on(4)
