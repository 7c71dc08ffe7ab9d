"""The executor: a scheduled graph as one Python function.

The function is generated from the graph (``generate.py``): one line per region and per communication node, in the
verified order, and every value dropped after its last use. ``Program.source`` is its text. A run keeps its state
(buffers, collectives under way) in a ``Frame`` of its own, so that runs may nest and a run that raises leaves nothing
behind.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from graph_fsdp import compat
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.runtime.comm.custom_collectives import Comms
from graph_fsdp.runtime.cuda.cuda_graphs import ProgramGraphs
from graph_fsdp.runtime.frame import Frame
from graph_fsdp.runtime.generate import ProgramText
from graph_fsdp.runtime.kept_gradients import KeptGradients
from graph_fsdp.runtime.observe import Event, MakeObserver, observed, ranges, recording, seen_by
from graph_fsdp.runtime.regions.regions import Region, RegionCache, cut, unit_of
from graph_fsdp.runtime.slots import GatheredBytes, SlotPlan


class Program:
    """A compiled graph. Call it with the list of the graph's inputs, which it empties. ``slots``: bytes of each slot
    that the records of the graph's gathers name. ``kept``: gradients that other graphs of the model did not reduce.
    ``comms``: what the user has brought. ``graphs``: captures its regions as CUDA graphs."""

    def __init__(
        self,
        graph: Graph,
        cache: RegionCache,
        counter: GatheredBytes,
        slots: Sequence[int] = (),
        kept: KeptGradients | None = None,
        comms: Comms | None = None,
        graphs: ProgramGraphs | None = None,
    ) -> None:
        # AOTAutograd then hands over the list itself, so that inputs can be dropped early. On the instance, because
        # the wrappers that torch puts around backward copy instance attributes only.
        self._boxed_call = True
        self.graph, self.counter, self.kept = graph, counter, kept if kept is not None else KeptGradients()
        self.check: Callable[[], None] | None = None  # before each run
        records = [start.meta["fsdp"] for start in graph.with_role(Role.GATHER_START)]
        uses = Counter(slot for record in records for slot in (record.slot, record.landing_slot))
        self.slots = SlotPlan(tuple(slots), tuple(uses[slot] for slot in range(len(slots))))
        self.graphs = graphs
        text = ProgramText(graph, cache, comms, graphs)
        self.source, self.constants, self.places = str(text), text.constants, text.places
        self._observers: tuple[MakeObserver, ...] = ()
        namespace: dict[str, Any] = dict(self.constants)
        exec(compile(self.source, f"<graph_fsdp {graph.phase} program>", "exec"), namespace)
        self.ordinary = namespace["run"]

    def __call__(self, args: list[Any]) -> Any:
        if self.check is not None:
            self.check()
        # A graph that is replayed shows a dispatch mode nothing.
        if self.graphs is not None and not self._observers and not compat.dispatch_modes():
            return self.graphs.run(self, args)
        return self.execute(self.ordinary, self.slots, args)

    def execute(self, run: Callable[..., Any], slots: SlotPlan, args: list[Any]) -> Any:
        """``run``: this program's function, or one of the same code with other regions."""
        open_range = recording()
        observers = [make(self) for make in self._observers]
        if open_range is not None:
            observers.append(ranges(open_range, self.graph.phase))
        if observers:
            run = observed(run, self.kernels, observers)
        # Bytes and collectives of runs that are measured are not counted: reports tell of training.
        frame = Frame(GatheredBytes() if self._observers else self.counter, slots, self.kept, observers)
        return seen_by(observers, Event("run"), _to_the_end, run, frame, args)

    @contextlib.contextmanager
    def observed_by(self, make: MakeObserver) -> Iterator[None]:
        """For a time, each run has an observer, which ``make`` makes of the program when the run begins. Runs that are
        under way go on as they began."""
        before = self._observers
        self._observers = (*before, make)
        try:
            yield
        finally:
            self._observers = before

    @functools.cached_property
    def kernels(self) -> dict[int, str]:
        """Place among the program's steps of each region that has kernels → the units that it computes with."""
        steps = enumerate(cut(self.graph))
        return {i: unit_of(step) for i, step in steps if isinstance(step, Region) and not step.is_view_only}


def _to_the_end(run: Callable[..., Any], frame: Frame, args: list[Any]) -> Any:
    try:
        outputs = run(frame, args)
    except BaseException as error:
        frame.close(error)
        raise
    frame.close()
    return outputs
