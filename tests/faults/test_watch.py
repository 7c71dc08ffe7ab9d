"""Ranks whose hosts do not wait for collectives: a thread names the rank that is the reason that one does not end.

The process group (``unwaited.py``) is one of the CPU whose collectives end on a thread, as on a device.
"""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from struck import FAULTS, assert_whole, batch, caught, compiled, rank, rounds, step, warm
from test_exceptions import Broken, fail
from test_long_waits import told
from test_lost_ranks import die
from torch import nn
from unwaited import BACKEND, synchronize

from graph_fsdp import RankDisagreement, RankFailure
from graph_fsdp.runtime.ranks import agreement

FACTS = Facts(__name__)


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "graph_fsdp watch"]


def is_told(model: nn.Module, kind: type[BaseException], *words: str) -> None:
    """Rank 0, which is in a collective that does not end: by the log, and by its next program."""
    shards = list(model.parameters())
    with told() as lines:
        with contextlib.suppress(RuntimeError):  # the host may come to its end, or to a program after it
            step(model)
        error = caught(synchronize)
    assert "aborted" in str(error), repr(error)
    again = caught(lambda: step(model))
    assert type(again) is kind, repr(again)
    for text in (str(again), *lines):
        assert [word for word in words if word not in text] == [], text
    assert len(lines) == 1
    assert_whole(model, shards)
    assert dist.get_rank() == 0, "the process group is aborted, and not forgotten"


def one_rank_raises() -> None:
    model = warm(compiled())
    if rank() == 1:
        FAULTS["forward"] = fail
        assert type(caught(lambda: step(model))) is Broken
        assert isinstance(caught(lambda: step(model)), RankFailure)
    else:
        where = "rank 1 raised Broken: no such sample in region 3 (unit blocks.0) of the forward graph of model"
        is_told(model, RankFailure, "rank 0 cannot end the", "(Struck), because", where, "start all ranks again")


def one_rank_takes_another_branch() -> None:
    model = compiled()
    with torch.no_grad():
        model(batch())
    warm(model)
    words = ("rank 0 runs the forward graph of model", "ranks [1] are about to run the inference graph of model")
    if rank() == 1:
        with torch.no_grad():
            error = caught(lambda: model(batch()))
        assert type(error) is RankDisagreement and [word for word in words if word not in str(error)] == []
    else:
        is_told(model, RankDisagreement, *words, "train or evaluate together")


def one_rank_compiles() -> None:
    model = warm(compiled())
    words = ("rank 0 runs the forward graph of model", "rank 1 compiles a graph that no rank has run before")
    if rank() == 1:
        model.head.requires_grad_(False)
        error = caught(lambda: step(model))
        assert type(error) is RankDisagreement and [word for word in words if word not in str(error)] == []
    else:
        is_told(model, RankDisagreement, *words)


TOGETHER = (one_rank_raises, one_rank_takes_another_branch, one_rank_compiles)


def nobody_is_left_watching() -> None:
    first = watches()
    dist.destroy_process_group()
    for thread in first:
        thread.join(60.0)
    assert watches() == []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what the launcher destroys


@FACTS
def ranks_are_watched() -> None:
    for function in rounds(*TOGETHER, backend=BACKEND):
        function()
    nobody_is_left_watching()


test_on_two_ranks = FACTS.on(2, timeout=240.0)


def lose_rank_1() -> None:
    torch.set_num_threads(1)
    agreement.PATIENCE_SECONDS = 0.3
    dist.init_process_group(BACKEND)
    model = warm(compiled())
    synchronize()
    if rank() == 1:
        FAULTS["backward"] = die
        step(model)
    is_told(model, RankFailure, "rank 0 cannot end the", "because rank 1: its process", "has ended")


def test_a_rank_is_killed_that_others_do_not_wait_for() -> None:
    run_ranks(lose_rank_1, 2, backend=None, lost=[1], timeout=240.0)
