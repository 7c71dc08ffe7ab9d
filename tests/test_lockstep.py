"""Ranks that are about to run different programs say so, also where each of these was run before; nothing hangs.

What leaves ranks in different places of their process group is followed by a new one (``rounds``).
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import RankDisagreement
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.ranks import agreement
from graph_fsdp.runtime.ranks.lockstep import Lockstep

FACTS = Facts(__name__)


def rank() -> int:
    return dist.get_rank()


class ChosenByData(nn.Module):
    """In pieces: which layer runs is data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layers[0](x)
        return self.layers[1](x)


class Branching(nn.Module):
    """Three layers, of which a forward takes the one that it is told; which one is Python's decision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.layers = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 4), "c": nn.Linear(8, 8, bias=False)})

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.layers[branch](torch.relu(self.stem(x)))


def branching() -> tuple[nn.Module, nn.Module]:
    """Compiled, and as it was."""
    torch.manual_seed(0)
    model, reference = Branching(), Branching()
    reference.load_state_dict(model.state_dict())
    return graph_fsdp.compile(model, backend="eager", auto_wrap_policy={nn.Linear}), reference


def batch(of_rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + of_rank))


def step(model: nn.Module, branch: str) -> None:
    model(batch(rank()), branch).square().mean().backward()


def lockstep(model: nn.Module) -> Lockstep:
    return engine_of(model).schedules.lockstep


def disagree(run: Callable[[], object], *words: str) -> str:
    with pytest.raises(RankDisagreement) as raised:
        run()
    message = str(raised.value)
    assert [word for word in words if word not in message] == [], message
    return message


# What all ranks have in common is predicted, and asks nobody


@FACTS
def a_training_loop_asks_nobody_after_its_third_program() -> None:
    model = graph_fsdp.compile(MLP(depth=1), backend="eager")
    counts = []
    for _ in range(4):
        model(torch.ones(4, 16)).sum().backward()
        counts.append(lockstep(model).comparisons)
    assert counts == [2, 3, 3, 3]
    dist.barrier()
    names = [f"graph_fsdp/0-1/programcompiling{number}" for number in range(4)]
    found = [name for name in names if lockstep(model).store.check([name])]
    dist.barrier()  # the other rank would compile the next fact's model
    assert not found, "nobody compiles any more"


@FACTS
def patterns_are_predicted_once_they_were_seen() -> None:
    model, _ = branching()
    counts = []
    for _ in range(6):
        for branch in ("a", "b", "b"):
            step(model, branch)
        with torch.no_grad():
            model(batch(rank()), "c")
        counts.append(lockstep(model).comparisons)
    assert counts[-1] == counts[-2] == counts[-3]


@FACTS.long
def units_that_are_unsharded_in_every_step_are_predicted_too() -> None:
    model, _ = branching()
    counts = []
    for _ in range(4):
        model.stem.unshard()
        step(model, "a")
        counts.append(lockstep(model).comparisons)
    assert counts[0] > 0 and counts[-1] == counts[-2] == counts[-3]


@FACTS
def branches_that_all_ranks_take_train_as_in_one_process_and_different_ones_are_an_error() -> None:
    model, reference = branching()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    for number, branch in enumerate("abacbbca"):
        model(batch(rank(), number), branch).square().mean().backward()
        for other in range(2):
            (reference(batch(other, number), branch).square().mean() / 2).backward()
        without = [name for name, p in reference.named_parameters() if p.grad is None]
        assert without == [name for name, p in model.named_parameters() if p.grad is None] != []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for shard, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), parameter, rtol=1e-5, atol=1e-6)
    for branch in "aabbccc":  # all ranks know all graphs
        step(model, branch)
    words = (
        "ranks [1] are about to run the forward graph of model",
        "(Branching)",
        "entry 1 is",
        "on rank 1",
        "layers.b",
    )
    disagree(lambda: step(model, "ab"[rank()]), *words, "layers.a", "on rank 0", "take the same branches")
    step(model, "c")  # no rank has started anything: they may go on


@FACTS.long
def the_store_is_left_as_it_was() -> None:
    model, _ = branching()
    step(model, "a")
    before = lockstep(model).store.num_keys()
    step(model, "b")
    kept = lockstep(model).store.num_keys() - before
    before += kept
    for branch in ("bab", "aab", "bba"):
        for one in branch:
            step(model, one)
    dist.barrier()
    assert lockstep(model).store.num_keys() - before <= 8, "a comparison leaves nothing but the last verdict"


# Ranks that take different branches


@FACTS
def different_branches_in_the_first_step() -> None:
    model, _ = branching()
    words = ("about to run another program", "layers.a.weight", "layers.b.weight", "a rank's own data")
    disagree(lambda: step(model, "ab"[rank()]), *words)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@FACTS
def branches_on_data_in_a_model_of_pieces() -> None:
    model = graph_fsdp.compile(ChosenByData(), backend="eager", fullgraph=False, auto_wrap_policy={nn.Linear})
    different = torch.full((2, 8), 1.0 - 2 * rank())
    disagree(lambda: model(different), "gather_start layers.0", "gather_start layers.1", "a rank's own data")
    for sign in (1, -1, 1):
        model(torch.full((2, 8), float(sign))).sum().backward()
        assert [p.grad is not None for p in model.parameters()] == [sign > 0, sign > 0, sign < 0, sign < 0]
        model.zero_grad()
    other = graph_fsdp.compile(MLP(depth=1), backend="eager")
    other(torch.ones(4, 16))
    disagree(lambda: model(different), "gather_start layers.0", "gather_start layers.1", "take the same branches")


@FACTS
def different_models() -> None:
    models = [branching()[0] for _ in range(3)]
    for model in models:
        step(model, "a")
        step(model, "a")
    disagree(lambda: step(models[rank()], "a"), "(Branching) where rank 0 runs the forward graph of model")


@FACTS
def training_on_one_rank_and_evaluating_on_the_other() -> None:
    model, other = branching()[0], branching()[0]
    for _ in range(2):
        step(model, "a")
        with torch.no_grad():
            model(batch(0), "a")
    step(other, "a")

    def run() -> None:
        with torch.set_grad_enabled(rank() == 0):
            model(batch(0), "a")

    disagree(run, "the inference graph of model", "the forward graph of model", "train or evaluate together")


# What needs no other rank


def compilations(model: nn.Module) -> list[int]:
    """How often each rank has waited for others to compile: they find each other by it."""
    counts = [0, 0]
    dist.all_gather_object(counts, lockstep(model).compilations)
    return counts


@FACTS
def a_rank_alone_runs_a_model_that_is_whole() -> None:
    for before in (0, 2):
        for me in range(2):
            model, reference = branching()
            for _ in range(before):
                step(model, "a")
            copies = [copy.deepcopy(model) for _ in range(2)]
            for whole in (copies[1], model):
                with graph_fsdp.unsharded(whole), torch.no_grad():
                    if rank() == me:
                        for branch in "ab":
                            torch.testing.assert_close(whole(batch(0), branch), reference(batch(0), branch))
                    dist.barrier()
                    whole(batch(rank()), "b")  # which a rank has compiled
            for each in (copies[0], model, copies[1]):
                for branch in "ab":
                    step(each, branch)
            with graph_fsdp.unsharded(model):
                step(model, "a")  # reduces
            assert [engine_of(each).schedules.index.partition(".")[2] for each in copies] == ["0", "1"]
            counts = compilations(model)
            assert counts[0] == counts[1]


@FACTS
def a_rank_alone_runs_a_unit_that_is_whole() -> None:
    for frozen in (False, True):
        model, _ = branching()
        model.requires_grad_(not frozen)
        with graph_fsdp.unsharded(model.stem):
            if rank() == 0:
                with torch.set_grad_enabled(frozen):
                    model.stem(batch(0))
            dist.barrier()
        with torch.no_grad():
            model(batch(0), "a")


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return torch.relu(x) if skips else self.layer(x)


@FACTS
def graphs_without_collectives_are_compared_where_ranks_come_together() -> None:
    model = graph_fsdp.compile(Skipping(), backend="eager")
    with graph_fsdp.unsharded(model), torch.no_grad():
        if rank() == 0:
            model(batch(0), False)
        dist.barrier()
    for skips in (True, False):
        with torch.no_grad():
            model(batch(0), skips)
    counts = compilations(model)
    assert counts[0] == counts[1]


# One rank does what is predicted, and waits in its first collective: rank 0 each time. At its end a process waits for
# what is under way (torch 2.9), until the other process has gone.


def rounds(*functions: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Each function with a process group of its own: the ranks of the one before have lost each other."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, dist.get_world_size(), is_master=False)
    me, size = rank(), dist.get_world_size()
    for function in functions:
        torch._dynamo.reset()
        dist.destroy_process_group()
        prefix = dist.PrefixStore(f"{function.__name__}", store)
        dist.init_process_group("gloo", store=prefix, rank=me, world_size=size)
        yield function


def one_rank_takes_another_branch_that_was_agreed_to_before() -> None:
    model, _ = branching()
    for branch in "aabb":
        step(model, branch)
    words = ("the forward graph of model", "layers.a", "layers.b", "rank 0 runs", "ranks [1] are about to run")
    disagree(lambda: step(model, "ba"[rank()]), *words)
    disagree(lambda: step(model, "b"), "rank 0 runs")  # collectives of the ranks do not match any more


def one_rank_alone_freezes_a_layer() -> None:
    model, _ = branching()
    for _ in range(2):
        step(model, "a")
    if rank() == 1:
        model.layers["a"].requires_grad_(False)
    words = ("rank 0 runs the forward graph of model", "rank 1 compiles a graph that no rank has run before")
    disagree(lambda: step(model, "a"), *words, "freeze the same parameters")


def one_rank_compiles_where_the_other_runs_what_was_not_predicted() -> None:
    model, _ = branching()
    for branch in "aabb":
        step(model, branch)
    words = ("rank 0 is about to run the forward graph", "rank 1 compiles a graph that no rank has run before")
    disagree(lambda: step(model, "ac"[rank()]), *words)


def one_rank_alone_evaluates() -> None:
    model, _ = branching()
    with torch.no_grad():
        model(batch(0), "a")
    for _ in range(3):
        step(model, "a")
    words = ("rank 0 runs the forward graph", "run the inference graph of model")
    with torch.set_grad_enabled(rank() == 0):
        disagree(lambda: model(batch(0), "a"), *words)


def one_rank_leaves_out_a_backward() -> None:
    model, _ = branching()
    for _ in range(2):
        step(model, "a")
    loss = model(batch(0), "a").sum()
    words = ("rank 0 runs the backward graph", "ranks [1] are about to run the forward graph")
    disagree(loss.backward if rank() == 0 else lambda: model(batch(0), "a"), *words)


def one_rank_alone_unshards() -> None:
    model, _ = branching()
    for _ in range(2):
        step(model, "a")
    words = ("rank 0 runs the forward graph", "ranks [1] are about to run unshard() of unit 'stem' of model")
    disagree(lambda: step(model, "a") if rank() == 0 else model.stem.unshard(), *words)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@FACTS
def zz_one_rank_waits_in_a_collective() -> None:
    agreement.PATIENCE_SECONDS = 0.3
    functions = (
        one_rank_takes_another_branch_that_was_agreed_to_before,
        one_rank_alone_freezes_a_layer,
        one_rank_compiles_where_the_other_runs_what_was_not_predicted,
        one_rank_alone_evaluates,
        one_rank_leaves_out_a_backward,
        one_rank_alone_unshards,
    )
    for function in rounds(*functions):
        function()


test_on_two_ranks = FACTS.on(2)


def test_a_process_alone_keeps_step_with_nobody(fake_group: None) -> None:
    model, _ = branching()
    assert engine_of(model).schedules.lockstep is None
    step(model, "a")
    step(model, "b")
    assert re.search("all_gather_start", graph_fsdp.inspect(model).forward.stages["free"].code)
