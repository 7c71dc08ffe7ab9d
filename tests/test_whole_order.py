"""``regions="whole"``: Inductor runs collectives and waits in the verified order. Eight ranks that do nothing."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch
from marks import mostly_long
from models import CASES, Attention, Case, loss_of, vectors
from test_option_numbers import CHEAP_MESSAGES
from test_whole import compiled
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch.distributed.device_mesh import init_device_mesh

from graph_fsdp import compat
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import layout_of, messages_of
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import WholeProgram

pytestmark = pytest.mark.usefixtures("fake_group")


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor writes its program and no C++ is compiled: kernels do nothing, as the ranks do."""
    monkeypatch.setattr(compat, "built_together", contextlib.nullcontext)  # which puts another in the place of this one
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)


Event = tuple[str, int]  # "start" or "wait" of which collective, by its place; or "product"


def messages_in(start: fx.Node) -> int:
    if start.target is dialect.all_gather_start:
        return len(layout_of(start).messages)
    return len(messages_of(start)) if start.target is dialect.reduce_scatter_start else 1


def events_of_graph(graph: Graph, at_once: bool = True) -> list[Event]:
    """The verified order. A gather or reduction of several messages is as many collectives. Unless gathers are under
    way at once, each is waited for behind its start."""
    events: list[Event] = []
    places: dict[fx.Node, list[int]] = {}
    for node in graph.nodes:
        if node.target in dialect.STARTS:
            first = sum(len(p) for p in places.values())
            places[node] = list(range(first, first + messages_in(node)))
            for place in places[node]:
                events.append(("start", place))
                if not at_once and node.target is dialect.all_gather_start:
                    events.append(("wait", place))
        elif node.target in dialect.WAITS and (at_once or node.target is not dialect.all_gather_wait):
            events += [("wait", place) for place in places[node.args[0]]]
    return events


_COLLECTIVE = re.compile(r"(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((?:reinterpret_tensor\()?(\w+)")
_PRODUCT = re.compile(r"extern_kernels\.\w+\(|torch\.ops\.aten\.(add)?b?mm\.default\(|= torch\.ops\.aten\._scaled_dot")


def events_of_code(source: str) -> list[Event]:
    """Of a lowered graph's Python, or of Inductor's."""
    events: list[Event] = []
    places: dict[str, int] = {}  # of the collective that last wrote a buffer
    started = 0
    for line in source.splitlines():
        if found := _COLLECTIVE.search(line):
            result, operator, argument = found.groups()
            if operator == "wait_tensor":
                events.append(("wait", places[argument]))
            else:
                places[result or argument] = started  # one in place has no result
                events.append(("start", started))
                started += 1
        elif _PRODUCT.search(line):
            events.append(("product", 0))
    return events


def communication(events: list[Event]) -> list[Event]:
    return [event for event in events if event[0] != "product"]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.out = nn.Parameter(torch.ones(16)), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.scale)


class Branches(nn.Module):
    """All branches scale the same input. Inductor would do that in one kernel, after the last branch is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


class Attending(nn.Module):
    """Attention alone: what else a transformer has are kernels that take long to compile and order nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(16, heads=2, dropout=0.0) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (1, -1))
        for layer in self.layers:
            x = x + layer(x)
        return x.flatten(0, 1)


BRANCHES = Case(Branches, vectors)
ORDERS: dict[str, tuple[Case, tuple[int, ...] | None, dict[str, Any]]] = {
    "one ahead": (CASES["mlp"], None, {}),
    "two ahead": (CASES["mlp"], None, {"passes": default_pipeline(prefetch=2, reductions_in_flight=3)}),
    "messages of their own": (CASES["mlp"], None, {"passes": default_pipeline(hardware=CHEAP_MESSAGES)}),
    "hybrid": (CASES["mlp"], (2, 4), {"reshard_after_forward": True}),
    "attention": (Case(Attending, vectors), None, {"reshard_after_forward": True}),
    "branches": (BRANCHES, None, {"reshard_after_forward": True}),
}


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("at_once", [True, False], ids=["", "on gloo"])
@pytest.mark.parametrize("name", mostly_long(ORDERS, ["messages of their own"]))
def test_inductor_keeps_the_verified_order(name: str, at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "gathers_at_once", lambda *_: at_once)
    case, shape, options = ORDERS[name]
    mesh = init_device_mesh("cpu", shape) if shape else None
    model = compiled(case.model(), mesh, backend="inductor", **options)
    batch = case.batch(4, 0)
    loss_of(model, batch).backward()
    with torch.no_grad():
        loss_of(model, batch)
    programs = engine_of(model).programs
    assert {phase for _, phase in programs} == {"forward", "backward", "inference"}
    for program in programs.values():
        assert isinstance(program, WholeProgram)
        ran = communication(events_of_code(program.function.source_code))
        assert ran == events_of_graph(program.graph, at_once) == communication(events_of_code(program.source))
        assert len(ran) >= 6


@pytest.mark.usefixtures("without_kernels")
def test_products_stay_between_the_collectives_that_they_overlap_with() -> None:
    """There is none here that Inductor makes one with a sum, which then stands where the sum stood."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())]
    model = compiled(nn.Sequential(*layers), backend="inductor", auto_wrap_policy={nn.Linear})
    model(torch.ones(4, 16)).sum().backward()
    for program in engine_of(model).programs.values():
        ran = events_of_code(program.function.source_code)
        assert ran == events_of_code(program.source)
        assert ran.count(("product", 0)) >= 4 and len(communication(ran)) >= 8
