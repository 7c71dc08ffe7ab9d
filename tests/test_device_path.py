"""What is different on devices, as far as a CPU shows it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulated_group import simulated_group
from simulated_link import INSTANT
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config
from torch._subclasses import FakeTensorMode

from graph_fsdp import compat

CUDA = torch.device("cuda:0")


def test_gloo_launches_no_groups_of_collectives(fake_group: dist.ProcessGroup) -> None:
    assert compat.launches_groups(fake_group, CUDA)
    assert not compat.launches_groups(fake_group, torch.device("cpu"))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    assert not compat.launches_groups(dist.group.WORLD, CUDA)


def test_a_group_of_collectives_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.distributed, "launches_groups", lambda group, device: True)
    full, parts = ([torch.full((n,), 2.0) for _ in range(3)] for n in (4, 2))
    with simulated_group(2, INSTANT) as group:
        group.trace = []
        (work,) = compat.grouped(list(zip(full, parts, strict=True)), group)
        work.wait()
        mean = {"async_op": False, "op": dist.ReduceOp.AVG}
        assert not compat.grouped(list(zip(parts, full, strict=True)), group, compat.reduce_scatter_single, **mean)
        assert [launch.kinds for launch in group.trace] == [("all_gather",) * 3, ("reduce_scatter",) * 3]
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in (*full, *parts))


def test_inductor_makes_no_cuda_graphs_of_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        compile_fx, "compile_fx_inner", lambda *args, cudagraphs=None, **kwargs: given.append(cudagraphs)
    )
    graph = fx.Graph()
    graph.output((graph.placeholder("x"),))
    with tracing(TracingContext(FakeTensorMode())), config.patch({"triton.cudagraphs": True}):
        compat.inductor_compile(fx.GraphModule({}, graph), [], is_backward=False, is_inference=True)
    assert [made.value for made in given] == [False], "None is the setting"
