"""Ranks agree on what they are about to run before they run it: a difference is an error on each of them, not a hang.

Both ranks run each fact, in one launch for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from marks import mostly_long
from models import GPT, MLP, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

import graph_fsdp
from graph_fsdp import RankDisagreement
from graph_fsdp.passes import (
    BudgetError,
    Graph,
    GraphPass,
    PassContext,
    PassError,
    PassPipeline,
    Role,
    default_pipeline,
)
from graph_fsdp.runtime.ranks.agreement import agree, compare

FACTS = Facts(__name__)


def rank() -> int:
    return dist.get_rank()


# The comparison itself


@FACTS
def equal_entries_pass() -> None:
    agree("equal", ["gather blocks.0", "gather blocks.1"], [0, 1])
    agree("equal, again", [], [0, 1])


@FACTS
def different_entries_raise_on_every_rank() -> None:
    entries = ["gather blocks.0", f"gather blocks.{1 + rank()}", f"reduce blocks.{rank()}"]
    with pytest.raises(RankDisagreement) as raised:
        agree("different", entries, [0, 1])
    message = str(raised.value)
    assert "ranks [1] are about to run another program than rank 0 ('different')" in message
    assert "entry 1 is 'gather blocks.2' on rank 1 and 'gather blocks.1' on rank 0" in message
    assert "use the same model, options and passes on all ranks" in message


@FACTS.long
def a_sequence_that_ends_early_is_different() -> None:
    entries = ["gather blocks.0", "gather blocks.1"]
    with pytest.raises(RankDisagreement, match=r"entry 1 is 'gather blocks.1' on rank 1 and 'nothing' on rank 0"):
        agree("early end", entries[: 1 + rank()], [0, 1])


@FACTS
def a_rank_that_does_not_come_is_named() -> None:
    if rank() == 0:
        with pytest.raises(RankDisagreement, match=r"rank 0 waited 1 s for ranks \[1\] to compile 'alone'"):
            agree("alone", ["gather blocks.0"], [0, 1], timeout=1)
    dist.barrier()


@FACTS
def a_group_of_one_rank_has_nobody_to_ask() -> None:
    agree("one rank", [f"gather blocks.{rank()}"], [rank()], timeout=0.1)


# Compiled models


def batch() -> Tensor:
    return torch.ones(4, 16)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 5))


def disagree(model: nn.Module, *words: str, **options: Any) -> None:
    """The first step raises on both ranks, and the model has its shards."""
    graph_fsdp.compile(model, **{"backend": "eager", **options})
    with pytest.raises(RankDisagreement, match="about to run another program") as raised:
        model(batch())
    assert [word for word in words if word not in str(raised.value)] == [], str(raised.value)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@FACTS
def another_reshard_after_forward() -> None:
    words = ("'reshard_after_forward False' on rank 1", "'reshard_after_forward True' on rank 0")
    disagree(small(), *words, reshard_after_forward=rank() == 0)


@FACTS
def another_depth() -> None:
    disagree(MLP(depth=2 + rank()), "entry", "'bucket blocks.2")


@FACTS.long
def another_width() -> None:
    model = MLP()
    model.head = nn.Linear(16, 5 + 12 * rank())
    disagree(model, "parameter head.weight [17, 16] of unit root", "parameter head.weight [5, 16] of unit root")


@FACTS
def another_dtype() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if rank() else None)
    disagree(small(), "float32 float32 bfloat16", "float32 float32 float32", mp_policy=policy)


@FACTS.long
def another_form_of_regions() -> None:
    words = ("'regions whole' on rank 1", "'regions cut' on rank 0")
    disagree(MLP(), *words, backend="inductor", regions="whole" if rank() else "cut")


@FACTS.long
def another_backend() -> None:
    disagree(MLP(), "backend eager", "backend inductor", backend=("eager", "inductor")[rank()])


@FACTS.long
def another_grouping() -> None:
    disagree(MLP(), "'bucket blocks.0.up", auto_wrap_policy={nn.Linear} if rank() else None)


@FACTS.long
def another_bucket_size() -> None:
    disagree(MLP(), "'none'", "'unit'", passes=default_pipeline(bucket=("unit", "none")[rank()]))


@FACTS.long
def another_budget() -> None:
    disagree(MLP(), "budget=6000", "budget=7000", passes=default_pipeline(budget=6000 + 1000 * rank()))


@FACTS
def a_budget_that_is_too_small_is_the_same_error_on_every_rank() -> None:
    model = graph_fsdp.compile(MLP(depth=2), backend="eager", passes=default_pipeline(budget=1000))
    for _ in range(2):
        with pytest.raises(BudgetError, match=r"unit 'blocks.0' in the forward graph: .* 4,352 bytes"):
            model(batch())


class Extra(GraphPass):
    name = "extra"

    def run(self, graph: Graph, context: PassContext) -> None:
        return None


@FACTS
def another_pipeline() -> None:
    pipeline = default_pipeline()
    words = ("pass Extra('extra')", "pass AssignSlots('slots')")
    disagree(small(), *words, passes=pipeline.insert_after("free", Extra()) if rank() else pipeline)


class OfAProcess:
    """Looks otherwise in each process, as a function does, or the order of a set."""

    def __repr__(self) -> str:
        return f"<of rank {rank()}>"


@dataclass
class ADataclass(GraphPass):
    held: OfAProcess
    number: int
    name = "dataclass"

    def run(self, graph: Graph, context: PassContext) -> None:
        return None


@FACTS
def a_pass_that_is_a_dataclass_is_compared_by_its_plain_attributes() -> None:
    def passes(number: int) -> PassPipeline:
        return default_pipeline().insert_after("free", ADataclass(OfAProcess(), number))

    graph_fsdp.compile(small(), backend="eager", passes=passes(1))(batch())
    words = ("pass ADataclass('dataclass', number=1)", "pass ADataclass('dataclass', number=0)")
    disagree(small(), *words, passes=passes(rank()))


class Backwards(GraphPass):
    """A user's pass that reorders collectives on one rank only."""

    name = "backwards"
    requires = ("bucketed",)
    provides = ("scheduled",)

    def run(self, graph: Graph, context: PassContext) -> None:
        if rank() == 1 and graph.phase == "forward":
            first, second, *_ = graph.with_role(Role.GATHER_START)
            first.prepend(second)


@FACTS
def a_pass_that_reorders_collectives_on_one_rank() -> None:
    words = ("'forward gather_start blocks.1", "on rank 1", "'forward gather_start blocks.0", "on rank 0")
    words += ("blocks.1.up.weight", "scheduled by pass backwards")
    disagree(MLP(), *words, passes=default_pipeline().replace("prefetch", Backwards()))


class FailsOnTheFirstRank(GraphPass):
    name = "fails_on_the_first_rank"

    def run(self, graph: Graph, context: PassContext) -> None:
        if rank() == 0:
            raise ArithmeticError("of rank 0 alone")


@FACTS
def a_pass_that_fails_on_the_first_rank_is_an_error_on_all_at_once() -> None:
    passes = default_pipeline().insert_before("free", FailsOnTheFirstRank())
    model = graph_fsdp.compile(small(), backend="eager", passes=passes)
    expected = (PassError, "of rank 0 alone") if rank() == 0 else (RankDisagreement, "rank 0 failed to schedule")
    with pytest.raises(expected[0], match=expected[1]):
        model(batch())


@FACTS.long
def another_distance() -> None:
    disagree(MLP(depth=4), "distance=3", "distance=0", passes=default_pipeline(prefetch=rank() * 3))


@FACTS
def another_group_for_reductions() -> None:
    model: Any = graph_fsdp.compile(small(), backend="eager")
    model.set_separate_reduce_scatter_group(True)
    model.set_separate_reduce_scatter_group(rank() == 0)
    with pytest.raises(RankDisagreement, match="'settings own_reduce_group=True' on rank 0"):
        model(batch())


@FACTS
def another_divide_factor() -> None:
    model: Any = graph_fsdp.compile(small(), backend="eager")
    model.set_gradient_divide_factor(2.0 + rank())
    with pytest.raises(RankDisagreement, match="divide_factors"):
        model(batch())


@FACTS
def a_frozen_parameter_on_one_rank() -> None:
    model = small()
    model[0].weight.requires_grad_(rank() == 0)
    disagree(model, "parameter 0.weight", "frozen")


@FACTS.long
def the_ranks_may_go_on_with_another_model() -> None:
    model = graph_fsdp.compile(small(), backend="eager")
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Recompiling alone


Batches = Callable[[int, int, int], Tensor]  # of a step, a rank and a length


def tokens(step: int, rank: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(2 * step + rank))


def rows(step: int, rank: int, length: int) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: nn.Module, batches: Batches, lengths: list[tuple[int, ...]], **options: Any) -> None:
    """Steps with batches of these lengths on the ranks: as many graphs as each needs, and the same training as on
    one process that sees all ranks' batches."""
    reference = copy.deepcopy(model)
    graph_fsdp.compile(model, backend="eager", **options)
    optimizers = [AdamW(m.parameters(), lr=1e-2, foreach=True) for m in (model, reference)]
    captured = []
    for step, of_rank in enumerate(lengths):
        model(batches(step, rank(), of_rank[rank()])).logsumexp(-1).mean().backward()
        for other, length in enumerate(of_rank):
            (reference(batches(step, other, length)).logsumexp(-1).mean() / len(of_rank)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        captured.append(len(graph_fsdp.inspect(model).graphs))
    of_ranks: list[list[int]] = [[] for _ in lengths[0]]
    dist.all_gather_object(of_ranks, captured)
    assert any(of_rank != captured for of_rank in of_ranks), "one rank has compiled when another has not"
    for shard, parameter in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(shard.full_tensor(), parameter, rtol=1e-5, atol=2e-6)


@FACTS
def a_rank_with_other_lengths_recompiles_alone() -> None:
    train(GPT(depth=1), tokens, [(8, 8), (8, 5), (8, 6), (8, 7), (8, 3), (8, 2), (8, 8), (8, 4)])


@FACTS.long
def ranks_take_turns_to_recompile() -> None:
    lengths = [(8, 7), (6, 7), (6, 5), (4, 5), (4, 3), (8, 3), (8, 7), (2, 7)]
    train(GPT(depth=1), tokens, lengths, dynamic=False, reshard_after_forward=True)


def train_with_other_lengths_on_every_rank(steps: int) -> None:
    """Every step other lengths on every rank; rank 1 alone compiles again for each, and its own shapes decide where
    its gathers start."""
    torch.manual_seed(0)
    world = dist.get_world_size()
    lengths = [tuple(2 + (3 * step + 5 * index) % 8 for index in range(world)) for step in range(steps)]
    passes = default_pipeline(bucket=4096, budget=10_000)
    train(MLP(), rows, lengths, dynamic=None if rank() != 1 else False, passes=passes, reshard_after_forward="auto")


@pytest.mark.parametrize(("world_size", "steps"), mostly_long([(2, 5), (4, 5)], [(2, 5)]))
def test_ranks_with_other_lengths_in_every_step_train_alike(world_size: int, steps: int) -> None:
    run_ranks(train_with_other_lengths_on_every_rank, world_size, steps)


def change_settings_on_rank_1() -> None:
    model: Any = graph_fsdp.compile(small(), backend="eager")
    for step in range(6):
        model.set_force_sum_reduction_for_comms(step % 2 == 1)
        model(batch()).sum().backward()
    model.set_force_sum_reduction_for_comms(rank() == 1)  # both graphs are known to both
    with pytest.raises(RankDisagreement, match=r"settings summed=\[''\]"):
        model(batch())


def test_another_setting_between_steps() -> None:
    run_ranks(change_settings_on_rank_1, 2)


def make_a_group_on_rank_0() -> None:
    model: Any = graph_fsdp.compile(small(), backend="eager")
    model(batch()).sum().backward()
    with pytest.raises(RankDisagreement, match=r"set_separate_reduce_scatter_group\(\) call of model 0"):
        if rank() == 0:
            model.set_separate_reduce_scatter_group(True)
        else:
            model(batch())


def test_a_process_group_is_made_by_all_ranks() -> None:
    run_ranks(make_a_group_on_rank_0, 2)


def train_one_more_on_rank_0() -> None:
    groups = [dist.new_group([index]) for index in range(2)]
    if rank() == 0:
        teacher = graph_fsdp.compile(small(), DeviceMesh.from_group(groups[0], "cpu"), backend="eager")
        teacher(batch()).sum().backward()
    the_ranks_may_go_on_with_another_model()


def test_a_rank_may_have_a_model_of_its_own() -> None:
    run_ranks(train_one_more_on_rank_0, 2)


test_on_two_ranks = FACTS.on(2)


def come(store: dist.Store, rank: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """A rank of two that waits for nobody; its verdict."""
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return compare(store, "here", (0, 1), "mine", lambda _: "together", lambda late: f"without {late}", 0.0)


def test_the_first_verdict_counts_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert come(store, 0, monkeypatch) == "without [1]"
    store.compare_set("here/verdict", "", "together")  # of a rank that comes as another one gives up
    assert come(store, 1, monkeypatch) == "without [1]"


def test_ranks_that_all_came_need_no_verdict_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    store.set("here/1", "mine")  # it was killed before it could compare
    assert come(store, 0, monkeypatch) == "together"
