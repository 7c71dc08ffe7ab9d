"""A rank raises in the middle of a step. Where all ranks raise, all may go on; where one does, all are told which.

Two ranks are shared by what all of them do: what leaves them out of step is followed by a new process group."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from models import MLP
from struck import FAULTS, Struck, assert_whole, batch, caught, compiled, rank, rounds, step, warm
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp import RankDisagreement, RankFailure, compat
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.ranks import failure
from graph_fsdp.runtime.regions.regions import RegionCache

FACTS = Facts(__name__)


class Broken(Exception):
    """Of the user's code."""


def fail() -> None:
    raise Broken("no such sample")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # Python handles a signal between two of its instructions
        pass


def reference_gradients() -> list[Tensor]:
    """Of one step on both ranks' batches, in one process."""
    torch.manual_seed(0)
    model = Struck(depth=3)
    for other in range(dist.get_world_size()):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(other))
        (model(x).square().mean() / dist.get_world_size()).backward()
    return [p.grad for p in model.parameters()]


def trains_on(model: nn.Module) -> None:
    """The next step has the gradients that it would have had without a fault."""
    model.zero_grad()
    step(model)
    for p, expected in zip(model.parameters(), reference_gradients(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), expected, rtol=1e-5, atol=1e-6)


# All ranks raise, and go on


def raises_in_forward(model: nn.Module, region: int) -> None:
    FAULTS["forward"] = fail
    error = caught(lambda: step(model))
    assert error.args == ("no such sample",) and type(error) is Broken
    where = f"region {region} (unit blocks.0) of the forward graph of model {engine_of(model).schedules.index} (Struck)"
    noted = (None, [f"raised on rank {rank()} in {where}"])  # Python 3.10 has no notes
    assert getattr(error, "__notes__", None) in noted


def all_ranks_raise_in_forward(model: nn.Module) -> None:
    shards = list(model.parameters())
    for _ in range(2):
        raises_in_forward(model, region=3)
        assert_whole(model, shards)
        trains_on(model)


def all_ranks_raise_where_a_unit_is_whole(model: nn.Module) -> None:
    model.blocks[2].unshard()
    raises_in_forward(model, region=3)
    model.blocks[2].reshard()
    trains_on(model)


def all_ranks_raise_in_backward(model: nn.Module) -> None:
    shards = list(model.parameters())
    FAULTS["backward"] = fail
    error = caught(lambda: step(model))
    assert type(error) is Broken
    assert all(p.grad is None for p in shards), "a backward that raises gives no part of its gradients"
    assert_whole(model, shards)
    trains_on(model)


def after_all_ranks_raised_nothing_is_compared_any_more(model: nn.Module) -> None:
    lockstep = engine_of(model).schedules.lockstep
    FAULTS["forward"] = fail
    caught(lambda: step(model))
    warm(model, steps=4)
    before = lockstep.comparisons
    warm(model, steps=4)
    assert lockstep.comparisons == before
    assert lockstep.failures.mine is None


def all_ranks_raise_in_the_loss(model: nn.Module) -> None:
    shards = list(model.parameters())

    def raising() -> None:
        model(batch())
        fail()

    assert type(caught(raising)) is Broken
    assert_whole(model, shards)
    trains_on(model)


def all_ranks_raise_in_a_hook_on_a_gradient(model: nn.Module) -> None:
    shards = list(model.parameters())
    handle = model.head.weight.register_post_accumulate_grad_hook(lambda p: fail())
    assert type(caught(lambda: step(model))) is Broken
    handle.remove()
    assert_whole(model, shards)
    trains_on(model)


def all_ranks_raise_in_a_hook_on_reductions(model: nn.Module) -> None:
    shards = list(model.parameters())
    FAULTS["hook"] = fail
    assert type(caught(lambda: step(model))) is Broken
    assert_whole(model, shards)
    trains_on(model)


@FACTS
def an_index_outside_of_a_table_on_all_ranks() -> None:
    model = graph_fsdp.compile(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), backend="eager")
    right = torch.tensor([1, 2])
    for _ in range(3):
        model(right).sum().backward()
    shards = list(model.parameters())
    error = caught(lambda: model(torch.tensor([1, 9])))
    assert isinstance(error, IndexError) and "out of range" in str(error)
    assert_whole(model, shards)
    model(right).sum().backward()


def a_keyboard_interrupt_between_start_and_wait_of_a_gather_on_all_ranks(model: nn.Module) -> None:
    (region,) = [i for i, line in enumerate(source(model)) if "region_3(" in line]
    started = [line for line in source(model)[:region] if "gather_start" in line]
    waited = [line for line in source(model)[:region] if "frame.wait" in line]
    assert len(started) > len(waited), "a gather is under way where the signal comes"
    shards = list(model.parameters())
    FAULTS["forward"] = interrupt
    assert type(caught(lambda: step(model))) is KeyboardInterrupt
    assert_whole(model, shards)
    trains_on(model)


def source(model: nn.Module) -> list[str]:
    return graph_fsdp.inspect(model).forward.program.splitlines()


def with_little_memory(function: Callable[[], object]) -> Callable[[], object]:
    """``function`` with no more than 24 MiB of memory that the process does not have yet."""

    def run() -> None:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), before[1]))
        try:
            function()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    return run


LARGE = 1 << 18  # rows, of which a block makes activations of 32 MiB


def compiled_for_any_rows() -> nn.Module:
    """With enough memory; a larger batch then compiles nothing."""
    model = warm(compiled())
    with torch.no_grad():
        for rows in (1000, 2000):
            model(batch(rows))
    return model


@FACTS
def out_of_memory_in_a_region_on_all_ranks() -> None:
    model, large = compiled_for_any_rows(), batch(LARGE)
    with torch.no_grad():
        shards = list(model.parameters())
        error = caught(with_little_memory(lambda: model(large)))
        assert isinstance(error, (RuntimeError, MemoryError)) and "memory" in str(error), repr(error)
        assert_whole(model, shards)
        model(large)
    trains_on(model)


TOGETHER = (
    all_ranks_raise_in_forward,
    all_ranks_raise_where_a_unit_is_whole,
    all_ranks_raise_in_backward,
    after_all_ranks_raised_nothing_is_compared_any_more,
    all_ranks_raise_in_the_loss,
    all_ranks_raise_in_a_hook_on_a_gradient,
    all_ranks_raise_in_a_hook_on_reductions,
    a_keyboard_interrupt_between_start_and_wait_of_a_gather_on_all_ranks,
)


@FACTS
def all_ranks_raise() -> None:
    """One model lives through all of it."""
    model = compiled()
    model.set_all_reduce_hook(lambda reduced: FAULTS.pop("hook", lambda: None)())
    warm(model, steps=5)
    assert all(thread.name != "graph_fsdp watch" for thread in threading.enumerate()), "hosts wait, and look"
    for function in TOGETHER:
        model.zero_grad()
        function(model)


# One rank raises, and the others are told


def one_raises(model: nn.Module, run: Callable[[], object], kind: type[BaseException], *words: str) -> None:
    """``run`` raises on rank 1 by itself. Rank 0 waits for it, and is told; so is rank 1, once it tries to go on."""
    shards = list(model.parameters())
    error = caught(run)
    assert_whole(model, shards)
    if rank() == 1:
        assert isinstance(error, kind), repr(error)
        again = caught(lambda: step(model))
    else:
        again = error
    assert isinstance(again, RankFailure), repr(again)
    missing = [word for word in ("rank 1", "start all ranks again", *words) if word not in str(again)]
    assert not missing, f"{missing} not in: {again}"
    assert isinstance(caught(lambda: step(model)), RankFailure)
    assert_whole(model, shards)


def one_rank_raises_in_forward() -> None:
    model = warm(compiled())
    if rank() == 1:
        FAULTS["forward"] = fail
    where = "rank 1 raised Broken: no such sample in region 3 (unit blocks.0) of the forward graph of model"
    one_raises(model, lambda: step(model), Broken, where, "(Struck)")


def one_rank_raises_in_backward() -> None:
    model = warm(compiled())
    if rank() == 1:
        FAULTS["backward"] = fail
    one_raises(model, lambda: step(model), Broken, "Broken: no such sample in region", "of the backward graph of")


def one_rank_raises_in_a_hook_on_reductions() -> None:
    model = compiled()
    model.set_all_reduce_hook(lambda reduced: FAULTS.pop("hook", lambda: None)())
    warm(model)
    if rank() == 1:
        FAULTS["hook"] = fail
    one_raises(model, lambda: step(model), Broken, "Broken: no such sample in hook of the backward graph of")


def one_rank_is_interrupted_between_start_and_wait() -> None:
    model = warm(compiled())
    if rank() == 1:
        FAULTS["forward"] = interrupt
    one_raises(model, lambda: step(model), KeyboardInterrupt, "rank 1 raised KeyboardInterrupt in region 3")


def one_rank_is_out_of_memory() -> None:
    model, large = compiled_for_any_rows(), batch(LARGE)
    with torch.no_grad():
        run = lambda: model(large)  # noqa: E731
        one_raises(model, with_little_memory(run) if rank() == 1 else run, RuntimeError, "memory", "in region")


def one_rank_raises_before_its_program_and_does_not_come_back() -> None:
    """In Python between two pieces of a forward."""

    class Between(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            torch._dynamo.graph_break()
            happened()
            return self.head(self.blocks[1](x))

    @torch.compiler.disable
    def happened() -> None:
        FAULTS.pop("between", lambda: None)()

    model = graph_fsdp.compile(Between(), backend="eager", fullgraph=False)
    warm(model)
    shards = list(model.parameters())
    failure.RETRY_SECONDS = 0.5
    try:
        if rank() == 1:
            FAULTS["between"] = fail
            assert type(caught(lambda: step(model))) is Broken
            key = "raised on rank 0"
            compat.default_store().wait([key])  # it does something else
        else:
            error = caught(lambda: step(model))
            assert isinstance(error, RankFailure) and "rank 1 raised Broken: no such sample in forward" in str(error)
            compat.default_store().set("raised on rank 0", "")
    finally:
        failure.RETRY_SECONDS = 60.0
    assert_whole(model, shards)


def one_rank_raises_when_its_backward_is_compiled() -> None:
    """Which is in the first backward, outside of a forward: the others have begun theirs."""
    model = compiled()
    shards, make = list(model.parameters()), RegionCache.cut
    RegionCache.cut = lambda self, graph: fail() if graph.phase == "backward" else make(self, graph)  # type: ignore
    failure.RETRY_SECONDS, key = 0.5, "told of a backward"
    try:
        if rank() == 1:
            assert type(caught(lambda: step(model))) is Broken
            compat.default_store().wait([key])  # it does something else
        else:
            RegionCache.cut = make  # type: ignore[method-assign]
            error = caught(lambda: step(model))
            compat.default_store().set(key, "")
            assert isinstance(error, RankFailure) and "rank 1 raised Broken: no such sample in backward" in str(error)
    finally:
        failure.RETRY_SECONDS, RegionCache.cut = 60.0, make  # type: ignore[method-assign]
    assert_whole(model, shards)


def one_rank_raises_before_its_program_and_comes_back() -> None:
    """The others wait for it: nothing was started, and nothing is lost."""
    model = warm(compiled())
    if rank() == 1:
        assert isinstance(caught(lambda: model("no tensor")), Exception)
        assert engine_of(model).schedules.lockstep.failures.mine is not None
    trains_on(model)
    assert engine_of(model).schedules.lockstep.failures.mine is None


def ranks_raise_in_different_places() -> None:
    """Of one program: rank 1 has started a gather that rank 0 has not."""
    model = warm(compiled())
    FAULTS["later" if rank() == 1 else "forward"] = fail
    shards = list(model.parameters())
    first = caught(lambda: step(model))
    assert type(first) is Broken, repr(first)
    for _ in range(2):
        again = caught(lambda: step(model))
        assert isinstance(again, (RankFailure, RankDisagreement)), repr(again)
        assert "start all ranks again" in str(again)
    assert_whole(model, shards)


ALONE = (
    one_rank_raises_in_forward,
    one_rank_raises_before_its_program_and_comes_back,
    one_rank_raises_when_its_backward_is_compiled,
    one_rank_raises_in_backward,
    one_rank_raises_in_a_hook_on_reductions,
    one_rank_is_interrupted_between_start_and_wait,
    one_rank_is_out_of_memory,
    one_rank_raises_before_its_program_and_does_not_come_back,
    ranks_raise_in_different_places,
)
FIRST = 3  # of them, in the launch of the facts


@FACTS
def zz_one_rank_raises() -> None:
    for function in rounds(*ALONE[:FIRST]):
        function()


def others_raise() -> None:
    """On a rank."""
    torch.set_num_threads(1)
    for function in rounds(*ALONE[FIRST:]):
        function()


test_on_two_ranks = FACTS.on(2)


@pytest.mark.long
def test_one_rank_raises_elsewhere() -> None:
    run_ranks(others_raise, 2, timeout=240)
