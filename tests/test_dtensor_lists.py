"""An optimizer's step over DTensors looks at lists of them once, and leaves to torch what only torch can find out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import _sharding_prop as sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.compat.dtensor_lists import WALKS_ALL

pytestmark = pytest.mark.skipif(not hasattr(sharding_prop, WALKS_ALL), reason="torch does not look at lists")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one wherever all tensors of an operator are looked at."""
    found: list[Any] = []
    args_spec: Any = OpSchema.args_spec

    def counted(schema: OpSchema) -> Any:
        found.append(schema)
        return args_spec.fget(schema)

    monkeypatch.setattr(OpSchema, "args_spec", property(counted))
    return found


def reads_of_a_step(layers: int, mesh: DeviceMesh, reads: list[Any]) -> int:
    model = graph_fsdp.compile(nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]), mesh, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    reads.clear()
    optimizer.step()
    return len(reads)


def test_lists_are_looked_at_as_often_for_any_number_of_parameters(fake_group: None, reads: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (8,))
    few, many = (reads_of_a_step(layers, mesh, reads) for layers in (3, 12))
    assert 0 < few == many


def test_tensors_that_are_sharded_in_strides_are_left_to_torch(
    fake_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    torchs = getattr(sharding_prop, WALKS_ALL)
    monkeypatch.setattr(sharding_prop, WALKS_ALL, lambda *given: seen.append(given[1].op) or torchs(*given))
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "inner"))
    strided = DTensor.from_local(torch.ones(1, 3), mesh, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
    plain = distribute_tensor(torch.ones(8, 3), mesh, [Shard(0), Shard(0)])
    compat.begin_linear_lists()
    compat.begin_linear_lists()  # a step within a step
    torch._foreach_add([plain, plain], [plain, plain])
    assert not seen
    made: Any = torch._foreach_add([plain, strided], [plain, strided])
    assert seen == [torch.ops.aten._foreach_add.List] * 2
    assert made[1].placements == strided.placements
    compat.end_linear_lists()
    torch._foreach_mul([plain, plain], [plain, plain])
    assert len(seen) == 4
