"""What a training step allocates on the CPU, as torch's profiler counts it."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile, record_function

from graph_fsdp.runtime import Program


@dataclass(frozen=True)
class Allocations:
    """Bytes above those at the start of a program: the most while it ran, and those left at its end."""

    peak: int
    end: int


def measure(step: Callable[[], None]) -> list[Allocations]:
    """Run ``step``; what each program that it runs allocates, in the order in which they run."""
    count = itertools.count()
    call = Program.__call__

    def marked(program: Program, args: list[Any]) -> Any:
        with record_function(f"program {next(count)}"):
            return call(program, args)

    with (
        patch.object(Program, "__call__", marked),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = {e["name"]: e for e in events if e["name"].startswith("program ") and "dur" in e}
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    assert changes, "the profiler saw no allocation"
    return [_allocations(spans[f"program {i}"], changes) for i in range(next(count))]


def _allocations(span: dict[str, Any], changes: list[tuple[float, int]]) -> Allocations:
    inside = [n for ts, n in sorted(changes, key=lambda c: c[0]) if span["ts"] <= ts <= span["ts"] + span["dur"]]
    held = list(itertools.accumulate(inside, initial=0))
    return Allocations(max(held), held[-1])
