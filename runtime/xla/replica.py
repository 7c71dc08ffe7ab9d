"""A lowered graph as the program of one replica: a process, or on XLA's CPU client a thread, with one device.

Nothing enters or leaves it: a replica's tensors are what the local view of a graph has.

[Note: threads]
On a TPU a replica is a process. On XLA's CPU client the replicas are threads of one process, and torch_xla's
``launch`` starts them so. Dynamo's configuration, AOTAutograd's state and torch_xla's counters and modes belong to the
process, so threads take turns where they trace and where they compile. A thread whose turn it is must not wait for the
others, which may be waiting for their turn: before it gets one, its device finishes all that it has to do. In a turn a
device starts programs and does not wait for their results.

The CPU client ends the process when the devices of a collective come more than ten seconds after each other. So no
thread runs a new program before all have compiled it. In a turn, which forward has, the call in which it was compiled
ends in ``Compiled``, and is made again after the turn, when all threads are there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.runtime.ranks.agreement import RankDisagreement
from graph_fsdp.runtime.xla.hlo import OptimizedHlo
from graph_fsdp.runtime.xla.program import Run, XlaProgram

_turn = threading.RLock()
_turns = threading.local()  # of this thread, that it has now
_PATIENCE_SECONDS = 300.0


@functools.cache
def are_threads() -> bool:
    """Whether there are several replicas in this process."""
    return compat_xla.runtime().addressable_runtime_device_count() > 1


@contextlib.contextmanager
def own_turn() -> Iterator[None]:
    """No other replica of this process traces or compiles for this time; see the note above."""
    if not are_threads():
        yield
        return
    compat_xla.sync(wait=True)
    with _turn:
        _turns.depth = _has_turn() + 1
        try:
            yield
        finally:
            _turns.depth -= 1


def _has_turn() -> int:
    return getattr(_turns, "depth", 0)


class Compiled(BaseException):  # no error, and nobody's to handle but of who has the turn
    """A program was compiled, and is not to be run in this turn."""


@functools.cache
def _all_threads() -> threading.Barrier:
    return threading.Barrier(compat_xla.runtime().addressable_runtime_device_count())


def all_here() -> None:
    """Wait for the other threads of this process, where there are any, before a collective.

    Raises:
        RankDisagreement: one of them did not come.
    """
    if not are_threads():
        return
    try:
        _all_threads().wait(_PATIENCE_SECONDS)
    except threading.BrokenBarrierError:
        raise RankDisagreement(
            f"replica {compat_xla.ordinal()} waited {_PATIENCE_SECONDS:.0f} s for the other replicas of this process "
            "to run the same graph, and one did not: call the model on all of them, with inputs of the same shapes"
        ) from None


class ReplicaProgram(XlaProgram):
    """What one replica runs. All replicas run it at the same time."""

    def _placed(self, inputs: list[Any]) -> list[Any]:
        if are_threads():  # with Python's lock held, a replica would stop the others
            compat_xla.sync(wait=True)
        return super()._placed(inputs)

    def _compile(self, inputs: Sequence[Any], cause: str) -> Run:
        with own_turn():
            self._compiled = compiled = super()._compile(inputs, cause)
        if are_threads() and _has_turn():
            raise Compiled
        all_here()
        return compiled

    def _run(self, compiled: Run, inputs: list[Any]) -> list[Tensor]:
        if not _has_turn():  # backward
            all_here()
        return super()._run(compiled, inputs)

    def hlo(self) -> OptimizedHlo:
        with own_turn():
            return super().hlo()
