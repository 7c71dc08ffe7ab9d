"""Experts on eight ranks, beside replicas and tensor parallelism."""

from __future__ import annotations

import pytest
from experts import Experts
from facts import Facts
from test_parameter_meshes import check_as_one_process, model_of, ours, rank, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

FACTS = Facts(__name__)
pytestmark = pytest.mark.long


@FACTS
def experts_of_replicas_are_sharded() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    mesh["efsdp", "ep"]._flatten("dp_shard")
    model = ours(model_of(mesh["ep"]), mesh["dp_replicate", "dp_shard"], {Experts: mesh["dp_replicate", "efsdp"]})
    check_as_one_process(train(model, 5, rank=rank(), ranks=8), 5)


@FACTS
def experts_stand_beside_tensor_parallel_matrices() -> None:
    """Two ranks hold each expert's shard: they compute the same, of the same tokens."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("efsdp", "ep", "tp"))
    data = mesh["efsdp", "ep"]._flatten("dp")
    model = model_of(mesh["ep"])
    whole = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], {"embed": whole, "head": whole})
    model = ours(model, data, {Experts: mesh["efsdp"]})
    check_as_one_process(train(model, 5, rank=data.get_local_rank(), ranks=4), 5)


test_on_eight_ranks = FACTS.on(8)
