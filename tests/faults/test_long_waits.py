"""A rank that waits for others says so before there is an error, and one that is interrupted where it was."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from facts import Facts
from struck import batch, caught, compiled, rank, rounds, warm
from torch import nn

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.runtime.ranks import failure
from graph_fsdp.runtime.ranks.lockstep import finish

FACTS = Facts(__name__)


@contextmanager
def told(expected: str = "") -> Iterator[list[str]]:
    """What this rank says in the log, of those lines that have a text; the first is told to who waits for it in this
    round."""
    lines: list[str] = []

    def note(record: logging.LogRecord) -> None:
        if expected in record.getMessage():
            lines.append(record.getMessage())
            compat.default_store().set(expected, "")

    handler = logging.Handler()
    handler.emit = note  # type: ignore[method-assign]
    logger = logging.getLogger("graph_fsdp.runtime")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def after(name: str) -> None:
    compat.default_store().wait([name])


def interrupt_in(function: Callable[..., object]) -> None:
    """Ctrl-C for this process, once its main thread is in ``function``."""
    main = threading.main_thread().ident
    while True:
        frames = traceback.extract_stack(sys._current_frames()[main])  # type: ignore[index]
        if function.__name__ in [frame.name for frame in frames]:
            break
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGINT)


def evaluate(model: nn.Module, batches: int) -> None:
    with torch.no_grad():
        for _ in range(batches):
            model(batch())


def a_rank_with_fewer_batches_is_missed(model: nn.Module) -> None:
    missed = "in wait for gather of bucket blocks.0 of the inference graph of model"
    evaluate(model, 6)
    if rank() == 0:
        with told(missed) as lines:
            evaluate(model, 2)
        (line,) = lines
        assert "where ranks [1] have not come (rank 1: its process" in line
    else:
        evaluate(model, 1)
        after(missed)  # as if it went on with something else
        evaluate(model, 1)
    evaluate(model, 1)


def a_rank_that_does_not_come_to_compile_is_missed(model: nn.Module) -> None:
    missed = "the wait for others to compile with it, where ranks [1] have not"
    if rank() == 0:
        with told(missed) as lines:
            evaluate(model, 1)
        assert lines
    else:
        after(missed)
        evaluate(model, 1)


def an_interrupted_rank_says_where(model: nn.Module) -> None:
    """Another collective is under way, in which rank 1 will not take part: it is not waited for."""
    loss = model(batch()).sum()
    if rank() == 1:
        after("interrupted")
        return
    source = graph_fsdp.inspect(model).backward.program
    assert source.index("reduce_start") < source.index("frame.wait"), "a reduction is under way"
    threading.Thread(target=interrupt_in, args=(finish,), daemon=True).start()
    with told("interrupted") as lines:
        error = caught(loss.backward)
    assert type(error) is KeyboardInterrupt
    (line,) = lines
    assert line.startswith(
        "rank 0 was interrupted in wait for gather of bucket blocks.2 of the backward graph of model"
    )


TOGETHER = (
    a_rank_with_fewer_batches_is_missed,
    a_rank_that_does_not_come_to_compile_is_missed,
    an_interrupted_rank_says_where,
)


@FACTS
def long_waits_are_told() -> None:
    again = a_rank_with_fewer_batches_is_missed  # waits in each round for what is told in that round
    for function in rounds(*TOGETHER, again):  # type: ignore[arg-type]
        failure.TELL_AFTER_SECONDS = 1.0
        function(warm(compiled()))  # type: ignore[call-arg]


@FACTS
def a_long_wait_of_all_ranks_misses_none() -> None:
    failures = failure.Failures([0, 1], compat.default_store(), "of all/")
    failures.tell(3, 0.0, lambda: "a gather")
    dist.barrier()
    with told("a gather") as lines:
        failures.tell(3, 1000.0, lambda: "a gather")
        dist.barrier()
    said: list[list[str]] = [[], []]
    dist.all_gather_object(said, lines)
    (line,) = itertools.chain(*said)  # of one rank
    assert "in a gather, where all other ranks wait now, too" in line and "equally often" not in line


@FACTS
def a_long_wait_names_what_another_rank_raised() -> None:
    failures = failure.Failures([0, 1], compat.default_store(), "of one that raised/")
    if rank() == 1:
        failures.announce(failure.Failure(1, 3, False, False, "forward of model 0", "ValueError: no batch"))
    dist.barrier()
    if rank() == 0:
        with told("a gather") as lines:
            failures.tell(3, 1000.0, lambda: "a gather")
        (line,) = lines
        assert "in a gather, where rank 1 raised ValueError: no batch in forward of model 0, and has not come" in line


test_on_two_ranks = FACTS.on(2, timeout=120.0)
