"""Ranks that die or stop: the others end with an error that names them, and have their shards.

Each test has ranks of its own, of which some do not come back.
"""

from __future__ import annotations

import datetime
import os
import signal

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from struck import FAULTS, assert_whole, caught, compiled, rank, start_group, step, warm

import graph_fsdp
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.ranks import agreement, failure

TIMEOUT = 10.0  # of collectives


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_rank_1(where: str, how: str) -> tuple[str, str]:
    """Train until rank 1 is lost: what a survivor's step says, and what the one after it says."""
    torch.set_num_threads(1)
    start_group(TIMEOUT)
    model = warm(compiled())
    assert engine_of(model).schedules.lockstep.timeout == TIMEOUT - TIMEOUT / 10
    shards = list(model.parameters())
    if rank() == 1:
        FAULTS[where] = {"die": die, "stop": stop}[how]
    # Without an end of its own, a step would wait for half an hour, and the launch end before that.
    error = caught(lambda: step(model))
    assert isinstance(error, graph_fsdp.RankFailure), repr(error)
    assert_whole(model, shards)
    again = caught(lambda: step(model))
    assert isinstance(again, graph_fsdp.RankFailure)
    assert_whole(model, shards)
    model.state_dict()
    return str(error), str(again)


@pytest.mark.parametrize(("where", "world_size"), [("forward", 2), pytest.param("backward", 4, marks=pytest.mark.long)])
def test_a_rank_is_killed(where: str, world_size: int) -> None:
    for error, again in run_ranks(lose_rank_1, world_size, where, "die", backend=None, lost=[1]):
        assert "rank 1: its process" in error and "has ended" in error
        assert f"the {where} graph of model 0 (Struck)" in error, "which program"
        assert "of bucket " in error, "which collective"
        assert "start all ranks again from the last complete checkpoint" in error
        assert again == error


@pytest.mark.long
def test_a_rank_is_stopped_for_longer_than_the_timeout() -> None:
    ((error, _),) = run_ranks(lose_rank_1, 2, "forward", "stop", backend=None, lost=[1])
    assert "ranks [1] do not take part (rank 1: its process" in error and "is stopped)" in error
    assert "Timed out waiting" in error, "what gloo says is kept"


def lose_a_rank_of_another_host(group_timeout: float) -> str:
    """The kernel of this host knows nothing of rank 1."""
    torch.set_num_threads(1)
    agreement.PATIENCE_SECONDS = 0.3
    failure.ROLL_CALL_SECONDS = 1.0
    failure.kernel_of_host = lambda: [f"host {os.environ['RANK']}", ""]
    start_group(group_timeout)
    model = warm(compiled())
    if rank() == 1:
        FAULTS["forward"] = stop
    error = caught(lambda: step(model))
    return str(error)


@pytest.mark.long
def test_a_rank_of_another_host_does_not_answer() -> None:
    (error,) = run_ranks(lose_a_rank_of_another_host, 2, TIMEOUT, backend=None, lost=[1])
    assert "ranks [1] did not answer within 1 s: killed, stopped, out of reach, or busy" in error


def compile_without_rank_1(how: str) -> str:
    """Rank 1 ends before or in the first forward, for which ranks wait for each other to compile."""
    torch.set_num_threads(1)
    agreement.PATIENCE_SECONDS = 0.3
    start_group(100.0)
    model = compiled()
    dist.barrier()
    if rank() == 1:
        if how == "raises":
            caught(lambda: model("no batch"))
        die()
    error = caught(lambda: step(model))
    assert isinstance(error, graph_fsdp.RankFailure), repr(error)
    return str(error)


@pytest.mark.long
@pytest.mark.parametrize(("how", "why"), [("dies", "rank 1: its process"), ("raises", "rank 1 raised TypeError: ")])
def test_a_rank_ends_before_others_compile_with_it(how: str, why: str) -> None:
    for error in run_ranks(compile_without_rank_1, 3, how, backend=None, lost=[1]):
        assert "cannot end the wait for others to compile with this rank, because rank" in error
        assert why in error, error


def lose_the_store(when: str) -> str:
    """Rank 0 hosts the store, as without torchrun, and dies with it."""
    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    # The launcher's own store has the variables' port: rank 0's has another, which that one tells.
    launcher = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    me = int(os.environ["RANK"])
    if me == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        launcher.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(launcher.get("port")), is_master=False)
    dist.init_process_group("gloo", store=store, rank=me, world_size=2, timeout=datetime.timedelta(seconds=TIMEOUT))
    model = compiled()
    if when == "in a forward":
        warm(model)
    shards = list(model.parameters())
    if me == 0:
        FAULTS["forward"] = die
        if when == "before others compile":
            die()
    error = caught(lambda: step(model))
    assert isinstance(error, graph_fsdp.RankFailure), repr(error)
    assert_whole(model, shards)
    again = caught(lambda: step(model))
    assert isinstance(again, graph_fsdp.RankFailure) and str(again) == str(error)
    return str(error)


WITHOUT_STORE = [pytest.param("in a forward", " either", marks=pytest.mark.long), ("before others compile", "")]


@pytest.mark.parametrize(("when", "more"), WITHOUT_STORE)
def test_the_rank_that_hosts_the_store_is_killed(when: str, more: str) -> None:
    (error,) = run_ranks(lose_the_store, 2, when, backend=None, lost=[0])
    assert f"the store of the process group does not answer{more}" in error and "rank 0 or torchrun's" in error
