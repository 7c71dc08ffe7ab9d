"""A step is forward, backward with its reductions, and the optimizers that ``distribute_optimizer`` was given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.optimizers import Stepping, optimizer_seconds
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.text import milliseconds
from graph_fsdp.report.trace_events import COMPUTE, ScheduledGraph, Slice


@dataclass(frozen=True)
class OptimizerRow:
    """Describes what one optimizer steps. ``nbytes`` are those of the shards, and ``seconds`` None where the cost model
    does not know the optimizer."""

    by: Stepping
    parameters: tuple[str, ...]
    nbytes: int
    seconds: float | None

    def text(self) -> str:
        what = f"{self.by.cls}{' in backward' if self.by.in_backward else ''}"
        of = f"{len(self.parameters)} parameters, {self.nbytes:,} bytes"
        if self.seconds is None:
            return f"{what} of {of}: not predicted"
        return f"{what} ({self.by.known_as}) of {of}: {milliseconds(self.seconds)} ms"


@dataclass(frozen=True)
class PredictedStep:
    """Predicts a step on one rank, in seconds. ``first`` is the optimizers' part before the gathers of ``ahead`` begin,
    which run beside ``rest``."""

    graphs: Mapping[str, float]
    exposed: float  # communication of the graphs that compute waits for
    optimizers: Sequence[OptimizerRow]
    hardware: str
    first: float
    rest: float
    ahead: Mapping[str, float]  # unit → the seconds of its gathers

    @property
    def exposed_ahead(self) -> float:
        """Return the seconds for which the next forward waits."""
        return max(0.0, sum(self.ahead.values()) - self.rest)

    @property
    def seconds(self) -> float:
        return sum(self.graphs.values()) + self.first + self.rest + self.exposed_ahead

    def lines(self) -> list[str]:
        parts = [f"{phase} {milliseconds(seconds)}" for phase, seconds in self.graphs.items()]
        known = all(row.seconds is not None for row in self.optimizers)
        parts.append(f"optimizer {milliseconds(self.first + self.rest)}")
        found = [
            f"step predicted on {self.hardware}: {'' if known else 'at least '}{milliseconds(self.seconds)} ms: "
            f"{', '.join(parts)}; exposed communication {milliseconds(self.exposed + self.exposed_ahead)}",
            *(f"  {row.text()}" for row in self.optimizers),
        ]
        if self.ahead:
            found.append(
                f"  gathers beside it, for the next forward: {', '.join(unit or 'root' for unit in self.ahead)}; "
                f"{milliseconds(sum(self.ahead.values()))} ms, of it exposed {milliseconds(self.exposed_ahead)}"
            )
        return found

    def slices(self) -> Iterator[Slice]:
        """Yield the optimizers, and what is gathered beside them, as slices of a trace."""
        begin = sum(self.graphs.values())
        args = {"optimizers": "; ".join(row.text() for row in self.optimizers)}
        yield Slice("optimizer", "graph", COMPUTE, begin, self.first + self.rest, args)
        begin += self.first
        for unit, seconds in self.ahead.items():
            yield Slice(f"gather_ahead {unit or 'root'}", "communication", "communication", begin, seconds)
            begin += seconds


def predicted_step(
    scheduled: Sequence[ScheduledGraph], spec: ModelSpec, stepping: Mapping[str, Stepping], ahead: frozenset[str]
) -> PredictedStep:
    """Predict a step of these graphs and of ``stepping``: parameter → what steps it. ``ahead`` has the units whose
    gathers begin in the step."""
    cost = scheduled[0].cost
    by: dict[Stepping, list[str]] = {}
    for name, p in spec.parameters.items():
        if name in stepping and p.trainable:
            by.setdefault(stepping[name], []).append(name)

    def seconds_of(how: Stepping, names: Sequence[str]) -> float | None:
        return None if how.known_as is None else optimizer_seconds(how.known_as, nbytes_of(names), cost.hardware)

    def nbytes_of(names: Sequence[str]) -> int:
        return sum(spec.parameters[name].shard_numel * spec.parameters[name].dtype.itemsize for name in names)

    rows = [OptimizerRow(how, tuple(names), nbytes_of(names), seconds_of(how, names)) for how, names in by.items()]
    units = dict.fromkeys(p.unit for p in spec.parameters.values())
    early = {how: [name for name in names if spec.parameters[name].unit in ahead] for how, names in by.items()}
    first = sum(seconds_of(how, names) or 0.0 for how, names in early.items())
    return PredictedStep(
        {s.graph.phase: s.timeline.seconds for s in scheduled},
        sum(s.timeline.exposed for s in scheduled),
        rows,
        cost.hardware.name,
        first,
        sum(row.seconds or 0.0 for row in rows) - first,
        {unit: _gather_seconds(unit, spec, cost) for unit in units if unit in ahead},
    )


def _gather_seconds(unit: str, spec: ModelSpec, cost: CostModel) -> float:
    """Return the seconds of what ``unshard()`` gathers of a unit: its part of each bucket, in one collective."""
    found = 0.0
    for bucket in spec.buckets:
        members = [p for p in bucket.parameters if p.unit == unit]
        if bucket.world_size > 1 and members:
            numel = sum(p.shard_numel for p in members) * bucket.world_size
            found += cost.all_gather_seconds(numel * bucket.parameters[0].param_dtype.itemsize, bucket.mesh.group)
    return found
