"""Tensor extensions that are the parts of tensor-parallel parameters: what a rank gathers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from printed import bucket_tables, stage_text
from test_extensions import Float8, Wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import graph_fsdp
from graph_fsdp.errors import UnsupportedError


class Neither(Float8):
    """A tensor subclass that is no extension."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            raise AttributeError(name)
        return super().__getattribute__(name)


class Columns(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(DTensor.from_local(x, self.weight.device_mesh, [Replicate()]))
        return out.to_local()


def tensor_parallel(kind: type[Wrapped]) -> tuple[nn.Module, DeviceMesh]:
    """A linear module whose weight is half on each of two ranks, and the mesh of the other four."""
    mesh, model = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")), Columns(16, 16, bias=False)
    model.weight = nn.Parameter(DTensor.from_local(kind(torch.randn(8, 16)), mesh["tp"], [Shard(0)]))
    return model, mesh["dp"]


def test_the_part_of_a_tensor_parallel_rank_is_what_an_extension_gathers(fake_group: None) -> None:
    model, mesh = tensor_parallel(Float8)
    graph_fsdp.compile(model, mesh, backend="eager")
    assert [p.to_local().shape for p in model.parameters()] == [(2, 16)]
    model(torch.randn(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        bucket_tables(report),
        """\
forward
root#payload gather 1 256 kept
backward
root#payload kept 1 256
root reduce 1 128""",
    )
    assert_expected_inline(
        stage_text(report.forward, "mul", "_to_copy"),
        """\
    mul(weight, 64), _to_copy(mul, float8_e4m3fn)
gather_root_payload = all_gather_start([_to_copy], float8_e4m3fn, world_size=4, messages=[0, 32])
full_root_payload = all_gather_wait(gather_root_payload)
    _to_copy(weight#0, float32), mul(_to_copy, 0.015625), ...
return ..., full_root_payload, ...""",
    )


def test_a_part_that_is_no_extension_is_refused(fake_group: None) -> None:
    model, mesh = tensor_parallel(Neither)
    with pytest.raises(
        UnsupportedError, match="'weight' is a Neither on each rank of tensor parallelism; give it fsdp"
    ):
        graph_fsdp.compile(model, mesh, backend="eager")
    assert isinstance(model.weight.to_local(), Neither)
