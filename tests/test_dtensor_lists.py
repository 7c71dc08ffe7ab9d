"""An optimizer's step over DTensors asks once about equal ones, and each gets what torch would have said of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.compat.dtensor_lists import ASKED

# Before, with torch 2.11 as well as 2.9, each propagator keeps the method that it found when it was made.
pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch keeps the method")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Has the number of places of each operator's lists that torch is asked about, while equal ones are one."""
    found: list[Any] = []
    torchs = getattr(ShardingPropagator, ASKED)

    def counted(propagator: Any, schema: OpSchema) -> Any:
        found.append(max((len(given) for given in schema.args_schema if isinstance(given, (list, tuple))), default=1))
        return torchs(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, ASKED, counted)
    compat.begin_equal_places()
    compat.begin_equal_places()  # a step within a step
    try:
        yield found
    finally:
        compat.end_equal_places()


@pytest.fixture
def mesh(fake_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "inner"))


def tensor(mesh: DeviceMesh, rows: int, *placements: Placement) -> DTensor:
    return distribute_tensor(torch.ones(rows, 3), mesh, placements or [Shard(0), Shard(0)])


def described(value: Any) -> Any:
    return value.placements, value.shape, value.stride(), value.dtype, value.to_local().shape


def test_a_step_asks_about_as_many_places_for_any_number_of_layers(fake_group: None, asked: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (8,))
    for layers in (3, 12):
        model = graph_fsdp.compile(nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers)]), mesh, backend="eager")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        asked.clear()
        optimizer.step()
        assert max(asked) == 2  # a weight and a bias
        assert getattr(ShardingPropagator, ASKED).__name__ == "counted"  # put back when a step has ended


def test_each_tensor_gets_what_torch_says_of_it(mesh: DeviceMesh, asked: list[Any]) -> None:
    given = [tensor(mesh, rows) for rows in (8, 16, 8, 8, 16)]
    made: Any = torch._foreach_add(given, given)
    assert asked == [2]
    compat.end_equal_places()
    torchs: Any = torch._foreach_mul(given, given)
    assert asked == [2, 5]
    assert list(map(described, made)) == list(map(described, torchs))


def test_numbers_of_other_types_are_no_equals(mesh: DeviceMesh, asked: list[Any]) -> None:
    whole = distribute_tensor(torch.ones(8, 3, dtype=torch.int64), mesh, [Shard(0), Shard(0)])
    made: Any = torch._foreach_add([whole, whole, whole], [1, 1.0, 1])
    assert asked == [2]
    assert [one.dtype for one in made] == [torch.int64, torch.float32, torch.int64]


def test_shards_in_strides_are_what_they_were(mesh: DeviceMesh, asked: list[Any]) -> None:
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    strided = DTensor.from_local(torch.ones(1, 3), mesh, placements, run_check=False)
    given = [tensor(mesh, 8), strided, tensor(mesh, 8), strided]
    made: Any = torch._foreach_add(given, given)
    assert asked == [2]
    compat.end_equal_places()
    torchs: Any = torch._foreach_sub(given, given)
    assert list(map(described, made)) == list(map(described, torchs))
    assert made[1].placements == made[3].placements == tuple(placements)


def test_where_one_is_redistributed_torch_is_asked_about_all(mesh: DeviceMesh, asked: list[Any]) -> None:
    sharded, whole = tensor(mesh, 8), tensor(mesh, 8, Replicate(), Replicate())
    made: Any = torch._foreach_mul([sharded, sharded, sharded], [sharded, whole, sharded])
    assert asked == [2, 3]
    assert [one.placements for one in made] == [sharded.placements] * 3


def test_other_operators_on_lists_are_left_to_torch(mesh: DeviceMesh, asked: list[Any]) -> None:
    sharded = tensor(mesh, 8)
    assert torch.cat([sharded, sharded]).shape == (16, 3)
    assert 2 in asked


def test_partial_sums_stay_so(mesh: DeviceMesh, asked: list[Any]) -> None:
    part = DTensor.from_local(torch.ones(8, 3), mesh, [Partial(), Partial()], run_check=False)
    made: Any = torch._foreach_add([part, part], [part, part])
    assert [one.placements for one in made] == [part.placements] * 2
