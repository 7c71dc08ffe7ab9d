"""``graph_fsdp.profile`` measures the regions and collectives of a running model, for the cost model to compute with.

As in DeepCompile (Tanaka et al. 2025), passes then schedule by profiled times. Here whole compiled regions are timed,
and their times are spread over the nodes in them.

[Note: times that all ranks share]
The first rank, whose graphs decide the plan, names what it has run. Region times are averaged over the ranks that ran
the same computation on the same shapes. A rank's time of a collective includes the wait for the last rank: of each run,
the shortest time over the ranks counts. The first rank makes the profile of that and sends it to all. This takes four
all-reduces and two object broadcasts over gloo. The schedule that a rank has measured stays with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.mesh import group_of
from graph_fsdp.parameters.inputs import tensors_of
from graph_fsdp.passes import CostModel, Measurements
from graph_fsdp.passes.analysis.cost import collective_key, op_key
from graph_fsdp.passes.analysis.kernels import Kind, kind_of
from graph_fsdp.passes.analysis.simulate import simulate
from graph_fsdp.passes.ir.canonical_form import digest
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.profiling.table import CollectiveTime, GraphTime, Profile, RegionTime
from graph_fsdp.report.data import ROW_KINDS
from graph_fsdp.report.report import engine_of
from graph_fsdp.report.trace_events import Process, ScheduledGraph, predicted_slices, slices_as_measured
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.observe import ProgramRun, Recorder
from graph_fsdp.runtime.ranks.agreement import is_shared
from graph_fsdp.runtime.regions.regions import Region, Step, cut, unit_of


def profile(model: nn.Module, *batch: Any, steps: int = 10, warmup: int = 3, **kwargs: Any) -> Profile:
    """Run ``model(*batch, **kwargs)`` and its backward, and time each compute region and each collective.

    All ranks must call it at once, as they would call the model. They get equal profiles, each with the schedule that
    it has measured itself (:meth:`Profile.save_trace`). In half of the steps collectives are waited for where they
    start: nothing runs beside them, and their times are their own. In the other half the model runs as in training,
    with marks around regions, starts and waits.

    A model in training mode runs forward and backward: of the output, if it is a tensor, of its ``loss``, if it has
    one, else of all its tensors; their sum is differentiated. In evaluation mode, under ``torch.no_grad()`` and under
    ``torch.inference_mode()``, its inference graph runs alone. Gradients, buffers and the state of torch's random
    number generators are restored afterwards; what the model keeps elsewhere is not. No optimizer is called, and hooks
    that run after a gradient was accumulated do not run.

    Times of a graph with symbolic sizes count for the sizes that it was traced with: profile with such a batch.

    Args:
        model: compiled by graph_fsdp. It may be called for the first time here.
        steps: timed calls of each kind, 1 or more; the median over them counts.
        warmup: calls before these, 1 or more: graphs are captured and compiled in the first one.

    Raises:
        TypeError: ``model`` was not compiled by graph_fsdp, or the batch does not fit its forward.
        ValueError: ``steps`` or ``warmup`` is below 1, or the model ran no graph.
        UnsupportedError: ``model`` was compiled with ``regions="whole"``.
    """
    engine: Any = engine_of(model)
    if engine.whole:
        raise UnsupportedError(
            "model: it was compiled with regions='whole', and what runs as one function cannot be timed by region; "
            "profile it compiled with regions='cut', whose profile a pipeline takes for either"
        )
    for name, value in {"steps": steps, "warmup": warmup}.items():
        if not is_count(value):
            raise ValueError(f"{name} must be a whole number of calls, 1 or more, got {value!r}")
    device = engine.storage.device
    recorder, schedules = Recorder(device, alone=True), Recorder(device)
    with _restored(model, device):
        for _ in range(warmup):
            _step(model, batch, kwargs)
        for recording in (recorder, schedules):
            with recording.recording(engine.programs.values()):
                for _ in range(steps):
                    _step(model, batch, kwargs)
                    recording.end_step()
    if not recorder.seconds:
        raise ValueError(
            f"batch: {type(model).__name__} ran no compute region and no collective on it; pass a batch as in training"
        )
    ranks = engine.schedules.ranks
    group = group_of(ranks, "profiles", None, "gloo") if is_shared(ranks) else None
    rank, first = (dist.get_rank(), ranks[0]) if group is not None else (0, 0)
    ran = Ran.of(recorder, schedules, engine.programs)
    ran.share(group, rank, first)
    made = ran.profile(engine.cost, len(ranks), steps) if rank == first else None
    found: Profile = _broadcast(made, group, first)
    title = f"measured, rank {rank} of {found.ranks}"
    return dataclasses.replace(found, schedule=_schedule(engine, title, recorder, schedules))


def _schedule(engine: Any, title: str, recorder: Recorder, schedules: Recorder) -> tuple[Process, Process]:
    """Return a step as predicted, and as it ran."""
    runs, spec, cost = typical(schedules.steps), engine.spec, engine.cost
    alone = {place: statistics.median(seconds) for place, seconds in recorder.seconds.items()}
    graphs = [ScheduledGraph(run.program.graph, cost, simulate(run.program.graph, cost)) for run in runs]
    predicted = Process(f"predicted on {cost.hardware.name}", list(predicted_slices(graphs, spec)))
    return predicted, Process(title, slices_as_measured(runs, alone, spec))


def typical(steps: Sequence[Sequence[ProgramRun]]) -> Sequence[ProgramRun]:
    """Return the step of median duration (of two in the middle, the shorter)."""
    return sorted(steps, key=lambda runs: runs[-1].end)[(len(steps) - 1) // 2]


# Running the model


def _step(model: nn.Module, batch: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with torch.set_grad_enabled(torch.is_grad_enabled() and model.training):
        differentiated = [t for t in _differentiated(model(*batch, **kwargs)) if t.requires_grad]
        sums = [(torch.view_as_real(t) if t.is_complex() else t).sum() for t in differentiated]
        parameters = [p for p in model.parameters() if p.requires_grad]
        if sums and parameters:
            # Not backward(): nothing is accumulated, in parameters as in the tensors that made the batch.
            torch.autograd.grad(sums, parameters, allow_unused=True)


def _differentiated(output: Any) -> list[Tensor]:
    loss = getattr(output, "loss", None)
    return tensors_of(loss if isinstance(loss, Tensor) else output)


@contextlib.contextmanager
def _restored(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore buffers and random number generators afterwards, whatever happens."""
    owned = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffers, before in owned:
                    buffers.update(before)
                for buffer, value in values:
                    buffer.copy_(value)


# What ran


class Ran:
    """Holds what a rank has run, by names that are equal on ranks that ran the same. ``means``: median seconds of
    regions, and in steps as in training of waits for collectives and of whole runs. ``collectives``: seconds of each
    run. ``slowest``: region → the rank on which it took longest, and its seconds there."""

    def __init__(self) -> None:
        self.graphs: dict[Program, tuple[int, Phase]] = {}
        self.steps: dict[str, tuple[Program, int, Step]] = {}
        self.means: dict[str, float] = {}
        self.collectives: dict[str, list[float]] = {}
        self.slowest: dict[str, tuple[int, float]] = {}

    @classmethod
    def of(cls, recorder: Recorder, schedules: Recorder, programs: Mapping[tuple[int, Phase], Program]) -> Ran:
        """Read what ``recorder`` found with nothing beside collectives, and ``schedules`` as in training."""
        ran = cls()
        ran.graphs = {program: graph for graph, program in programs.items()}
        cuts = {program: cut(program.graph) for program in dict.fromkeys(program for program, _ in recorder.seconds)}
        for (program, index), seconds in recorder.seconds.items():
            step = cuts[program][index]
            graph, count = f"{list(cuts).index(program)} {program.graph.phase}", len(ran.steps)
            if isinstance(step, Region):
                name = f"{graph} region {count} {digest([op_key(n) for n in step.nodes if n.op == 'call_function'])}"
                ran.means[name] = statistics.median(seconds)
            else:
                name = f"{graph} collective {count} {step.meta['fsdp'].bucket} {collective_key(step)}"
                ran.collectives[name] = seconds
            ran.steps[name] = program, index, step
        names = {step[:2]: name for name, step in ran.steps.items()}
        found: dict[str, list[float]] = {f"wait {name}": [] for name in ran.collectives}
        for run in (run for runs in schedules.steps for run in runs):
            found.setdefault(ran._run_name(run.program), []).append(run.end - run.begin)
            for interval in run.intervals:
                if interval.what == "wait" and (place := (run.program, interval.index)) in names:
                    found[f"wait {names[place]}"].append(interval.seconds)
        ran.means |= {name: statistics.median(seconds or [0.0]) for name, seconds in found.items()}
        return ran

    def _run_name(self, program: Program) -> str:
        """Name a run by what it ran first: another rank may have captured this graph as another of its graphs."""
        return "run " + next((name for name, (of, _, _) in self.steps.items() if of is program), program.graph.phase)

    def share(self, group: dist.ProcessGroup | None, rank: int, first: int) -> None:
        """Replace this rank's seconds by those of all; see [Note: times that all ranks share]."""
        runs = {f"{name} #{k}": s for name, seconds in self.collectives.items() for k, s in enumerate(seconds)}
        names, run_names = _broadcast([list(self.means), list(runs)], group, first)
        own = _seconds([self.means.get(name, -1.0) for name in names])  # -1: not run here
        totals = _all_reduce(torch.stack([own.clamp(min=0), (own >= 0).double()]), dist.ReduceOp.SUM, group)
        longest = _all_reduce(own, dist.ReduceOp.MAX, group)
        this = torch.full_like(own, rank)  # in double precision, whatever the default dtype
        slowest = _all_reduce(torch.where(own == longest, this, torch.inf), dist.ReduceOp.MIN, group)
        shortest = _all_reduce(_seconds([runs.get(name, torch.inf) for name in run_names]), dist.ReduceOp.MIN, group)
        if names == list(self.means) and run_names == list(runs):  # as on the first rank, which makes the profile
            self.means = dict(zip(names, (totals[0] / totals[1]).tolist(), strict=True))
            found = zip(names, slowest.tolist(), longest.tolist(), strict=True)
            self.slowest = {name: (int(slow), seconds) for name, slow, seconds in found if name in self.steps}
            values = iter(shortest.tolist())
            self.collectives = {name: [next(values) for _ in seconds] for name, seconds in self.collectives.items()}

    def profile(self, cost: CostModel, ranks: int, steps: int) -> Profile:
        """Make the profile, by the ``cost`` of the running program; regions are spread by modelled seconds."""
        model = CostModel(cost.hardware, cost.groups, fused=cost.fused)
        programs = dict.fromkeys(program for program, _, _ in self.steps.values())
        modelled = {program: model.graph_seconds(program.graph) for program in programs}
        predicted = {program: cost.graph_seconds(program.graph) for program in programs}
        timelines = {program: simulate(program.graph, cost) for program in programs}
        exposed = {event.node: event.exposed for timeline in timelines.values() for event in timeline.events}
        compute: dict[str, list[float]] = {}
        by_key: dict[str, list[float]] = {}
        regions: list[RegionTime] = []
        collectives: list[CollectiveTime] = []
        total = measured = 0.0
        for name, (program, index, step) in self.steps.items():
            graph = self.graphs[program]
            if isinstance(step, fx.Node):
                seconds, record = statistics.median(self.collectives[name]), step.meta["fsdp"]
                by_key.setdefault(collective_key(step), []).append(seconds)
                times = (cost.collective_seconds(step), seconds, exposed[step], self.means[f"wait {name}"])
                collectives.append(CollectiveTime(*graph, ROW_KINDS[record.role], record.bucket, record.nbytes, *times))
                continue
            seconds = self.means[name]
            shares = {node: modelled[program][node] for node in step.nodes if modelled[program][node] > 0}
            region_total = sum(shares.values())
            total, measured = total + region_total, measured + (seconds if shares else 0.0)
            own = [n for n in shares if not cost.fused or kind_of(n) is Kind.KERNEL]  # others have none to be looked up
            for node in own:
                compute.setdefault(op_key(node), []).append(seconds * shares[node] / region_total)
            expected = sum(predicted[program][node] for node in step.nodes)
            first = next((node for node in step.nodes if node in shares), step.nodes[0])
            what = (*graph, index, unit_of(step), first.name)
            regions.append(RegionTime(*what, expected, seconds, *self.slowest[name]))
        graphs = [
            GraphTime(*self.graphs[program], timeline.seconds, self.means[self._run_name(program)])
            for program, timeline in timelines.items()
        ]
        return Profile(
            Measurements(_means(compute), _means(by_key), measured / total if measured and total else 1.0),
            regions,
            collectives,
            graphs,
            hardware=cost.hardware.name,
            ranks=ranks,
            steps=steps,
        )


def _means(values: dict[str, list[float]]) -> dict[str, float]:
    return {key: statistics.fmean(value) for key, value in values.items()}


# Ranks


def _broadcast(value: Any, group: dist.ProcessGroup | None, first: int) -> Any:
    """Send the first rank's value to all."""
    box = [value]
    if group is not None:
        dist.broadcast_object_list(box, first, group=group)
    return box[0]


def _all_reduce(values: Tensor, op: Callable[..., Any], group: dist.ProcessGroup | None) -> Tensor:
    reduced = values.clone()
    if group is not None:
        dist.all_reduce(reduced, op=op, group=group)
    return reduced


def _seconds(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
