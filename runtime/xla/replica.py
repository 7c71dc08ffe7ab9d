"""A scheduled graph as the program of one replica: a process, or on XLA's CPU client a thread, with one device.

The lowering is that of ``lower.py``, and so are the collectives. Only nothing enters or leaves: a replica's tensors are
what the local view of a graph has.

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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.compat import xla_hlo as compat_xla_hlo
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.runtime import functional
from graph_fsdp.runtime.ranks.agreement import RankDisagreement
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.xla.hlo import OptimizedHlo
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback
from graph_fsdp.runtime.xla.lower import Exit, Lowered, ProgramInput, Translation
from graph_fsdp.runtime.xla.placement import Placement
from graph_fsdp.runtime.xla.program import XlaProgram

aten = torch.ops.aten

_turn = threading.RLock()
_turns = threading.local()  # of this thread, that it has now
_PATIENCE_SECONDS = 300.0
_OWN = Placement((0,))  # the replica's device, which is all that its program knows


@contextlib.contextmanager
def own_turn() -> Iterator[None]:
    """No other replica of this process traces or compiles for this time; see the note above."""
    if compat_xla.local_device_count() == 1:
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
    return threading.Barrier(compat_xla.local_device_count())


def all_here() -> None:
    """Wait for the other threads of this process, where there are any, before a collective.

    Raises:
        RankDisagreement: one of them did not come.
    """
    if compat_xla.local_device_count() == 1:
        return
    try:
        _all_threads().wait(_PATIENCE_SECONDS)
    except threading.BrokenBarrierError:
        raise RankDisagreement(
            f"replica {compat_xla.ordinal()} waited {_PATIENCE_SECONDS:.0f} s for the other replicas of this process "
            "to run the same graph, and one did not: call the model on all of them, with inputs of the same shapes"
        ) from None


class _ReplicaTranslation(Translation):
    def _enter(self, node: fx.Node, entry: ProgramInput) -> fx.Node:
        return self.values[node]

    def _exit(self, value: fx.Node, leaving: Exit) -> fx.Node:
        return self.call(aten.clone.default, value)  # each result is a tensor of its own


def lower_replica(graph: Graph, groups: Mapping[str, list[list[int]]]) -> tuple[Lowered, list[ProgramInput | None]]:
    """Lower a graph that has been through all passes, which stays as it is; and how its inputs enter."""
    entries: list[ProgramInput | None] = []
    for node in graph.placeholders:
        value = node.meta.get("val")
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        entries.append(None if shape is None else ProgramInput(_OWN, shape, is_shard=has_role(node, Role.SHARD)))
    outputs: Any = graph.output.args[0]
    exits = [Exit(_OWN) if isinstance(v, fx.Node) and v.op != "placeholder" else None for v in outputs]
    with torch.no_grad():
        module = functional.lower(graph, grouped=False, slices=False).module
        return _ReplicaTranslation(module, groups, _OWN, barriers=True).run(entries, exits), entries


class ReplicaProgram(XlaProgram):
    """What one replica runs. All replicas run it at the same time."""

    def __init__(
        self,
        graph: Graph,
        groups: Mapping[str, list[list[int]]],
        cache: RegionCache,
        counter: GatheredBytes,
        on_host_fallback: OnHostFallback = "error",
    ) -> None:
        lowered, entries = lower_replica(graph, groups)
        super().__init__(graph, lowered, entries, cache, counter, each=_OWN, on_host_fallback=on_host_fallback)
        self.waits = compat_xla.local_device_count() > 1  # with Python's lock held, a replica would stop the others

    def _seeds(self) -> Tensor:
        """Another one on each replica, also where all of them have called ``torch.manual_seed`` alike: hashed."""
        number = (torch.randint(2**31 - 1, ()) + compat_xla.ordinal()).to(torch.int32)
        return number.to(compat_xla.device())

    def _placed(self, inputs: list[Any]) -> list[Any]:
        if self.waits or compat_xla.pending([value for value in inputs if isinstance(value, Tensor)]):
            compat_xla.sync(wait=True)
        return inputs

    def fresh_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        return compat_xla_hlo.fresh_inputs(inputs)

    def __call__(self, args: list[Any]) -> Any:
        try:
            return super().__call__(args)
        except Compiled:  # and not run
            for kind, count in self.collectives.items():
                self.counter.count(kind, -count)
            raise

    def _compile(self, inputs: Sequence[Any], *cause: Any) -> tuple[Any, list[int | Tensor]] | None:
        with own_turn():
            self._compiled = super()._compile(inputs, *cause)
        if self.waits and _has_turn():
            raise Compiled
        if self.waits:
            all_here()
        return self._compiled

    def _run(self, inputs: list[Any]) -> list[Tensor]:
        if self.waits and not _has_turn():  # backward
            all_here()
        return super()._run(inputs)

    def hlo(self) -> OptimizedHlo:
        with own_turn():
            return super().hlo()
