"""Dimensions of a mesh that are for data parallelism, by their names. Eight ranks that do nothing."""

from __future__ import annotations

import pytest
import torch
from models import MLP
from test_bad_input import accept, refuse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_fsdp
from graph_fsdp import MeshError

pytestmark = pytest.mark.usefixtures("fake_group")

HYBRID, SHARDED, REPLICATED = (Replicate(), Shard(0)), (Shard(0),), (Replicate(),)


@pytest.mark.parametrize(
    ("names", "shape", "placements", "group"),
    [
        (("dp_replicate", "dp_shard", "tp"), (2, 2, 2), HYBRID, [0, 2]),
        (("replicate", "shard", "tensor"), (2, 2, 2), HYBRID, [0, 2]),
        (("pp", "dp_replicate", "dp_shard", "tp"), (2, 1, 2, 2), HYBRID, [0, 2]),
        (("fsdp", "model"), (4, 2), SHARDED, [0, 2, 4, 6]),
        (("fsdp", "sequence"), (8, 1), SHARDED, [0, 1, 2, 3, 4, 5, 6, 7]),
        (("x", "fsdp", "y"), (1, 8, 1), SHARDED, [0, 1, 2, 3, 4, 5, 6, 7]),
        (("dp", "tp"), (4, 2), SHARDED, [0, 2, 4, 6]),
        (("data", "fsdp"), (2, 4), HYBRID, [0, 1, 2, 3]),
        (("dp_replicate", "tp"), (4, 2), REPLICATED, [0, 2, 4, 6]),
        (("tp",), (8,), SHARDED, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_names_choose_the_dimensions(
    names: tuple[str, ...], shape: tuple[int, ...], placements: tuple[object, ...], group: list[int]
) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = graph_fsdp.compile(MLP(depth=1), mesh, backend="eager")
    assert all(isinstance(p, DTensor) and p.placements == placements for p in model.parameters())
    kept = model.head.weight.device_mesh.mesh
    assert kept[(0,) * (kept.ndim - 1)].tolist() == group


@pytest.mark.parametrize(
    ("names", "shape", "placements"),
    [
        (("dp_replicate", "dp_shard", "tp"), (2, 2, 2), HYBRID),
        (("fsdp", "model"), (4, 2), SHARDED),
        (("dp_replicate", "tp"), (4, 2), REPLICATED),
    ],
)
def test_a_step_communicates_over_the_dimensions_chosen(
    names: tuple[str, ...], shape: tuple[int, ...], placements: tuple[object, ...]
) -> None:
    model = graph_fsdp.compile(MLP(depth=1), init_device_mesh("cpu", shape, mesh_dim_names=names), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    assert all(p.grad.placements == placements for p in model.parameters())
    report = graph_fsdp.inspect(model)
    gathered = [bucket for bucket in report.forward.buckets if bucket.kind == "gather"]
    assert bool(gathered) == (placements != REPLICATED)
    again = [bucket for bucket in report.backward.buckets if bucket.kind == "replicate"]
    assert bool(again) == (placements == HYBRID)


def test_a_slice_is_as_good() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    sliced = graph_fsdp.compile(MLP(), mesh["dp_replicate", "dp_shard"], backend="eager")
    whole = graph_fsdp.compile(MLP(), mesh, backend="eager")
    assert sliced.head.weight.device_mesh == whole.head.weight.device_mesh


def test_names_that_do_not_say_it() -> None:
    model = MLP()
    for names in (("dp_shard", "dp_replicate"), ("fsdp", "cp"), ("fsdp", "dp_shard"), ("replicate", "dp_replicate")):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=names)
        words = (f"the dimensions {names[0]!r} of size 4", "not what the names", "pass a mesh with", "a slice")
        refuse(model, MeshError, *words, mesh=mesh)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("fsdp", "x", "y"))
    refuse(model, MeshError, "mesh has 3 dimensions", "mesh['fsdp', 'x']", mesh=mesh)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pp", "tp"))
    refuse(model, MeshError, "none of them is for data parallelism", mesh=mesh)
    accept(model, init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",)))
