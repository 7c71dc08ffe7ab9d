"""A node that computes what the model asked for leads to a line and a module of the model, after every pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import fake_process_group
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp.passes.ir.dialect import record
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.stage import Stage
from graph_fsdp.report.provenance import module_name, source_line
from graph_fsdp.report.report import GraphReport

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
LAYERS = 3  # equal ones: one trace stands for all


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.down(h)


class Model(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(16, 32, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


OPTIONS = {
    "plain": {},
    "bfloat16": {"mp_policy": torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "checkpointed by an option": {"activation_checkpointing": "unit"},
}


@pytest.fixture(scope="module", params=[*OPTIONS, "checkpointed by the user"])
def report(request: pytest.FixtureRequest) -> GraphReport:
    with fake_process_group():
        options = {"backend": "eager", **OPTIONS.get(request.param, {})}
        model = graph_fsdp.compile(Model("user" in request.param), **options)
        model(*torch.ones(2, 2, 4, dtype=torch.int64)).backward()
        return graph_fsdp.inspect(model)


def computed(stage: Stage) -> Iterator[fx.Node]:
    """What is neither input, output, nor of the dialect."""
    for node in stage.graph.nodes:
        if node.op == "call_function" and record(node) is None and not str(node.target).startswith("graph_fsdp."):
            yield node


def first_stages(report: GraphReport) -> Iterator[tuple[str, Stage]]:
    """The graphs before passes put anything into them."""
    for view in (report.capture, report.joint, report.forward, report.backward):
        stage = next(iter(view.stages.values()))
        yield f"{view.phase} after {stage.name}", stage


def test_every_node_that_computes_has_a_line_and_a_module(report: GraphReport) -> None:
    missing = [
        f"{where}: {node.format_node()}"
        for where, stage in first_stages(report)
        for node in computed(stage)
        if source_line(node) is None or module_name(node) is None
    ]
    assert missing == []


def test_each_of_equal_layers_has_its_own_name(report: GraphReport) -> None:
    wanted = {f"blocks.{n}" for n in range(LAYERS)}
    for where, stage in first_stages(report):
        if "tag_activation_checkpoint" not in stage.body:  # blocks are graphs of their own there
            modules = {".".join((module_name(node) or "").split(".")[:2]) for node in computed(stage)}
            assert modules >= wanted, where


def test_no_pass_changes_where_a_node_comes_from(report: GraphReport) -> None:
    for view in (report.forward, report.backward):
        first, *later = view.stages.values()
        origin = {node.name: (source_line(node), module_name(node)) for node in computed(first)}
        assert len(origin) > 20
        for stage in later:
            found = {node.name: (source_line(node), module_name(node)) for node in computed(stage)}
            assert {name: found[name] for name in origin if name in found} == {
                n: o for n, o in origin.items() if n in found
            }
            assert len(origin.keys() & found.keys()) > 20


def test_what_passes_insert_beside_their_operators_computes_nothing(report: GraphReport) -> None:
    for view in (report.forward, report.backward):
        first, *later = view.stages.values()
        known = {node.name for node in computed(first)}
        for stage in later:
            new = [node for node in computed(stage) if node.name not in known]
            assert [n.format_node() for n in new if not (is_view(n) or n.target in CASTS)] == [], stage.title


def test_modules_of_a_planned_model_with_a_loss_have_the_models_names() -> None:
    planned = graph_fsdp.plan(
        lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)),
        (torch.ones(4, 16, device="meta"),),
        mesh_shape=(8,),
        hardware="h100",
        loss=torch.sum,
    )
    names = {module_name(node) for node in computed(planned.forward.stages["partition"])}
    assert names - {""} == {"0", "1"}, "and none of the module that has the loss"


class Broken(nn.Module):
    """Between two calls of a module Python must know a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x + 1 if x.sum().item() > 0 else self.linear(x)


def test_lines_of_a_model_that_breaks_are_its_own() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(Broken(), backend="eager", fullgraph=False)
        model(torch.ones(2, 4)).sum().backward()
        found = graph_fsdp.inspect(model)
    stages = [found.forward.stages["partition"], found.backward.stages["partition"]]
    lines = [source_line(node) for stage in stages for node in computed(stage)]
    assert {line.file for line in lines if line is not None} == {__file__}


def test_a_file_of_a_package_whose_name_begins_as_torchs_is_the_users() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    file = torch.__file__.replace("/torch/", "/torchvision/")
    node.meta["stack_trace"] = f'  File "{file}", line 3, in forward\n    return x\n'
    found = source_line(node)
    assert found is not None and found.file == file
