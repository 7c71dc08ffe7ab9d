"""What is allocated on the CPU, by a function or a training step, as torch's profiler counts it."""

from __future__ import annotations

import gc
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from graph_fsdp.runtime import Program

SLACK = 2**15  # the state of the random numbers, four times


def nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


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

    with patch.object(Program, "__call__", marked):
        events = _events(step)
    spans = {e["name"]: e for e in events if e["name"].startswith("program ") and "dur" in e}
    changes = _changes(events)
    return [_allocations(spans[f"program {i}"], changes) for i in range(next(count))]


def peak_of(function: Callable[[], object]) -> int:
    """The most bytes above those at the start while ``function`` runs. Without the garbage collector, which would give
    back what is not the function's, and hide what the function itself does not."""
    gc.collect()
    gc.disable()
    try:
        events = _events(function)
    finally:
        gc.enable()
    changes = sorted(_changes(events), key=lambda c: c[0])
    return max(itertools.accumulate((n for _, n in changes), initial=0))


def _events(function: Callable[[], object]) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _changes(events: list[dict[str, Any]]) -> list[tuple[float, int]]:
    """(time, bytes) of each allocation and, negative, of each release."""
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]"]
    assert changes, "the profiler saw no allocation"
    return changes


def _allocations(span: dict[str, Any], changes: list[tuple[float, int]]) -> Allocations:
    inside = [n for ts, n in sorted(changes, key=lambda c: c[0]) if span["ts"] <= ts <= span["ts"] + span["dur"]]
    held = list(itertools.accumulate(inside, initial=0))
    return Allocations(max(held), held[-1])
