"""Pieces of a model that breaks (``fullgraph=False``) share what they gather: a two-block MLP on 8 ranks."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from marks import fake_reductions
from models import MLP, WIDTH, MLPBlock
from printed import bucket_table, stage_text
from torch import Tensor, fx, nn

import graph_fsdp
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.passes import Graph, GraphPass, PassContext, default_pipeline
from graph_fsdp.passes.context import PassError
from graph_fsdp.report.report import GraphReport, engine_of

pytestmark = pytest.mark.usefixtures("fake_group")


class Broken(MLP):
    """The first block stands on both sides of a graph break, and ``middle`` says what Python does there."""

    again = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.middle(x)
        return self.head(self.blocks[1](self.blocks[0](x) if self.again else x))

    @torch.compiler.disable
    def middle(self, x: Tensor) -> None:
        pass


class Looping(MLP):
    """The first block three times, in a piece each."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[0](x))


class Growing(MLP):
    """The later piece reads more of the first block than the earlier one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0].up(x)[:, :WIDTH]
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](self.blocks[0](x)))


class Shrinking(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.head(self.blocks[1](self.blocks[0].up(x)[:, :WIDTH]))


class Stem(nn.Module):
    """Parameters before and after the units, which two pieces read, and a unit whose name is none of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleDict({"block-0": MLPBlock(), "block-1": MLPBlock()})
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.piece(x)
        torch._dynamo.graph_break()
        return self.piece(x)

    def piece(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(self.stem(x))
        return self.head(x)


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", fullgraph=False, **options)


def batch() -> Tensor:
    return torch.ones(4, WIDTH)


def gathers_of_call(model: nn.Module, train: bool = False) -> int:
    counter = engine_of(model).counter
    counter.reset()
    if train:
        model(batch()).sum().backward()
    else:
        with torch.no_grad():
            model(batch())
    return counter.collectives["all_gather"]


def stages_of(report: GraphReport, phase: Any) -> list[str]:
    return [stage_text(graph.views[phase]) for graph in report.graphs if graph.stages[phase]]


@pytest.mark.parametrize(
    ("model", "gathers"),
    [(Growing, [4, 4, 4]), (Shrinking, [4, 3, 3])],
)
def test_from_the_second_call_on_a_unit_is_gathered_once(model: type[nn.Module], gathers: list[int]) -> None:
    made = compiled(model())
    assert [gathers_of_call(made) for _ in range(3)] == gathers


def test_backward_gathers_for_each_piece_what_is_not_kept() -> None:
    model = compiled(Broken())
    assert [gathers_of_call(model, train=True) for _ in range(3)] == [6, 5, 5]


def test_the_earlier_piece_returns_the_buffer_and_the_later_one_frees_it() -> None:
    model = compiled(Broken())
    assert [gathers_of_call(model) for _ in range(3)] == [4, 3, 3]
    report = graph_fsdp.inspect(model)
    first, second, gives, takes = stages_of(report, "inference")
    assert "free(full_blocks_0)" in first and "gather_blocks_0" in second
    assert_expected_inline(
        gives,
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
full_blocks_0 = all_gather_wait(gather_blocks_0)
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
return ..., full_blocks_0""",
    )
    assert_expected_inline(
        takes,
        """\
takes shared_blocks_0
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8)
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ...
free(shared_blocks_0)
full_blocks_1 = all_gather_wait(gather_blocks_1)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8)
    addmm(blocks.1.up.{bias, weight}), ..., addmm(blocks.1.down.{bias, weight}), ...
free(full_blocks_1)
full_root = all_gather_wait(gather_root)
    addmm(head.{bias, weight})
free(full_root)
return ...""",
    )
    assert_expected_inline(
        bucket_table(report.inference),
        """\
blocks.0 kept 4 5,120
blocks.1 gather 4 5,120
root gather 2 1,024""",
    )
    assert "2 buckets gathered, 0 reduced, 1 taken from an earlier piece" in report.inference.stages["bucket"].summary


def test_what_is_kept_for_backward_is_the_buffer_that_was_taken() -> None:
    model = compiled(Broken(), reshard_after_forward=False)
    assert [gathers_of_call(model, train=True) for _ in range(3)] == [4, 3, 3]
    *_, gives, takes = stages_of(graph_fsdp.inspect(model), "forward")
    assert gives.splitlines()[-1].count("full_blocks_0") == 2, "once for backward, once for the later piece"
    assert "return ..., shared_blocks_0, full_blocks_1, full_root, " in takes


def test_a_piece_between_passes_on_what_it_took() -> None:
    model = compiled(Looping())
    assert [gathers_of_call(model) for _ in range(3)] == [4, 2, 2]
    first, between, last = stages_of(graph_fsdp.inspect(model), "inference")[-3:]
    assert "shared_blocks_0" not in first and "free(" not in first
    assert between.splitlines()[-1].endswith("shared_blocks_0") and "free(" not in between
    assert "free(shared_blocks_0)" in last


def test_buckets_are_shared_whatever_their_names_are() -> None:
    model = compiled(Stem())
    assert [gathers_of_call(model) for _ in range(3)] == [8, 4, 4]
    takes = stages_of(graph_fsdp.inspect(model), "inference")[-1]
    assert takes.startswith("takes shared_root, shared_blocks_block_0, shared_blocks_block_1, shared_root_1\n")


def test_batches_of_other_sizes_share_several_buckets_in_the_same_order() -> None:
    model = compiled(Stem())
    for rows in (4, 5, 6):
        for _ in range(2):
            engine_of(model).counter.reset()
            with torch.no_grad():
                model(torch.ones(rows, WIDTH))
        assert engine_of(model).counter.collectives["all_gather"] == 4
    *_, gives, takes, _, gives_again, _, takes_again = stages_of(graph_fsdp.inspect(model), "inference")
    assert gives_again == gives and takes_again == takes


def test_one_buffer_is_held_between_the_pieces_and_none_after_the_call() -> None:
    model = compiled(Broken(), reshard_after_forward=True)
    counter = engine_of(model).counter
    held: list[int] = []
    model.middle = torch.compiler.disable(lambda x: held.append(counter.current))  # type: ignore[assignment]
    gathers = []
    for _ in range(3):
        gathers.append(gathers_of_call(model, train=True))
        held.append(counter.current)
    assert gathers == [8, 7, 7]
    assert held == [0, 0, 5_120, 0, 5_120, 0], "the first block's bucket"


class Stop(Exception):
    pass


def test_python_that_raises_between_the_pieces_leaves_nothing_behind() -> None:
    class Raising(Broken):
        fails = False

        @torch.compiler.disable
        def middle(self, x: Tensor) -> None:
            if self.fails:
                raise Stop

    model = compiled(Raising())
    engine = engine_of(model)
    assert [gathers_of_call(model) for _ in range(2)] == [4, 3]
    model.fails = True
    with pytest.raises(Stop), torch.no_grad():
        model(batch())
    assert engine.counter.current == 0
    model.fails = False
    assert gathers_of_call(model) == 3


def test_another_sequence_holds_in_vain_once_and_shares_again() -> None:
    model = compiled(Broken())
    made = []
    for _ in range(3):
        assert [gathers_of_call(model) for _ in range(2)] == [4, 3]
        model.again = False
        assert [gathers_of_call(model) for _ in range(2)] == [3, 3]
        assert engine_of(model).counter.current == 0
        model.again = True
        made.append(len(graph_fsdp.inspect(model).graphs))
    assert made[2] == made[1], "each variant is made once"


def test_with_a_budget_each_piece_gathers_for_itself() -> None:
    model = compiled(Broken(), passes=default_pipeline(budget=20_000))
    assert [gathers_of_call(model) for _ in range(3)] == [4, 4, 4]


def test_what_unshard_made_whole_is_not_shared() -> None:
    model = compiled(Broken())
    assert [gathers_of_call(model) for _ in range(2)] == [4, 3]
    model.blocks[1].unshard()
    assert [gathers_of_call(model) for _ in range(2)] == [3, 2]
    assert "whole_blocks_1_up_weight" in stages_of(graph_fsdp.inspect(model), "inference")[-1]


@fake_reductions
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_what_python_reads_is_gathered_again_in_a_backward_after_its_unit_was_resharded() -> None:
    model: Any = compiled(ReadByPython())
    gradients = []
    for again in (False, True):
        model.unshard()
        output = model(batch())
        if again:
            model.reshard()
        output.sum().backward()
        assert not engine_of(model).unsharded.units
        gradients.append(model.linear.weight.grad)
        model.zero_grad()
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


class ReadByPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x).tanh()

    @torch.compiler.disable
    def read(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.linear.weight)


def test_fullgraph_keeps_no_graphs_for_variants() -> None:
    graph, entry = Graph(fx.symbolic_trace(nn.Identity()), "forward"), Entry("", "forward", MLP.forward)
    models = [graph_fsdp.compile(MLP(), backend="eager", fullgraph=fullgraph) for fullgraph in (True, False)]
    assert [engine_of(model).pieces.snapshot(graph, entry) is None for model in models] == [True, False]


class Scaled(MLP):
    """Each text is another graph of ``forward``, and ``middle``, which breaks, a frame of its own."""

    def forward(self, x: Tensor, scale: str = "1") -> Tensor:
        return self.head(self.middle(x * int(scale)))

    def middle(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        return self.blocks[1](x)


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch runs what any call has compiled once it gives up on a frame",
)
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
@pytest.mark.parametrize("of", ["settings", "models"])
def test_where_dynamo_gives_up_no_pieces_of_others_run(of: str) -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        model = compiled(Scaled())
        other = model if of == "settings" else compiled(Scaled())
        other.set_requires_gradient_sync(False)
        for scale in "12":
            other(batch(), scale).sum().backward()
        other.set_requires_gradient_sync(True)
        counter = engine_of(model).counter
        for scale in "345":
            counter.reset()
            model(batch(), scale).sum().backward()
            assert counter.collectives["reduce"] == 3
            read = [graph for graph in graph_fsdp.inspect(model).graphs if graph.cause.kind == "python"]
            assert bool(read) == (scale == "5"), "it counts two of its own graphs"


class FailsWhereShared(GraphPass):
    name = "fails_where_shared"
    requires = frozenset({"scheduled"})

    def run(self, graph: Graph, context: PassContext) -> None:
        if context.sharing:
            raise ZeroDivisionError("nothing to divide")


def test_where_a_pass_fails_on_a_shared_piece_its_graphs_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = compiled(Broken(), passes=default_pipeline().insert_after("prefetch", FailsWhereShared()))
    gathers_of_call(model)
    with pytest.raises(PassError, match="nothing to divide") as raised:
        gathers_of_call(model)
    found = re.search(r"graph-fsdp report (\S+)$", str(raised.value))
    assert found is not None, raised.value
    report = graph_fsdp.load_report(Path(found[1]))
    assert "nothing to divide" in str(report)
    assert list(report.stages("inference"))[-1] == "fails_where_shared (failed)"
