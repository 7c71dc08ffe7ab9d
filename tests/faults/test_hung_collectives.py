"""A collective with a rank that has ended ends with an error, even where the process group never says so."""

from __future__ import annotations

import datetime
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from graph_fsdp.runtime.ranks import failure, lockstep
from graph_fsdp.runtime.ranks.agreement import RunnableProgram
from graph_fsdp.runtime.ranks.failure import CollectiveFailed, RankFailure


class Waited(Exception):
    """As long as the test lets it."""


class NeverEnds:
    """What gloo gave, seldom and on a busy machine: it neither completes nor ends with an error."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self, patience: datetime.timedelta) -> None:
        self.waits += 1
        if self.waits > 20:
            raise Waited
        raise RuntimeError("Wait timeout")

    def is_completed(self) -> bool:
        return False


Other = tuple["subprocess.Popen[bytes]", lockstep.Lockstep]


@pytest.fixture
def other(fake_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Other]:
    """The process of rank 1, with which this one is in a collective, and what looks for it."""
    store = dist.HashStore()
    ranks = lockstep.Lockstep([0, 1], store)
    key = ranks.know(RunnableProgram("model 0", "forward", ()))
    store.set("graph_fsdp/0-1/program0/verdict", '[true, ""]')  # the other rank has come to it, too
    ranks.begin(key)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        failure.publish_process(store, 1, process.pid)
        ranks.failures.add_news()
        monkeypatch.setattr(lockstep, "current", ranks)
        yield process, ranks
        process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_rank_that_has_ended_ends_the_wait(other: Other) -> None:
    end(other[0])
    with pytest.raises(CollectiveFailed, match="Wait timeout"):
        lockstep.finish(NeverEnds(), torch.device("cpu"))


def test_a_rank_that_runs_is_waited_for(other: Other) -> None:
    with pytest.raises(Waited):
        lockstep.finish(NeverEnds(), torch.device("cpu"))


def test_a_rank_may_end_after_all_collectives_of_a_host_that_does_not_wait(other: Other) -> None:
    process, ranks = other
    end(process)
    ranks.look_for_others()
    ranks.look_for_ended(is_stuck=lambda: False)
    with pytest.raises(RankFailure, match=f"because rank 1: its process {process.pid} has ended"):
        ranks.look_for_ended(is_stuck=lambda: True)
