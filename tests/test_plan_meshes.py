"""Plans whose experts have a mesh of their own: the collectives and bytes are those of the compiled model."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from experts import Experts, MoE
from printed import bucket_table, calls
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp.passes import default_pipeline

EXPERTS, WIDTH, RANKS = 4, 16, {"dp_shard": 8, "ep": 2}


def divide(model: nn.Module, meshes: Any) -> None:
    model.distribute(meshes["ep"])


def planned_experts(own: Any, parallelize: Any = divide, make: Any = None, **options: Any) -> graph_fsdp.Plan:
    return graph_fsdp.plan(
        make or (lambda: MoE(EXPERTS, WIDTH)),
        (torch.zeros(8, WIDTH),),
        loss=torch.sum,
        hardware="h100",
        parallelize=parallelize,
        **{"mesh_shape": RANKS, "meshes": own, "backend": "eager", **options},
    )


def programs(report: Any) -> list[Any]:
    """Collectives and buckets of both graphs, with their bytes and ranks, as they run."""
    kinds = ("all_gather_start", "reduce_scatter_start")
    graphs = (report.forward, report.backward)
    return [(bucket_table(graph), *(calls(graph, kind) for kind in kinds)) for graph in graphs]


def by_parameter(p: nn.Parameter) -> str | None:
    return "efsdp" if p.dim() == 3 else None


@pytest.mark.parametrize("own", [{Experts: "efsdp"}, by_parameter], ids=["classes", "function"])
def test_a_plan_with_meshes_of_experts_is_the_program_of_the_compiled_model(fake_group: None, own: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("efsdp", "ep"))
    model = MoE(EXPERTS, WIDTH).distribute(mesh["ep"])
    options = {"meshes": {Experts: mesh["efsdp"]}, "passes": default_pipeline(hardware="h100"), "backend": "eager"}
    graph_fsdp.compile(model, mesh._flatten("dp"), **options)
    model(torch.zeros(8, WIDTH)).sum().backward()
    expected = programs(graph_fsdp.inspect(model))
    assert "world_size=4" in expected[0][1] and "world_size=8" in expected[0][1]
    assert programs(planned_experts(own).traced.report) == expected
    returned = planned_experts(
        None, lambda model, meshes: divide(model, meshes) or {"meshes": {Experts: mesh["efsdp"]}}
    )
    assert programs(returned.traced.report) == expected


class LocalExperts(nn.Linear):
    """Those of a rank."""


def test_a_model_that_is_built_with_a_ranks_experts_needs_no_parallelize() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), LocalExperts(WIDTH, WIDTH, bias=False))

    for shape, ranks in ((RANKS, 4), ({"dp_shard": 8}, 8), ({"dp_replicate": 2, "dp_shard": 4, "ep": 4}, None)):
        found = planned_experts({LocalExperts: "efsdp"}, None, make, mesh_shape=shape)
        gathers = calls(found.traced.report.forward, "all_gather_start")
        sizes = {name: re.findall(rf"{name}.*world_size=(\d+)", gathers) for name in ("0.weight", "1.weight")}
        assert sizes == {"0.weight": [str(shape["dp_shard"])], "1.weight": [str(ranks)] if ranks else []}
    alone = planned_experts({LocalExperts: "efsdp"}, None, make, mesh_shape=(1,))
    assert not alone.traced.forward.starts


@pytest.mark.parametrize(
    ("own", "parallelize", "message"),
    [
        ({Experts: "expert"}, divide, "no mesh 'expert' on this mesh_shape; there are 'dp', 'ep', 'efsdp'"),
        ({Experts: "tp"}, divide, "meshes: there is no mesh 'tp' on this mesh_shape"),
        ({nn.LSTM: "efsdp"}, divide, "meshes: the model has no module LSTM"),
        ("efsdp", divide, "meshes must be a dict"),
        (None, None, "parallelize: mesh_shape is dp_shard=8,ep=2; give a function"),
        ({Experts: "efsdp"}, lambda model, meshes: {"meshes": {}}, "meshes: parallelize returns meshes, too"),
    ],
)
def test_meshes_of_parameters_that_cannot_be(own: Any, parallelize: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        planned_experts(own, parallelize)
