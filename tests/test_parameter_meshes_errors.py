"""What parameters on meshes of their own are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from experts import Experts
from test_bad_input import refuse
from test_parameter_meshes import meshes, model_of, ours, placed, tokens
from torch import nn

import graph_fsdp
from graph_fsdp import AlreadyShardedError, MeshError, UnsupportedError


def test_what_meshes_cannot_be(fake_group: None) -> None:
    mesh, own = meshes(4, 2)
    efsdp = own["efsdp"]
    refuse(model_of(), TypeError, "meshes must be a dict", "got 3", mesh=mesh, meshes=3)
    refuse(model_of(), TypeError, "'experts' is neither a class of modules", mesh=mesh, meshes={"experts": efsdp})
    refuse(model_of(), ValueError, "no module Conv2d", mesh=mesh, meshes={nn.Conv2d: efsdp})
    refuse(model_of(), TypeError, "'layers.0.experts.w1' must have a DeviceMesh", mesh=mesh, meshes={Experts: 4})
    two = {Experts: efsdp, nn.Module: own["ep"]}
    refuse(model_of(), ValueError, "has two meshes", mesh=mesh, meshes=two)
    apart = {Experts: mesh}
    refuse(model_of(), MeshError, "on the ranks [0, 1, 2, 3, 4, 5, 6, 7]", "[0, 2, 4, 6]", mesh=efsdp, meshes=apart)
    refuse(
        model_of(),
        UnsupportedError,
        "reshard_after_forward=2",
        mesh=mesh,
        meshes={Experts: efsdp},
        reshard_after_forward=2,
    )
    refuse(model_of(own["ep"]), AlreadyShardedError, "meshes= for this parameter", mesh=mesh, runs=False)


def test_a_placement_and_a_mesh_for_one_parameter(fake_group: None) -> None:
    mesh, own = meshes(4, 2)

    def placement(p: nn.Parameter) -> Any:
        return placed(p, mesh, own["efsdp"])

    words = ("both give parameter", "leave one out")
    refuse(model_of(), ValueError, *words, mesh=mesh, meshes={Experts: own["efsdp"]}, shard_placement_fn=placement)


def test_torchs_own_norm_refuses_several_meshes(fake_group: None) -> None:
    mesh, own = meshes(4, 2)
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]})
    model(tokens(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"must have the same mesh|Sharding propagation failed"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="registers memory with the groups of one mesh"):
        model.set_allocate_memory_from_process_group_for_comm(True)


def test_bad_arguments_of_clip_grad_norm(fake_group: None) -> None:
    mesh, _ = meshes(4, 2)
    model = graph_fsdp.compile(copy.deepcopy(model_of()), mesh, backend="eager")
    for given in ({"max_norm": -1.0}, {"max_norm": False}, {"max_norm": "1"}, {"max_norm": 1.0, "norm_type": -1}):
        with pytest.raises(ValueError, match="must be a positive number"):
            model.clip_grad_norm_(**given)
    with pytest.raises(UnsupportedError, match="call it on the model"):
        model.layers[0].clip_grad_norm_(1.0)
    assert model.clip_grad_norm_(1.0) == 0.0, "there are no gradients"
