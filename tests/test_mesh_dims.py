"""``dp_mesh_dims``: which dimensions of a mesh shard and which replicate, and context parallelism on one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts
from printed import calls
from reference import check_close, gradients_of, parameters_of
from test_bad_input import MLP, batch, refuse
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel

import graph_fsdp
from graph_fsdp import MeshError, UnsupportedError
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
WIDTH, LENGTH, ROWS = 16, 8, 4


@dataclass(frozen=True)
class Dims:
    """As torch's ``DataParallelMeshDims``, which torch 2.9 lacks."""

    shard: Any = None
    replicate: Any = None


@pytest.mark.parametrize(
    ("dims", "groups"),
    [
        (Dims("a"), (2, 1)),
        (Dims(("b", "c")), (4, 1)),
        (Dims(("b", "c"), "a"), (4, 2)),
        (Dims("c", ("a", "b")), (2, 4)),
        (Dims(None, "b"), (1, 2)),
    ],
)
def test_named_dimensions_shard_and_replicate(fake_group: None, dims: Dims, groups: tuple[int, int]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    model = graph_fsdp.compile(MLP(), mesh, dp_mesh_dims=dims, backend="eager")
    spec = engine_of(model).spec
    assert (spec.mesh.world_size, spec.mesh.replicas) == groups
    model(batch()).sum().backward()
    gathers = calls(graph_fsdp.inspect(model).forward, "all_gather_start")
    assert (f"world_size={groups[0]}" in gathers) == (groups[0] > 1)


def test_what_dimensions_cannot_be(fake_group: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    refuse(MLP(), MeshError, "the dimension 'x', which mesh lacks", mesh=mesh, dp_mesh_dims=Dims("x"))
    refuse(MLP(), MeshError, "names one dimension twice", mesh=mesh, dp_mesh_dims=Dims("a", "a"))
    refuse(MLP(), TypeError, "must be a torch.distributed.fsdp.DataParallelMeshDims", mesh=mesh, dp_mesh_dims="a")
    refuse(MLP(), ValueError, "there is none; pass mesh=", dp_mesh_dims=Dims("a"))
    refuse(MLP(), UnsupportedError, "dp_mesh_dims", mesh=mesh, dp_mesh_dims=Dims("a"), backend="xla")


# Context parallelism


def whole(part: Tensor, mesh: DeviceMesh) -> Tensor:
    gathered = DTensor.from_local(part, mesh, [Shard(1)]).redistribute(placements=[Replicate()])
    return gathered.to_local(grad_placements=[Partial()])


class Attention(nn.Module):
    """Causal, of one head, over sequences of which each rank of ``mesh`` has a part."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)  # a bias of keys has gradients of rounding only
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mesh = mesh
        self.first = 0 if mesh is None else mesh.get_local_rank() * LENGTH // mesh.size()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.mesh is not None:
            k, v = whole(k, self.mesh), whole(v, self.mesh)
        seen = torch.arange(k.shape[1]) <= torch.arange(self.first, self.first + q.shape[1])[:, None]
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))


def model_of(mesh: DeviceMesh | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(mesh), Attention(mesh), nn.Linear(WIDTH, WIDTH))


def train(model: nn.Module, part: Any = lambda x: x) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        x = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(part(x)).square().mean().backward()
        optimizer.step()
    return {"gradients": gradients_of(model), "parameters": parameters_of(model)}


def test_context_parallel_of_torch_needs_a_gpu(fake_group: None) -> None:
    """Its ring attention has no operator of the CPU's, compiled or not; docs/parallelism.md says so."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "cp"))

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    model = nn.Sequential(nn.Linear(8, 8), Attention())

    def refused(by: type[Exception], match: str) -> None:
        x = torch.randn(2, 2, 8, 8)
        # Within the context: torch 2.9 leaves attention replaced where an error leaves the context.
        with context_parallel(mesh["cp"], buffers=[x], buffer_seq_dims=[2]), pytest.raises(by, match=match):
            model(x)

    refused(NotImplementedError, "_scaled_dot_product_flash_attention_for_cpu")
    graph_fsdp.compile(model, mesh["dp"], backend="eager")
    refused(graph_fsdp.GraphBreakError, r"(?s)cannot be traced in one graph.*_attention\.py")


@FACTS
def parts_of_sequences_train_as_whole_ones() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
    rows, places = mesh["dp_shard"].get_local_rank(), mesh["cp"].get_local_rank()
    dims = Dims(("dp_shard", "cp"))
    model = graph_fsdp.compile(model_of(mesh["cp"]), mesh, dp_mesh_dims=dims, backend="eager", dynamic=False)
    found = train(model, lambda x: x.chunk(2)[rows].chunk(2, 1)[places].contiguous())
    expected = train(model_of())
    for kind, values in found.items():
        check_close(values, expected[kind], 1e-6, kind)
    assert engine_of(model).spec.mesh.world_size == 4 == dist.get_world_size()


test_on_four_ranks = FACTS.on(4)
