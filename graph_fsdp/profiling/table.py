"""A profile is what ``graph_fsdp.profile`` returns: measured beside predicted seconds, to read and schedule with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from rich.table import Table

from graph_fsdp.passes import Measurements
from graph_fsdp.passes.ir.graph import Phase
from graph_fsdp.report.file import write_text
from graph_fsdp.report.text import columns, milliseconds
from graph_fsdp.report.trace_events import Process, trace_of

_FORMAT = "graph_fsdp.Profile"
_TIMES = ("predicted", "measured", "ratio")
_EXPOSED = ("exposed: predicted", "measured")
_SLOWEST = ("slowest", "rank")


@dataclass(frozen=True)
class RegionTime:
    """Times a compute region (``region_3`` of the printed program) of one graph by itself: mean over ranks, and slowest
    rank's seconds. ``unit``: whose parameters it computes with. ``node``: the first that takes time."""

    graph: int
    phase: Phase
    region: int
    unit: str
    node: str
    predicted_seconds: float
    seconds: float
    slowest_rank: int
    slowest_seconds: float

    def cells(self) -> list[str]:
        times = _times(self.predicted_seconds, self.seconds)
        slowest = milliseconds(self.slowest_seconds), str(self.slowest_rank)
        return [f"region_{self.region}", self.unit or "-", self.node, *times, *slowest]


@dataclass(frozen=True)
class CollectiveTime:
    """Times a collective of one captured graph, with packing and unpacking, in seconds. ``kind``: "gather", "reduce" or
    "replicate" (reduced again over replicas). ``nbytes``: of the gathered buffer, or of what is reduced to.
    ``seconds``: with nothing beside it. ``exposed_seconds``: what the program waited for it in a step as in training,
    with unpacking; the host's time where the host waits (gloo), else the device's."""

    graph: int
    phase: Phase
    kind: str
    bucket: str
    nbytes: int
    predicted_seconds: float
    seconds: float
    predicted_exposed_seconds: float
    exposed_seconds: float

    def cells(self) -> list[str]:
        exposed = map(milliseconds, (self.predicted_exposed_seconds, self.exposed_seconds))
        times = _times(self.predicted_seconds, self.seconds)
        return [self.kind, self.bucket, f"{self.nbytes:,}", *times, *exposed]


@dataclass(frozen=True)
class GraphTime:
    """Times a run of one captured graph in a step as in training, in seconds."""

    graph: int
    phase: Phase
    predicted_seconds: float
    seconds: float


_ROWS: dict[str, type] = {"regions": RegionTime, "collectives": CollectiveTime, "graphs": GraphTime}


class _Seconds:
    """Sums an attribute over all rows of a kind, as an attribute of a profile."""

    def __init__(self, rows: str, attribute: str) -> None:
        self.rows, self.attribute = rows, attribute

    def __get__(self, profile: Profile, owner: type | None = None) -> float:
        return float(sum(getattr(row, self.attribute) for row in getattr(profile, self.rows)))


@dataclass(frozen=True)
class Profile:
    """Holds measured times, equal on all ranks but for ``schedule``. ``default_pipeline(measured=profile)`` schedules
    with it.

    measurements: what the cost model takes from it. regions, collectives, graphs: in the order in which they ran;
    regions of views alone are left out. hardware: what the predictions were computed with. ranks, steps: over which the
    times are averages. schedule: a step as predicted, and as this rank has run it; None in a loaded profile. The
    predictions are those that the running program was scheduled by.

    Sums of seconds, measured and predicted: ``compute_seconds`` of all regions, ``collective_seconds`` of all
    collectives, one after the other; in a step as in training, ``exposed_seconds``, for which programs waited for
    collectives, and ``step_seconds``, of all graphs, without the optimizer and what Python does between.
    """

    measurements: Measurements
    regions: Sequence[RegionTime]
    collectives: Sequence[CollectiveTime]
    graphs: Sequence[GraphTime]
    hardware: str
    ranks: int
    steps: int
    schedule: tuple[Process, Process] | None = field(default=None, compare=False, repr=False)

    compute_seconds = _Seconds("regions", "seconds")
    collective_seconds = _Seconds("collectives", "seconds")
    exposed_seconds = _Seconds("collectives", "exposed_seconds")
    step_seconds = _Seconds("graphs", "seconds")
    predicted_compute_seconds = _Seconds("regions", "predicted_seconds")
    predicted_collective_seconds = _Seconds("collectives", "predicted_seconds")
    predicted_exposed_seconds = _Seconds("collectives", "predicted_exposed_seconds")
    predicted_step_seconds = _Seconds("graphs", "predicted_seconds")

    def stragglers(self, above: float = 1.1) -> list[RegionTime]:
        """Return the regions that take their slowest rank more than ``above`` times as long as the mean rank.

        Those come first on which most seconds are lost.

        Raises:
            ValueError: ``above`` is below 1.
        """
        if not above >= 1:
            raise ValueError(f"above must be a factor, 1 or more, got {above!r}")
        found = [row for row in self.regions if row.slowest_seconds > above * row.seconds]
        return sorted(found, key=lambda row: row.seconds - row.slowest_seconds)

    def save_trace(self, path: str | PathLike[str], *, predicted: bool = False) -> None:
        """Write one step of this rank as a trace that Perfetto and chrome://tracing open, as ``GraphReport.save_trace``
        does.

        It is the step of median duration, as in training. When a collective ended is known where compute waited for it,
        else estimated; its slice says which. ``predicted`` adds the predicted schedule above it, as another process of
        the trace.

        Raises:
            LookupError: the profile was loaded, and a saved one has no schedule.
            OSError: the file cannot be written.
        """
        if self.schedule is None:
            raise LookupError(
                "profile: it was loaded from a file, which has no schedule of a rank; save the trace of the profile "
                "that graph_fsdp.profile returned"
            )
        write_text(path, json.dumps(trace_of(self.schedule if predicted else self.schedule[1:])))

    def to_json(self) -> dict[str, Any]:
        """Return a dict that ``json.dumps`` takes, without ``schedule``."""
        return {
            "format": _FORMAT,
            "hardware": self.hardware,
            "ranks": self.ranks,
            "steps": self.steps,
            "measurements": self.measurements.to_json(),
            **{name: [asdict(row) for row in getattr(self, name)] for name in _ROWS},
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """Read what ``to_json`` gave. Raises ValueError on anything else."""
        expected = {"format", *(field.name for field in fields(cls) if field.name != "schedule")}
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT or set(data) != expected:
            raise ValueError("profile: this is not what graph_fsdp.Profile.save wrote; save the profile again")
        values: dict[str, Any] = {name: data[name] for name in ("hardware", "ranks", "steps")}
        values |= {name: [kind(**row) for row in data[name]] for name, kind in _ROWS.items()}
        return cls(Measurements.from_json(data["measurements"]), **values)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON, without ``schedule``. It is equal on all ranks: one of them may do so."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1, sort_keys=True))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """Read what ``save`` wrote. Raises ValueError on another file, OSError where there is none."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"path: {str(path)!r} is not a saved profile: {error}") from error

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        lines = [
            f"graph_fsdp profile: {self.steps} step{'s' if self.steps > 1 else ''} on {ranks}, "
            f"predicted for {self.hardware}; milliseconds",
            columns(("", *_TIMES), [(name, *times) for name, times in self._totals().items()], texts=1),
        ]
        for graph in self.graphs:
            times = _times(graph.predicted_seconds, graph.seconds)
            lines += ["", columns(("", *_TIMES), [(f"graph {graph.graph}, {graph.phase}", *times)], texts=1)]
            if regions := self._rows(graph, self.regions):
                lines.append(columns(("region", "unit", "first node", *_TIMES, *_SLOWEST), regions, texts=3))
            if collectives := self._rows(graph, self.collectives):
                lines.append(columns(("collective", "bucket", "bytes", *_TIMES, *_EXPOSED), collectives, texts=2))
        return "\n".join(lines)

    def table(self) -> Table:
        """Return what ``str`` has as a table of rich, with one row for each region and collective."""
        totals = ", ".join(f"{name} {times[0]} → {times[1]}" for name, times in self._totals().items())
        table = Table(title=f"predicted for {self.hardware} → measured, in ms: {totals}", title_justify="left")
        for name in ("graph", "what", "unit", "node, bytes"):
            table.add_column(name)
        for name in (*_TIMES, *_EXPOSED, *_SLOWEST):
            table.add_column(name, justify="right")
        for graph in self.graphs:
            rows = [["graph", "", "", *_times(graph.predicted_seconds, graph.seconds)]]
            rows += [[*row[:6], "", "", *row[6:]] for row in self._rows(graph, self.regions)]
            for row in [*rows, *self._rows(graph, self.collectives)]:
                table.add_row(f"{graph.graph} {graph.phase}", *row)
            table.add_section()
        return table

    def _totals(self) -> dict[str, tuple[str, str, str]]:
        """Return the totals: compute and collectives by themselves, the others as in training."""
        return {
            "compute": _times(self.predicted_compute_seconds, self.compute_seconds),
            "collectives": _times(self.predicted_collective_seconds, self.collective_seconds),
            "exposed": _times(self.predicted_exposed_seconds, self.exposed_seconds),
            "step": _times(self.predicted_step_seconds, self.step_seconds),
        }

    def _rows(self, graph: GraphTime, rows: Sequence[RegionTime | CollectiveTime]) -> list[list[str]]:
        return [row.cells() for row in rows if (row.graph, row.phase) == (graph.graph, graph.phase)]


def _times(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else "-"
    return milliseconds(predicted), milliseconds(measured), ratio
