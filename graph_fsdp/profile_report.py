"""What ``graph_fsdp.profile`` returns: measured beside predicted seconds, to read, to keep and to schedule with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any

from graph_fsdp.passes import Measurements
from graph_fsdp.passes.graph import Phase

_FORMAT = "graph_fsdp.Profile"


@dataclass(frozen=True)
class RegionTime:
    """A compute region of one captured graph. ``region``: its number in the printed program (``region_3``).
    ``unit``: whose parameters it computes with. ``node``: the first that takes time. Times in seconds."""

    graph: int
    phase: Phase
    region: int
    unit: str
    node: str
    predicted_seconds: float
    seconds: float


@dataclass(frozen=True)
class CollectiveTime:
    """A collective of one captured graph, with packing and unpacking. ``kind``: "gather", "reduce" or "replicate"
    (reduced again over replicas). ``nbytes``: of the gathered buffer, or of what is reduced to. Times in seconds."""

    graph: int
    phase: Phase
    kind: str
    bucket: str
    nbytes: int
    predicted_seconds: float
    seconds: float


@dataclass(frozen=True)
class Profile:
    """Equal on all ranks. ``default_pipeline(measured=profile)`` schedules with it.

    measurements: what the cost model takes from it. regions, collectives: in the order in which they ran; regions of
    views alone are left out. hardware: what the predictions were computed with. ranks, steps: over which the times
    are averages. The predictions are those that the running program was scheduled by.
    """

    measurements: Measurements
    regions: Sequence[RegionTime]
    collectives: Sequence[CollectiveTime]
    hardware: str
    ranks: int
    steps: int

    @property
    def compute_seconds(self) -> float:
        """Of all regions together, as measured."""
        return sum(row.seconds for row in self.regions)

    @property
    def predicted_compute_seconds(self) -> float:
        return sum(row.predicted_seconds for row in self.regions)

    @property
    def collective_seconds(self) -> float:
        """Of all collectives, one after the other, as measured."""
        return sum(row.seconds for row in self.collectives)

    @property
    def predicted_collective_seconds(self) -> float:
        return sum(row.predicted_seconds for row in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """A dict that ``json.dumps`` takes."""
        return {
            "format": _FORMAT,
            "hardware": self.hardware,
            "ranks": self.ranks,
            "steps": self.steps,
            "measurements": self.measurements.to_json(),
            "regions": [asdict(row) for row in self.regions],
            "collectives": [asdict(row) for row in self.collectives],
        }

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """What ``to_json`` gave. Raises ValueError on anything else."""
        expected = {"format", *(field.name for field in fields(cls))}
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT or set(data) != expected:
            raise ValueError("profile: this is not what graph_fsdp.Profile.save wrote; save the profile again")
        return cls(
            Measurements.from_json(data["measurements"]),
            [RegionTime(**row) for row in data["regions"]],
            [CollectiveTime(**row) for row in data["collectives"]],
            hardware=data["hardware"],
            ranks=data["ranks"],
            steps=data["steps"],
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON. It is the same on all ranks: one of them may do so."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Profile:
        """What ``save`` wrote. Raises ValueError on another file, OSError where there is none."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"path: {str(path)!r} is not a saved profile: {error}") from error

    def __str__(self) -> str:
        totals = [
            ("compute", _times(self.predicted_compute_seconds, self.compute_seconds)),
            ("collectives", _times(self.predicted_collective_seconds, self.collective_seconds)),
        ]
        lines = [
            f"graph_fsdp profile: {self.steps} step{'s' if self.steps > 1 else ''} on {self.ranks} "
            f"rank{'s' if self.ranks > 1 else ''}, predicted for {self.hardware}; milliseconds, one after the other",
            *_columns([("", *_HEADER), *((name, *times) for name, times in totals)], left=1),
        ]
        rows: list[RegionTime | CollectiveTime] = [*self.regions, *self.collectives]
        graphs = dict.fromkeys((row.graph, row.phase) for row in rows)
        for graph in graphs:
            lines += ["", f"graph {graph[0]}, {graph[1]}"]
            regions = [
                (f"region_{row.region}", row.unit or "-", row.node, *_times(row.predicted_seconds, row.seconds))
                for row in self.regions
                if (row.graph, row.phase) == graph
            ]
            collectives = [
                (row.kind, row.bucket, f"{row.nbytes:,} bytes", *_times(row.predicted_seconds, row.seconds))
                for row in self.collectives
                if (row.graph, row.phase) == graph
            ]
            lines += _columns([("region", "unit", "first node", *_HEADER), *regions] if regions else [], left=3)
            lines += _columns([("collective", "bucket", "size", *_HEADER), *collectives] if collectives else [], left=2)
        return "\n".join(lines)


_HEADER = ("predicted", "measured", "ratio")


def _times(predicted: float, measured: float) -> tuple[str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else "-"
    return f"{predicted * 1e3:.3f}", f"{measured * 1e3:.3f}", ratio


def _columns(rows: list[tuple[str, ...]], left: int) -> list[str]:
    """Rows as lines; the first ``left`` columns are text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
