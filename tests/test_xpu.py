"""Tracing and scheduling for XPU, on a fake device and a fake process group: no XPU was ever there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import fake_xpu
import pytest
import torch
from expecttest import assert_expected_inline
from launch import run_ranks
from models import MLP, WIDTH
from pages import ROOT
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from virtual import library

import graph_fsdp
from graph_fsdp.passes import HARDWARE, Graph, detect_hardware
from graph_fsdp.planning.tracing import trace

sys.path.insert(0, str(ROOT / "examples"))

import digits
from ranks import process_group_backend

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def devices(graph: Graph) -> set[str]:
    """Of all tensors in the graph."""
    values = [node.meta.get("val") for node in graph.nodes]
    tensors = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    return {str(v.device) for v in tensors if isinstance(v, torch.Tensor)}


def traced(make: Callable[[], nn.Module], batch: torch.Tensor, device: str, **options: Any) -> dict[str, Any]:
    found = trace(make, (batch,), world_size=4, device=device, loss=lambda y: y.float().sum(), **options)
    last = {view: getattr(found.report, view).stages for view in ("forward", "backward")}
    return {
        "report": str(found.report),
        "code": {view: stages[list(stages)[-1]].code for view, stages in last.items()},
        "devices": {str(phase): devices(graph) for phase, graph in found.graphs.items()},
    }


def on_an_xpu(path: str) -> dict[str, Any]:
    fake_xpu.load(path)
    device = torch.empty(0, device="xpu").device
    hardware = detect_hardware(device)
    linear, x = lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)), torch.zeros(2, 8)
    mlp = {d: traced(MLP, torch.zeros(2, WIDTH), d, mp_policy=BF16) for d in ("xpu", "cpu")}
    return {
        "accelerator": torch.accelerator.current_accelerator().type,
        "device": str(device),
        "hardware": (hardware.name, hardware.memory),
        "linear": traced(linear, x, "xpu", auto_wrap_policy={nn.Linear}),
        "offloaded": traced(linear, x, "xpu", auto_wrap_policy={nn.Linear}, offload_policy=CPUOffloadPolicy()),
        "mlp": mlp["xpu"],
        "mlp on the CPU": mlp["cpu"],
        "digits": traced(lambda: digits.CNN(28), torch.zeros(4, 1, 28, 28), "xpu", backend="eager"),
        "plan": str(
            graph_fsdp.plan(
                lambda: digits.CNN(28),
                (torch.zeros(64, 1, 28, 28),),
                mesh_shape=(24,),
                hardware="max1550",
                loss=lambda y: y.sum(),
            )
        ),
    }


@pytest.fixture(scope="module")
def xpu() -> dict[str, Any]:
    fresh = {"GRAPH_FSDP_FRESH": "1"}  # no fork: what forks ranks has looked for devices and found none
    [found] = run_ranks(on_an_xpu, 1, str(fake_xpu.build()), backend=None, env=fresh)
    return found


@pytest.mark.long
def test_the_device_is_found_and_what_is_known_of_it(xpu: dict[str, Any]) -> None:
    assert (xpu["accelerator"], xpu["device"]) == ("xpu", "xpu:0")
    assert xpu["hardware"] == (HARDWARE["max1550"].name, fake_xpu.MEMORY)


@pytest.mark.long
def test_forward_as_printed(xpu: dict[str, Any]) -> None:
    assert xpu["linear"]["devices"] == {"forward": {"xpu:0"}, "backward": {"xpu:0"}}
    assert_expected_inline(
        body(xpu["linear"]["code"]["forward"]),
        """\
import operator
import torch
from torch import device, inf, nan
import graph_fsdp.api  # registers torch.ops.graph_fsdp
def forward(primals_1, primals_2, primals_3):
    gather_0 = torch.ops.graph_fsdp.all_gather_start.default([primals_1], [0], 16, torch.float32, 4, '0')
    full_0 = torch.ops.graph_fsdp.all_gather_wait.default(gather_0)
    gather_1 = torch.ops.graph_fsdp.all_gather_start.default([primals_3], [0], 16, torch.float32, 4, '0', [0, 8])
    _0_weight = torch.ops.aten.slice.Tensor(full_0, 0, 0, 64)
    _0_weight_1 = torch.ops.aten.view.default(_0_weight, [8, 8])
    permute = torch.ops.aten.permute.default(_0_weight_1, [1, 0])
    mm = torch.ops.aten.mm.default(primals_2, permute)
    free_0 = torch.ops.graph_fsdp.free.default(full_0)
    full_1 = torch.ops.graph_fsdp.all_gather_wait.default(gather_1)
    _1_weight = torch.ops.aten.slice.Tensor(full_1, 0, 0, 32)
    _1_weight_1 = torch.ops.aten.view.default(_1_weight, [4, 8])
    permute_1 = torch.ops.aten.permute.default(_1_weight_1, [1, 0])
    mm_1 = torch.ops.aten.mm.default(mm, permute_1)
    sum_1 = torch.ops.aten.sum.default(mm_1)
    return (sum_1, full_1, primals_2, primals_3, mm)""",
    )


@pytest.mark.long
def test_backward_as_printed(xpu: dict[str, Any]) -> None:
    assert_expected_inline(
        body(xpu["linear"]["code"]["backward"]),
        """\
import operator
import torch
from torch import device, inf, nan
import graph_fsdp.api  # registers torch.ops.graph_fsdp
def forward(kept_0, primals_2, primals_3, mm, tangents_1):
    expand = torch.ops.aten.expand.default(tangents_1, [2, 4])
    permute_2 = torch.ops.aten.permute.default(expand, [1, 0])
    mm_2 = torch.ops.aten.mm.default(permute_2, mm)
    reduce_1 = torch.ops.graph_fsdp.reduce_scatter_start.default([mm_2], torch.float32, 4, '0')
    _1_weight = torch.ops.aten.slice.Tensor(kept_0, 0, 0, 32)
    _1_weight_1 = torch.ops.aten.view.default(_1_weight, [4, 8])
    permute_1 = torch.ops.aten.permute.default(_1_weight_1, [1, 0])
    permute_4 = torch.ops.aten.permute.default(permute_1, [1, 0])
    mm_3 = torch.ops.aten.mm.default(expand, permute_4)
    permute_6 = torch.ops.aten.permute.default(mm_3, [1, 0])
    mm_4 = torch.ops.aten.mm.default(permute_6, primals_2)
    free_1 = torch.ops.graph_fsdp.free.default(kept_0)
    reduce_0 = torch.ops.graph_fsdp.reduce_scatter_start.default([mm_4], torch.float32, 4, '0')
    reduced_1 = torch.ops.graph_fsdp.reduce_wait.default(reduce_1)
    _1_weight_grad = torch.ops.aten.slice.Tensor(reduced_1, 0, 0, 8)
    _1_weight_grad_1 = torch.ops.aten.view.default(_1_weight_grad, [1, 8])
    reduced_0 = torch.ops.graph_fsdp.reduce_wait.default(reduce_0)
    _0_weight_grad = torch.ops.aten.slice.Tensor(reduced_0, 0, 0, 16)
    _0_weight_grad_1 = torch.ops.aten.view.default(_0_weight_grad, [2, 8])
    return (_0_weight_grad_1, None, _1_weight_grad_1)""",
    )


def body(code: str) -> str:
    """Without the lines on the pass that was the last."""
    return "\n".join(line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def calls(line: str) -> str:
    """A line without what it drops, which is where a value is read last."""
    return line.partition(";  ")[0].rstrip()


@pytest.mark.long
def test_the_graph_is_the_cpus_in_another_order(xpu: dict[str, Any]) -> None:
    """Where the hardware overlaps, gathers start further ahead and a block more is kept for backward: it is returned
    and not freed."""
    there = body(xpu["mlp"]["code"]["forward"]).replace("xpu", "cpu").replace(", index=0", "")
    here = body(xpu["mlp on the CPU"]["code"]["forward"])
    found, expected = (
        sorted(line for line in map(calls, text.splitlines()) if "free_blocks_1 =" not in line and "return" not in line)
        for text in (there, here)
    )
    assert found == expected and "free_blocks_1" not in there
    assert xpu["mlp"]["devices"] == {"forward": {"xpu:0"}, "backward": {"xpu:0"}}


@pytest.mark.long
def test_offloaded_shards_are_fetched_from_the_host(xpu: dict[str, Any]) -> None:
    assert xpu["offloaded"]["devices"] == {"forward": {"xpu:0", "cpu"}, "backward": {"xpu:0", "cpu"}}
    code = xpu["offloaded"]["code"]
    assert "fetch" in code["forward"] and "offload" in code["backward"]


@pytest.mark.long
def test_intels_example_is_scheduled(xpu: dict[str, Any]) -> None:
    assert "gather" in xpu["digits"]["report"] and xpu["digits"]["devices"]["backward"] == {"xpu:0"}
    assert "max1550" in xpu["plan"]


def test_process_groups_of_xpu_are_xccls() -> None:
    assert {d: process_group_backend(d) for d in ("cpu", "cuda", "xpu")} == {
        "cpu": "gloo",
        "cuda": "nccl",
        "xpu": "xccl",
    }
