"""``graph_fsdp.monitor`` says how a training goes while it runs, and costs it next to nothing.

[Note: what a step is]
A step ends where an optimizer has stepped, and the next one begins there, so that the time of the data loader is in it;
where the model was evaluated in between, it begins at its first forward. Several optimizers that step one after the
other end one step together, several forwards before them are its accumulation. So a step is known to have ended when
the next forward comes, or the monitor is closed.

[Note: what a monitor may cost]
The host never waits for the device. On the CPU the host's time is taken, else events are recorded, and read once the
device has passed them, a step or two later. Only the last step of each record, one in ``every``, has its waits for
collectives timed and its gradients' norm computed. Ranks are compared by ``comparison.py``, which waits for nobody.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.monitoring.comparison import Comparison, Measured, norm, straggler
from graph_fsdp.monitoring.monitored_step import MonitoredStep, on_host, peak_bytes
from graph_fsdp.monitoring.outputs import Output, OutputList, Server, checked, terminal, text_file
from graph_fsdp.monitoring.record import MonitorRecord
from graph_fsdp.optimizers.groups import parameters_of
from graph_fsdp.parameters.gradient_norm import own_square
from graph_fsdp.parameters.inputs import tokens_in
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.passes.ir.settings import check_flags, is_count
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.observe import Clock, Event, Observer

T = TypeVar("T")
CountTokens: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], int]

_EXPECTED = ("first", "piece", "finalized", "divided")  # kinds of captures that are no recompilations
_COLLECTIVES = ("wait gather", "wait reduce")


def monitor(
    model: nn.Module,
    *,
    every: int = 10,
    to: Any = (),
    line: bool = True,
    path: str | os.PathLike[str] | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    tokens: CountTokens | None = None,
) -> Monitor:
    """Watch a compiled model while it trains: time of a step, exposed communication, tokens per second, peak memory,
    recompilations and their causes, the slowest rank, the norm of the gradients (:class:`MonitorRecord`).

    Steps end where an optimizer of torch's, or a class derived from it, has stepped with parameters of the model. All
    ranks make a monitor alike; the first rank of the model's meshes reports, of each ``every`` steps when the next one
    begins. Where other ranks have no monitor, nothing waits for them, and no ranks are compared. Stages of a pipeline
    are models with meshes of their own, and each reports.

    Args:
        model: what ``graph_fsdp.compile`` has returned.
        every: steps of a record, 1 or more.
        to: a ``logging.Logger``; an object with TensorBoard's ``add_scalar(name, value, step)``; a function of a dict
            of numbers, by names as "graph_fsdp/step_seconds", and the step; or a list of these.
        line: whether a line is printed to standard error, where that is a terminal.
        path: a file that is replaced by each record as OpenMetrics text.
        port: a TCP port on which ``GET /metrics`` gives that text; 0: any that is free, ``Monitor.address`` says which.
        host: where to listen: by default for programs of this machine alone.
        tokens: a function of the arguments of a forward, (args, kwargs), to its number of tokens on this rank. None:
            the elements of the first 2-D tensor of integers, if there is one.

    Returns:
        A :class:`Monitor`: a context manager, whose end, or ``close()``, reports the last steps.

    Raises:
        TypeError: the model was not compiled by graph_fsdp, or an argument is of another type.
        ValueError: ``every`` or ``port`` is no number that can be.
        UnsupportedError: ``model`` was compiled with ``backend="xla"``.
        OSError: ``path`` cannot be written, or ``port`` is not free, on the rank that reports.
    """
    engine = engine_of(model)
    if unit := vars(model)["_graph_fsdp_called"].name:
        raise ValueError(
            f"model: it is the module {unit!r} of a model; monitor the model that graph_fsdp.compile returned"
        )
    if engine.backend.name == "xla":
        raise UnsupportedError(
            "model: it was compiled with backend='xla', whose programs run when torch_xla decides, so that nothing "
            "here knows when a step ends; use torch_xla.debug.metrics"
        )
    if not is_count(every):
        raise ValueError(f"every must be a whole number of steps, 1 or more, got {every!r}")
    check_flags(line=line)
    if tokens is not None and not callable(tokens):
        raise TypeError(f"tokens must be a function of (args, kwargs), or None, got {tokens!r}")
    outputs = checked(to, path, port, host)
    comparison = Comparison(engine.schedules.ranks)
    name = engine.schedules.name
    found: list[Output] = []
    if _reports(model, comparison):
        shown = terminal() if line else None
        found += [] if shown is None else [shown]
        found += [text_file(path, name)] if path is not None else []
        found += [Server(host, port, name)] if port is not None else []
        found += outputs
    return Monitor(model, every, OutputList(found), comparison, tokens)


def _reports(model: nn.Module, comparison: Comparison) -> bool:
    """Say whether this is the first of all ranks that have a part of the model, also of those of tensor parallelism."""
    meshes = {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}
    return comparison.me == min([comparison.ranks[0], *(int(mesh.mesh.min()) for mesh in meshes)])


class Monitor:
    """Watches one model; :func:`graph_fsdp.monitor` makes it. ``last``: the last record, on the rank that reports."""

    def __init__(
        self, model: nn.Module, every: int, outputs: OutputList, comparison: Comparison, tokens: CountTokens | None
    ) -> None:
        engine = engine_of(model)
        self.last: MonitorRecord | None = None
        self._model, self._engine = weakref.ref(model), weakref.ref(engine)
        self._every, self._outputs, self._comparison = every, outputs, comparison
        # All ranks alike give it a name by the programs that they have run, and the monitors of the model.
        lockstep = engine.schedules.lockstep
        self._of_model = f"monitor{lockstep.position if lockstep is not None else 0}.{len(engine.watchers)}"
        self._name_comparison()
        self._tokens: Callable[..., int | None] = tokens or (lambda args, kwargs: tokens_in((args, dict(kwargs))))
        self._clock = Clock(engine.storage.device)
        self._parameters = {id(p) for p in model.parameters()}
        self._predicted: weakref.WeakKeyDictionary[Program, float | None] = weakref.WeakKeyDictionary()
        self._captures, self._recompilations = len(engine.graphs), 0
        self._number, self._evaluated = 0, True
        self._now: MonitoredStep | None = None
        self._end: Any = None  # of the step before
        self._ended: deque[MonitoredStep] = deque()  # steps that the device may not be through
        self._counted: list[tuple[MonitoredStep, float]] = []  # of the next record, with their seconds
        self._due: tuple[MonitorRecord, Measured] | None = None  # a record that waits for other ranks' measurements
        this = weakref.ref(self)
        self._handles = [
            register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _call(this, Monitor._before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _call(this, Monitor._after, optimizer)),
        ]
        weakref.finalize(self, _remove, self._handles).atexit = False
        engine.watchers.append(self)

    def __repr__(self) -> str:
        model = self._model()
        of = "a model that is gone" if model is None else type(model).__name__
        return f"<Monitor of {of}: step {self._number}{', closed' * self.is_closed}>"

    @property
    def address(self) -> tuple[str, int] | None:
        """Return the host and the port on which it listens; None where it does not."""
        return self._outputs.address

    @property
    def is_closed(self) -> bool:
        return not self._handles

    def step_ended(self) -> None:
        """Say that a step has ended, where no optimizer of torch's does: one that is written by hand, or whose
        ``step()`` is compiled. Call it while the gradients are there."""
        self._before()
        self._after()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._close(waits=kind is None)

    def close(self) -> None:
        """Report the last steps, and watch no longer. It waits for the device, and for no rank; a second call does
        nothing."""
        self._close(waits=True)

    def _close(self, waits: bool) -> None:
        if self.is_closed:
            return
        _remove(self._handles)
        engine = self._engine()
        if engine is not None and self in engine.watchers:
            engine.watchers.remove(self)
        try:
            self._end_step()
            if waits and self._ended and not self._clock.is_past(self._ended[-1].end):
                self._ended[-1].end.synchronize()
            self._read()
            self._report_due(at_once=True)
            if self._counted:
                self._make_record()
                self._report_due(at_once=True)
        finally:
            self._comparison.close()
            self._outputs.close()

    # What the engine and its programs tell

    def forward(self, unit: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._evaluated = self._evaluated or self._now is None or self._now.end is not None
            return
        if self._now is None or self._now.end is not None:
            self._end_step()
            self._number += 1
            begin = self._clock.mark() if self._evaluated else self._end
            self._now, self._evaluated = MonitoredStep(self._number, begin), False
            self._note_captures(self._now)  # of an evaluation
            self._report_due()
            self._read()
        count = self._tokens(args, kwargs) if unit == "" else None
        if count is not None:
            if not isinstance(count, int):
                raise TypeError(f"tokens must return a whole number, got {type(count).__name__}: count by shapes")
            self._now.tokens = count + (self._now.tokens or 0)

    def run(self, program: Program) -> Observer | None:
        step = self._now
        if step is None or step.end is not None or not self._is_last(step) or program.graph.phase == "inference":
            return None
        step.programs.append(program)

        def see(event: Event, call: Callable[[], T]) -> T:
            if event.what != "wait" or not event.name.startswith(_COLLECTIVES):
                return call()
            begin = self._clock.mark()
            value = call()
            step.waits.append((begin, self._clock.mark()))
            return value

        return see

    def clipped(self, norm: Tensor) -> None:
        if self._now is not None and self._is_last(self._now):
            self._now.norm = on_host(norm)

    def _before(self) -> None:
        """Note the norm of the gradients, before the first optimizer of a step has stepped."""
        self._name_comparison()
        step, model, engine = self._now, self._model(), self._engine()
        if step is None or model is None or engine is None:
            return
        if step.end is not None or not self._is_last(step) or step.norm is not None:
            return
        gradients = engine.storage.gradients(model.parameters())
        with torch.no_grad():
            square = own_square(gradients, self._comparison.ranks)
        step.square = None if square is None else on_host(square)

    def _name_comparison(self) -> None:
        """Name the comparison once the ranks know the model, which a copy is that they have run."""
        engine = self._engine()
        if engine is not None and engine.schedules.index and not self._comparison.name:
            self._comparison.begin(f"model{engine.schedules.index}/{self._of_model}")

    def _after(self) -> None:
        step = self._now
        if step is not None:
            step.end = self._end = self._clock.mark()
            step.captured = self._note_captures(step) or step.captured

    def _note_captures(self, step: MonitoredStep) -> bool:
        """Note the causes of captures since this was called last; return whether there were any."""
        engine = self._engine()
        captured = [] if engine is None else engine.graphs[self._captures :]
        self._captures += len(captured)
        step.causes += tuple(str(graph.cause) for graph in captured if graph.cause.kind not in _EXPECTED)
        return bool(captured)

    def _is_last(self, step: MonitoredStep) -> bool:
        return step.number % self._every == 0

    def steps(self, optimizer: Optimizer) -> bool:
        """Say whether an optimizer steps parameters of the model."""
        return self._model() is not None and any(id(p) in self._parameters for p in parameters_of(optimizer))

    # Records

    def _end_step(self) -> None:
        if self._now is not None and self._now.end is not None:
            self._ended.append(self._now)
            self._now = None

    def _read(self) -> None:
        """Read the marks of the steps that the device is through."""
        while self._ended and self._clock.is_past(self._ended[0].end):
            step = self._ended.popleft()
            self._counted.append((step, self._clock.seconds_between(step.begin, step.end)))
            if self._is_last(step):
                self._report_due(at_once=True)
                self._make_record()

    def _make_record(self) -> None:
        """Make a record of the steps that were counted, as far as this rank knows it, and publish what others need."""
        counted, self._counted = self._counted, []
        last, seconds = counted[-1]
        ordinary = [(s, t) for s, t in counted if not s.captured] or counted
        total, tokens = sum(t for _, t in ordinary), [s.tokens for s, _ in ordinary if s.tokens is not None]
        causes = tuple(cause for s, _ in counted for cause in s.causes)
        self._recompilations += len(causes)
        exposed = predicted = busy = None
        if last.programs and not last.captured:
            exposed = sum(self._clock.seconds_between(begin, end) for begin, end in last.waits)
            predicted, busy = self._prediction(last.programs), seconds - exposed
        per_second = sum(tokens) / total if tokens else None
        square = None if last.square is None else float(last.square)
        mine = Measured(self._comparison.me, busy, per_second, peak_bytes(self._clock.device), square)
        self._comparison.publish(last.number, mine)
        self._due = (
            MonitorRecord(
                step=last.number,
                steps=len(counted),
                step_seconds=total / len(ordinary),
                exposed_seconds=exposed,
                predicted_exposed_seconds=predicted,
                gradient_norm=None if last.norm is None else float(last.norm),
                recompilations=self._recompilations,
                causes=causes,
            ),
            mine,
        )
        if not self._comparison.is_shared:
            self._report_due()

    def _report_due(self, at_once: bool = False) -> None:
        """Report the record that waits for other ranks' measurements, if these are there, or ``at_once``."""
        if self._due is None:
            return
        record, mine = self._due
        if self._comparison.is_first:
            others = self._comparison.others(record.step)
            if others is None and not at_once:
                return
            if others is None:
                self._comparison.forget(record.step)
            measured = [mine, *(others or [])]
            per_second = [m.tokens_per_second for m in measured if m.tokens_per_second is not None]
            factor, slowest = straggler(measured) if others else (None, None)
            total = norm(measured) if record.gradient_norm is None and others is not None else record.gradient_norm
            self.last = replace(
                record,
                tokens_per_second=sum(per_second) / len(per_second) if per_second else None,
                peak_bytes=max((m.peak_bytes for m in measured if m.peak_bytes is not None), default=None),
                gradient_norm=total,
                straggler_factor=factor,
                straggler_rank=slowest,
            )
        self._due = None
        if self._comparison.is_first and self.last is not None:
            self._outputs.report(self.last)

    def _prediction(self, programs: Sequence[Program]) -> float | None:
        found = []
        for program in programs:
            if program not in self._predicted:
                graph = program.graph
                self._predicted[program] = None if graph.cost is None else simulate(graph, graph.cost).exposed
            found.append(self._predicted[program])
        known = [seconds for seconds in found if seconds is not None]
        return sum(known) if len(known) == len(found) else None


def _call(this: weakref.ref[Monitor], method: Callable[[Monitor], None], optimizer: Any) -> None:
    """Call a monitor's method if it is there and the optimizer, which is about to step or has, is of its model."""
    found = this()
    if found is not None and not torch.compiler.is_compiling() and found.steps(optimizer):
        method(found)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
