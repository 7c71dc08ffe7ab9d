"""The first of two gloo ranks makes the program of a model's first graph, and the other takes it: it traces nothing,
computes the same bits and shows the same graphs. Where it cannot take it, it traces, and never waits for good."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts, shared_folder
from launch import run_ranks
from models import MLP, WIDTH
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.engine import engine as engines
from graph_fsdp.engine import sharing
from graph_fsdp.engine.aot import AotTrace
from graph_fsdp.passes import Graph, GraphPass, PassContext
from graph_fsdp.report.report import GraphReport
from graph_fsdp.runtime.ranks import agreement

FACTS = Facts(__name__)
STEPS = 2
ROWS = 4


@dataclass
class Watched:
    """What this rank does in a block: how often it traces a graph, and what it says in the log."""

    traces: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "\n".join(self.said)


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    seen, trace = Watched(), engines.through_aot_autograd

    def counted(*args: Any) -> Any:
        seen.traces += 1
        return trace(*args)

    handler, logger = logging.Handler(), logging.getLogger("graph_fsdp")
    handler.emit = lambda record: seen.said.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    engines.through_aot_autograd = counted
    try:
        yield seen
    finally:
        engines.through_aot_autograd = trace
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def before_the_partition(happens: Callable[[], object]) -> Iterator[None]:
    """Something happens when this rank has traced a graph and is about to divide it."""
    partitioned = AotTrace.partitioned

    def struck(*args: Any) -> Any:
        happens()
        return partitioned(*args)

    AotTrace.partitioned = struck  # type: ignore[method-assign]
    try:
        yield
    finally:
        AotTrace.partitioned = partitioned  # type: ignore[method-assign]


def rank() -> int:
    return dist.get_rank()


def compiled(programs: object, make: Callable[[], nn.Module] = MLP, **options: Any) -> nn.Module:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return graph_fsdp.compile(make(), **{"backend": "eager", "programs": programs, **options})


@dataclass
class Trained:
    losses: list[Tensor]
    parameters: list[Tensor]
    report: GraphReport


def train(model: nn.Module, rows: int = ROWS) -> Trained:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        loss = model(torch.full((rows, WIDTH), 0.1 * (step + 1 + rank()))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = [p.to_local().detach() for p in model.parameters()]
    return Trained(losses, parameters, graph_fsdp.inspect(model))


@functools.cache
def trained_alone() -> Trained:
    """By ranks that trace for themselves."""
    return train(compiled(False))


def check_same(one: Trained, two: Trained) -> None:
    assert all(map(torch.equal, one.losses, two.losses)) and all(map(torch.equal, one.parameters, two.parameters))
    for phase in ("forward", "backward"):
        a, b = one.report.latest(phase), two.report.latest(phase)
        assert a.program == b.program
        assert [(s.name, s.body) for s in a.stages.values()] == [(s.name, s.body) for s in b.stages.values()]


def own_folder() -> Path:
    """A folder of this rank, as ranks of different hosts have."""
    return shared_folder() / str(rank())


# The program is taken


@FACTS
def one_rank_traces_for_all_and_each_keeps_the_program() -> None:
    alone, folder = trained_alone(), own_folder()
    with watched() as seen:
        together = train(compiled(folder))
    assert seen.traces == (1 if rank() == 0 else 0)
    assert ("the programs of graph 0 are those of the first rank" in seen.log) == (rank() == 1)
    check_same(alone, together)
    with watched() as seen:
        again = train(compiled(folder))
    assert seen.traces == 0 and "the programs of graph 0 are those of an earlier start" in seen.log
    check_same(alone, again)


@FACTS
def the_same_file_is_written_on_each_host() -> None:
    folder = own_folder()
    train(compiled(folder))
    (path,) = folder.glob("*.json")
    texts: list[Any] = [None, None]
    dist.all_gather_object(texts, (path.name, path.read_text()))
    assert texts[0] == texts[1]


@FACTS
def a_rank_that_has_lost_its_folder_takes_what_the_first_one_has_found() -> None:
    folder, empty = own_folder(), own_folder()
    train(compiled(folder))
    with watched() as seen:
        train(compiled(folder if rank() == 0 else empty))
    assert seen.traces == 0
    assert ("the programs of graph 0 are those of the first rank" in seen.log) == (rank() == 1)


@FACTS
def further_graphs_are_traced_by_each_rank() -> None:
    model = compiled(own_folder())
    with watched() as seen:
        train(model)
        with torch.no_grad():
            model.eval()(torch.ones(ROWS, WIDTH))
    assert seen.traces == (2 if rank() == 0 else 1)


# The program is not taken


@FACTS
def a_rank_with_a_batch_of_its_own_traces_at_once() -> None:
    def wait_for_the_other() -> None:
        compat.default_store().wait(["traced with another batch"])

    rows, folder = ROWS + rank(), own_folder()
    alone = train(compiled(False), rows)
    traced = wait_for_the_other if rank() == 0 else lambda: compat.default_store().set("traced with another batch", "")
    with watched() as seen, before_the_partition(traced):
        together = train(compiled(folder), rows)
    check_same(alone, together)
    assert seen.traces == 1
    assert ("this rank traces: inputs differ from those of the first rank" in seen.log) == (rank() == 1)


@FACTS
def either_rank_may_keep_no_programs() -> None:
    folder = own_folder()
    for without in (0, 1):
        with watched() as seen:
            train(compiled(False if rank() == without else folder / str(without)))
        assert seen.traces == 1
        said = "this rank traces: the first rank makes no program that others can take" in seen.log
        assert said == (rank() == 1 and without == 0)


class Idle(GraphPass):
    """A pass of the user's, on which what the graphs are depends."""

    name = "idle"
    phases = ("forward", "backward")

    def run(self, graph: Graph, context: PassContext) -> None:
        pass


@FACTS
def ranks_with_passes_of_the_user_trace_for_themselves() -> None:
    passes = graph_fsdp.passes.default_pipeline().insert_after("bucket", Idle())
    folder = own_folder()
    with watched() as seen:
        train(compiled(folder, passes=passes))
    assert seen.traces == 1 and "the pass" in seen.log


class Viewing(MLP):
    """Its program cannot be kept, which is known once it is traced."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, out.view(-1)


@FACTS
def a_program_that_cannot_be_written_down_is_made_on_all_ranks() -> None:
    folder = own_folder()
    with watched() as seen:
        outputs, _ = compiled(folder, Viewing)(torch.ones(ROWS, WIDTH))
        outputs.sum().backward()
    assert seen.traces == 1
    assert ("this rank traces: the first rank has sent no program" in seen.log) == (rank() == 1)


@FACTS
def ranks_of_a_mesh_too_large_for_one_store_trace_for_themselves() -> None:
    most, sharing.MOST_RANKS = sharing.MOST_RANKS, 1
    try:
        with watched() as seen:
            train(compiled(own_folder()))
    finally:
        sharing.MOST_RANKS = most
    assert seen.traces == 1


@FACTS
def a_program_too_long_for_the_store_is_made_on_all_ranks() -> None:
    before, sharing.MOST_CHARACTERS = sharing.MOST_CHARACTERS, 100
    folder = own_folder()
    try:
        with watched() as seen:
            train(compiled(folder))
    finally:
        sharing.MOST_CHARACTERS = before
    assert seen.traces == 1
    assert ("is not sent to other ranks: it has" in seen.log) == (rank() == 0)


# The first rank fails


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(x))


@FACTS
def a_model_that_cannot_be_compiled_is_the_same_error_on_all_ranks() -> None:
    model, x = compiled(own_folder(), Sparse), torch.ones(ROWS, dtype=torch.long)
    with watched() as seen:
        for attempt in (1, 2):
            with pytest.raises(graph_fsdp.UnsupportedError, match=r"'embedding\.weight' is a sparse tensor"):
                model(x)
            assert seen.traces == attempt, "which each rank has found by itself"
    assert ("the first rank has sent no program" in seen.log) == (rank() == 1)


def check_failing_once(error: BaseException) -> None:
    """The first rank fails alone, and comes again: the other has gone on without its program."""
    failures = [error]

    def fail() -> None:
        if rank() == 0 and failures:
            raise failures.pop()

    alone, folder = trained_alone(), own_folder()
    model = compiled(folder)
    with watched() as seen, before_the_partition(fail):
        if rank() == 0:
            with pytest.raises(BaseException, match="no more"):
                model(torch.full((ROWS, WIDTH), 0.1))
        together = train(model)
    check_same(alone, together)
    assert seen.traces == (2 if rank() == 0 else 1)


@FACTS
def a_first_rank_that_raises_holds_nobody() -> None:
    check_failing_once(MemoryError("no more"))


@FACTS
def a_first_rank_that_is_interrupted_holds_nobody() -> None:
    check_failing_once(KeyboardInterrupt("no more"))


@FACTS
def patience_with_a_first_rank_has_an_end() -> None:
    """It goes on when the other rank has traced."""

    def meet() -> None:
        if rank() == 0:
            compat.default_store().wait(["has traced without patience"])
        compat.default_store().set("has traced without patience", "")

    before, sharing.PATIENCE_SECONDS = sharing.PATIENCE_SECONDS, 0.5
    alone, folder = trained_alone(), own_folder()
    try:
        with watched() as seen, before_the_partition(meet):
            together = train(compiled(folder))
    finally:
        sharing.PATIENCE_SECONDS = before
    check_same(alone, together)
    assert seen.traces == 1
    assert ("the first rank has said nothing for" in seen.log) == (rank() == 1)


test_on_two_ranks = FACTS.on(2)


def kill_the_first_rank(folder: str) -> str:
    """What the other rank says, which waits for the program."""
    agreement.PATIENCE_SECONDS = 0.3
    torch.set_num_threads(1)
    model = compiled(folder)
    with before_the_partition(lambda: os.kill(os.getpid(), signal.SIGKILL)):
        try:
            model(torch.ones(ROWS, WIDTH))
        except graph_fsdp.RankFailure as error:
            return str(error)
    raise AssertionError("the first rank lives")


def test_a_first_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    (error,) = run_ranks(kill_the_first_rank, 2, str(tmp_path), lost=[0])
    assert "the wait for others to compile with this rank" in error
    assert "rank 0: its process" in error and "has ended" in error


def traces_of_meshes(folder: str) -> list[int]:
    """How often this rank traces a model on all ranks as replicas of shards, and one on half of them."""
    torch.set_num_threads(1)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    traces = []
    for name, part in (("whole", mesh), ("half", mesh["dp_shard"])):
        alone = train(compiled(False, mesh=part))
        with watched() as seen:
            together = train(compiled(f"{folder}/{name} of {rank()}", mesh=part))
        traces.append(seen.traces)
        check_same(alone, together)  # whose stages this rank makes, now that somebody looks
    return traces


def test_the_first_rank_of_each_mesh_traces(tmp_path: Path) -> None:
    assert run_ranks(traces_of_meshes, 4, str(tmp_path)) == [[1, 1], [0, 0], [0, 1], [0, 0]]
