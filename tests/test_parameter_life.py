"""The life of a parameter, and the lines of the model that graphs lead to."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from models import MLP
from torch import nn

import graph_fsdp
from graph_fsdp.report.provenance import module_name, source_line
from graph_fsdp.report.report import GraphReport


@pytest.fixture(scope="module")
def report() -> GraphReport:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager")
        model(torch.ones(4, 16)).sum().backward()
        return graph_fsdp.inspect(model)


def without_lines(text: object) -> str:
    return re.sub(r"\.py:\d+", ".py:N", str(text))


def test_the_life_of_a_parameter_that_is_gathered_twice(report: GraphReport) -> None:
    assert_expected_inline(
        without_lines(report.find("blocks.0.up.weight")),
        """\
blocks.0.up.weight: float32[32, 16] of unit blocks.0 in bucket blocks.0, float32[4, 16] on each of 8 ranks

graph 0, forward
       0  shard         primals_1
      11  gather_start  gather_blocks_0
      12  gather_wait   full_blocks_0
      15  unpack        blocks_0_up_weight_1
      18  use           addmm                      models.py:N  return x + self.down(F.gelu(self.up(x)))
      26  free          free_blocks_0

graph 0, backward
      29  gather_start  gather_blocks_0
      56  gather_wait   full_blocks_0
      70  gradient      mm_8                       models.py:N  return x + self.down(F.gelu(self.up(x)))
      75  free          free_blocks_0
      80  reduce_start  reduce_blocks_0
      88  reduce_wait   reduced_blocks_0
      93  shard_grad    blocks_0_up_weight_grad_1""",
    )


def test_the_life_of_a_parameter_that_is_kept_for_backward(report: GraphReport) -> None:
    assert_expected_inline(
        without_lines(report.find("head.bias")),
        """\
head.bias: float32[5] of unit root in bucket root, float32[1] on each of 8 ranks

graph 0, forward
      10  shard         primals_11
      28  gather_start  gather_root
      42  gather_wait   full_root
      48  unpack        head_bias_1
      49  use           addmm_4         models.py:N  return self.head(x)

graph 0, backward
       0  kept          kept_0
      23  gradient      sum_1           models.py:N  return self.head(x)
      26  free          free_root
      27  reduce_start  reduce_root
      76  reduce_wait   reduced_root
      78  shard_grad    head_bias_grad""",
    )


def test_events_are_those_of_the_printed_graph(report: GraphReport) -> None:
    life = report.find("blocks.1.down.weight")
    graphs = {view.phase: view.graph for view in (report.forward, report.backward)}
    for event in life.events:
        graph = graphs[event.phase]
        assert graph is not None and graph.nodes[event.position].name == event.node
    kinds = [event.kind for event in life.events if event.phase == "backward"]
    assert kinds == [
        *("shard", "gather_start", "gather_wait", "unpack", "use", "gradient"),
        *("free", "reduce_start", "reduce_wait", "shard_grad"),
    ]
    assert life.bucket == "blocks.1" and life.parameter.name == "blocks.1.down.weight"


def test_uses_name_the_line_of_the_model(report: GraphReport) -> None:
    (use,) = [event for event in report.find("head.weight").events if (event.kind, event.phase) == ("use", "forward")]
    assert use.source is not None and use.source.code == "return self.head(x)" and use.source.function == "forward"
    with open(use.source.file) as file:
        assert file.readlines()[use.source.line - 1].strip() == use.source.code


def test_an_unknown_parameter(report: GraphReport) -> None:
    with pytest.raises(KeyError, match=r"no sharded parameter 'blocks.0.up.wieght'; did you mean 'blocks.0.up.weight'"):
        report.find("blocks.0.up.wieght")


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) * self.scale


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x).relu() + self.a.bias


def test_a_parameter_of_a_model_in_pieces_is_followed_in_those_that_use_it(fake_group: None) -> None:
    model = graph_fsdp.compile(Broken(), backend="eager", fullgraph=False)
    for rows in (2, 3):  # each piece is captured again
        model(torch.ones(rows, 4)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert [(c.index, c.cause.kind) for c in report.graphs] == [(0, "first"), (1, "piece"), (2, "guard"), (3, "guard")]

    def places(name: str) -> list[tuple[str, int]]:
        events = report.find(name).events
        return list(dict.fromkeys((e.phase, e.graph) for e in events if e.kind in ("use", "gradient", "shard_grad")))

    assert places("a.weight") == [("forward", 2), ("backward", 2)]
    assert places("b.weight") == [("forward", 3), ("backward", 3)]
    assert places("a.bias") == [("forward", 2), ("forward", 3), ("backward", 2), ("backward", 3)]


def test_scalars_and_what_no_graph_uses(fake_group: None) -> None:
    model = graph_fsdp.compile(Unused(), backend="eager")
    model(torch.ones(4, 16)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert "whole on every rank" in str(report.find("scale"))
    assert [event.kind for event in report.find("scale").events if event.phase == "forward"] == ["shard", "use"]
    kinds = {event.kind for event in report.find("unused.weight").events}  # its bucket is gathered as a whole
    assert "gather_wait" in kinds and "use" not in kinds and "gradient" not in kinds


def test_a_model_that_did_not_run(fake_group: None) -> None:
    report = graph_fsdp.inspect(graph_fsdp.compile(Unused(), backend="eager"))
    assert report.find("unused.weight").events == ()
    assert str(report.find("unused.weight")).endswith("no graph that was captured uses it")


def test_every_computing_node_leads_to_a_line_and_a_module(report: GraphReport) -> None:
    """Through all passes, forward and backward."""
    modules = set()
    for view in (report.forward, report.backward):
        assert view.graph is not None
        for node in view.graph.nodes:
            if node.op == "call_function" and node.meta.get("fsdp") is None and "blocks" not in node.name:
                if node.name.startswith(("head_", "add_2")):  # views of shards; a sum of gradients
                    continue
                assert source_line(node) is not None, node.name
                modules.add(module_name(node))
    assert modules == {"head", *(f"blocks.{n}{part}" for n in (0, 1) for part in ("", ".up", ".down"))}
