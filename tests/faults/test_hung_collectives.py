"""A collective with a rank that has ended ends with an error, even where the process group never says so."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from graph_fsdp.runtime.ranks import failure, lockstep
from graph_fsdp.runtime.ranks.failure import CollectiveFailed


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


@pytest.fixture
def other(fake_group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The process of rank 1, with which this one is in a collective."""
    store = dist.HashStore()
    ranks = lockstep.Lockstep([0, 1], store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        text = json.dumps([*failure.kernel_of_host(), process.pid, failure.started_at(process.pid)])
        store.set("graph_fsdp/process/1", text)
        monkeypatch.setattr(lockstep, "_current", ranks)
        monkeypatch.setattr(ranks, "look_for_others", lambda: None)
        yield process
        process.kill()


def test_a_rank_that_has_ended_ends_the_wait(other: subprocess.Popen[bytes]) -> None:
    other.kill()
    other.wait()
    with pytest.raises(CollectiveFailed, match="Wait timeout"):
        lockstep.finish(NeverEnds(), torch.device("cpu"))


def test_a_rank_that_runs_is_waited_for(other: subprocess.Popen[bytes]) -> None:
    with pytest.raises(Waited):
        lockstep.finish(NeverEnds(), torch.device("cpu"))
