"""``default_pipeline(measured=profile)``: the schedule follows what was measured."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from expecttest import assert_expected_inline
from models import MLP, MLPBlock
from test_profiling import BATCH, compiled, profile
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.passes import CostModel, Graph, GraphPass, Measurements, PassContext, default_pipeline
from graph_fsdp.passes.analysis.cost import collective_key, op_key
from graph_fsdp.passes.ir.dialect import STARTS

pytestmark = pytest.mark.usefixtures("fake_group")


@functools.cache
def measured_once() -> graph_fsdp.Profile:
    """For tests that only need one."""
    return profile(compiled())


# What it is for


class Keep(GraphPass):
    """Keeps the graphs and the cost model as they are at the end of the pipeline."""

    name = "keep"

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        self.cost: CostModel | None = None

    def run(self, graph: Graph, context: PassContext) -> str | None:
        self.graphs.append(graph)
        self.cost = context.cost
        return None


def kept(measured: Any, backend: str = "eager") -> Keep:
    keep = Keep()
    passes = default_pipeline(measured=measured).insert_after("free", keep)
    model = graph_fsdp.compile(MLP(), backend=backend, passes=passes)
    model(BATCH).sum().backward()
    return keep


def test_a_model_compiled_with_a_profile_is_predicted_to_take_what_was_measured() -> None:
    found = measured_once()
    for measured in (found, found.measurements):
        keep = kept(measured)
        assert keep.cost is not None and keep.cost.measured == found.measurements
        compute = {node: s for graph in keep.graphs for node, s in keep.cost.graph_seconds(graph).items() if s > 0}
        assert {op_key(node): s for node, s in compute.items()} == found.measurements.compute
        assert sum(compute.values()) == pytest.approx(found.compute_seconds)
        starts = [node for graph in keep.graphs for node in graph.nodes if node.target in STARTS]
        assert starts
        for node in starts:
            assert keep.cost.collective_seconds(node) == found.measurements.collectives[collective_key(node)]


def test_predictions_are_those_that_the_program_was_scheduled_by() -> None:
    found = measured_once()
    again = profile(compiled(measured=found))
    assert again.predicted_compute_seconds == pytest.approx(found.compute_seconds)
    assert again.predicted_collective_seconds == pytest.approx(found.collective_seconds)


def test_the_scale_is_measured_over_modelled_whatever_was_measured_before() -> None:
    found = measured_once()
    assert found.measurements.scale == pytest.approx(found.compute_seconds / found.predicted_compute_seconds)
    absurd = profile(compiled(measured=Measurements(scale=1e6)))
    assert absurd.predicted_compute_seconds == pytest.approx(1e6 * found.predicted_compute_seconds)
    modelled = found.predicted_compute_seconds
    assert absurd.measurements.scale == pytest.approx(absurd.compute_seconds / modelled)


class OneWide(nn.Module):
    """Blocks of which one has a bucket of its own size."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(4))
        self.blocks[2].up, self.blocks[2].down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def schedule(measured: Any) -> str:
    """Gathers and compute of forward."""
    passes = default_pipeline(measured=measured, budget=10**6)
    model = graph_fsdp.compile(OneWide(), backend="eager", passes=passes, auto_wrap_policy={MLPBlock})
    model(BATCH).sum().backward()
    lines = str(graph_fsdp.inspect(model).forward.program).splitlines()
    shown = (re.search(r"frame.gather_start.*# (\S+)|(region_\d+)\(", line) for line in lines)
    return "\n".join(f"gather {m[1]}" if m[1] else "compute" for m in shown if m)


def test_a_gather_that_was_measured_to_be_slow_starts_earlier() -> None:
    model = graph_fsdp.compile(OneWide(), backend="eager", auto_wrap_policy={MLPBlock})
    found = profile(model).measurements
    fast = {key: 1e-9 for key in found.collectives}
    even = {key: 1e-3 for key in found.compute}
    wide = max(fast, key=lambda key: int(key.split()[1]))
    assert_expected_inline(
        schedule(Measurements(even, fast, found.scale)),
        """\
gather blocks.0
gather blocks.1
compute
gather blocks.2
compute
gather blocks.3
compute
compute""",
    )
    slow = {**fast, **{key: 1.0 for key in fast if key.split()[1:] == wide.split()[1:]}}
    assert_expected_inline(
        schedule(Measurements(even, slow, found.scale)),
        """\
gather blocks.0
gather blocks.1
gather blocks.2
compute
gather blocks.3
compute
compute
compute""",
    )
