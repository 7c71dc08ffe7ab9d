"""A broken model whose pieces share gathers: equal to one whose pieces do not, bit for bit, and to FSDP2 but for the
order of a sum: a gradient that two pieces contribute to is reduced once for each, and FSDP2 adds before it reduces.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP, WIDTH
from reference import fsdp2, gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)


class Stop(Exception):
    pass


class Broken(MLP):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.middle()
        return self.head(self.blocks[1](self.blocks[0](x)))

    @torch.compiler.disable
    def middle(self) -> None:
        if self.fails:
            raise Stop


def batch(step: int, rows: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, WIDTH, generator=generator)


def models(**options: Any) -> list[nn.Module]:
    """Three of equal values: one that shares; one that does not, for its budget; and FSDP2's."""
    shares, gathers, theirs = Broken(), Broken(), Broken()
    for other in (gathers, theirs):
        other.load_state_dict(shares.state_dict())
    fsdp2(theirs, mp_policy=options.get("mp_policy", MixedPrecisionPolicy()))
    options = {"backend": "eager", "fullgraph": False, **options}
    graph_fsdp.compile(shares, **options)
    graph_fsdp.compile(gathers, **options, passes=default_pipeline(budget=1 << 30))
    return [shares, gathers, theirs]


EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def train(models: list[nn.Module], steps: range, tolerances: tuple[dict[str, float], ...]) -> list[int]:
    """Losses, gradients and parameters of the first model are those of the others; its gathers per step."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    counter, gathers = engine_of(models[0]).counter, []
    for step in steps:
        counter.reset()
        losses = [model(batch(step)).square().mean() for model in models]
        for loss in losses:
            loss.backward()
        gathers.append(counter.collectives["all_gather"])
        for model, loss, tolerance in zip(models[1:], losses[1:], tolerances, strict=True):
            torch.testing.assert_close(losses[0], loss, **tolerance)
            for of in (gradients_of, parameters_of):
                found, expected = of(models[0]), of(model)
                for name, value in expected.items():
                    torch.testing.assert_close(found[name], value, **tolerance, msg=f"{step} {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gathers


@FACTS
def every_step_is_that_of_pieces_that_gather_for_themselves() -> None:
    """Also after Python between the pieces has raised."""
    found = models(reshard_after_forward=True)
    assert train(found, range(3), (EXACT, CLOSE)) == [8, 7, 7]
    found[0].fails = True  # type: ignore[assignment]
    with pytest.raises(Stop):
        found[0](batch(3))
    found[0].fails = False  # type: ignore[assignment]
    assert engine_of(found[0]).counter.current == 0
    assert train(found, range(3, 5), (EXACT, CLOSE)) == [7, 7]


@FACTS.long
def so_is_one_where_units_are_kept() -> None:
    assert train(models(reshard_after_forward=False), range(3), (EXACT, CLOSE)) == [4, 3, 3]


@FACTS.long
def in_bfloat16_too() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    assert train(models(mp_policy=policy)[:2], range(3), (EXACT,)) == [6, 5, 5]


@FACTS
def ranks_whose_batches_differ_share_alike() -> None:
    """Each rank compiles for its own sizes, at its own time, and both run the same collectives."""
    ours, _, theirs = models()
    counter, rank = engine_of(ours).counter, dist.get_rank()
    gathers = []
    for step, sizes in enumerate([(4, 4), (4, 4), (4, 6), (4, 4), (7, 4), (5, 6)]):
        counter.reset()
        x = batch(step, sizes[rank])
        outputs = [model(x).square().mean() for model in (ours, theirs)]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-7)
        for output in outputs:
            output.backward()
        gathers.append(counter.collectives["all_gather"])
    assert gathers == [6, 5, 5, 5, 5, 5]


class Augmented(MLP):
    """Before the model reads a parameter, Python of some ranks breaks the graph."""

    augments = False

    def forward(self, x: Tensor) -> Tensor:
        if self.augments:
            x = x.flip(-1)
            torch._dynamo.graph_break()
        return super().forward(x)


@FACTS
def a_piece_without_parameters_may_be_that_of_one_rank_alone() -> None:
    ours, theirs = Augmented(), Augmented()
    theirs.load_state_dict(ours.state_dict())
    ours.augments = theirs.augments = dist.get_rank() == 1
    fsdp2(theirs)
    graph_fsdp.compile(ours, backend="eager", fullgraph=False)
    for step in range(2):
        losses = [model(batch(step)).square().mean() for model in (ours, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7)
        for loss in losses:
            loss.backward()
    found = gradients_of(ours)
    for name, expected in gradients_of(theirs).items():
        torch.testing.assert_close(found[name], expected, **CLOSE, msg=name)
    lockstep, counts = engine_of(ours).schedules.lockstep, [0, 0]
    assert lockstep is not None
    dist.all_gather_object(counts, lockstep.compilations)
    assert counts[0] == counts[1], "ranks announce in the same numbers that they compile"


class Scaled(MLP):
    """Each text is another graph."""

    def forward(self, x: Tensor, scale: str = "1") -> Tensor:
        return super().forward(x) * int(scale)


@FACTS
def a_rank_with_more_graphs_than_another_gives_up_on_none() -> None:
    model = graph_fsdp.compile(Scaled(), backend="eager", fullgraph=False)
    for step in range(10):
        model(batch(0), f"{1 + step * dist.get_rank()}")
    kinds = [graph.cause.kind for graph in graph_fsdp.inspect(model).graphs]
    assert kinds == ["first", *["guard"] * (9 * dist.get_rank())]


@FACTS.long
def with_inductor_to_its_tolerance() -> None:
    ours, _, theirs = models(backend="inductor")
    assert train([ours, theirs], range(3), (CLOSE,)) == [6, 5, 5]


class Looked(MLP):
    """Code outside of graphs reads a weight, on the ranks that look."""

    looks = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        self.look()
        return self.head(x)

    @torch.compiler.disable
    def look(self) -> None:
        if self.looks:
            self.blocks[1].up.weight.sum()


@FACTS
def a_parameter_that_one_rank_alone_reads_is_an_error_on_both() -> None:
    model = graph_fsdp.compile(Looked(), backend="eager", fullgraph=False)
    model.looks = dist.get_rank() == 0
    with pytest.raises(graph_fsdp.RankDisagreement, match="are about to run another program"):
        model(batch(0))


class Steps(MLP):
    """A solver, which takes more steps on one rank than on another."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2 + 3 * dist.get_rank()):
            x = x + 0.1 * self.blocks[0](x)
        return self.head(self.blocks[1](x))


class StepsOfPython(Steps):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](self.solve(x)))

    @torch.compiler.disable
    def solve(self, x: Tensor) -> Tensor:
        for _ in range(2 + 3 * dist.get_rank()):
            x = x + 0.1 * self.blocks[0](x)
        return x


@FACTS
def each_rank_takes_as_many_steps_as_it_needs() -> None:
    """Outside of graphs, and in one, where the unit is gathered once for all steps."""
    for kind, fullgraph in ((StepsOfPython, False), (Steps, True)):
        model, plain = kind(), Steps()
        plain.load_state_dict(model.state_dict())
        graph_fsdp.compile(model, backend="eager", fullgraph=fullgraph)
        for step in range(2):
            for made in (model, plain):
                made(batch(step)).square().mean().backward()
            for (name, found), p in zip(model.named_parameters(), plain.parameters(), strict=True):
                dist.all_reduce(p.grad, dist.ReduceOp.AVG)
                torch.testing.assert_close(found.grad.full_tensor(), p.grad, msg=lambda m, n=name: f"{n}: {m}")
                found.grad = p.grad = None


test_on_two_ranks = FACTS.on(2)
