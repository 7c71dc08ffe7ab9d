"""``distribute_optimizer(gather_ahead=…)`` on a mesh that replicates: two replicas of two ranks. No bit changes."""

from __future__ import annotations

from facts import Facts
from test_gather_ahead import alike, alike_whatever_is_between
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp

FACTS = Facts(__name__)


@FACTS
def steps_have_the_bits_of_the_optimizer_alone() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = alike(mesh=mesh)
    report = graph_fsdp.inspect(model)
    assert report.spec.mesh.world_size == 2 and report.spec.mesh.replicas == 2
    assert {row.kind for row in report.backward.buckets} >= {"reduce", "replicate"}


@FACTS.long
def what_is_done_between_step_and_forward_counts() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    alike_whatever_is_between(mesh=mesh)


test_on_four_ranks = FACTS.on(4)
