"""What the executor itself costs on the CPU: per compute region, and per collective. No device, no network, one core.

    OMP_NUM_THREADS=1 python benchmarks/executor_overhead.py --layers 24

The GPT of ``examples/gpt.py`` is compiled on a fake process group of eight ranks, whose collectives return at once.
Then its forward and backward programs run with other functions in the place of their regions: they return the tensors
that the region returned once. What is left is the executor: the generated function, buffers, slots, and the calls into
torch.distributed. CPU time of the thread within the frame's methods (start, wait) counts for collectives, all
other for regions. The model is so narrow that copying its parameters takes no time. Not shown: what a region's own call
costs, and what a real process group's call does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import graph_fsdp
from graph_fsdp.compat import fake_process_group
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import Program
from graph_fsdp.runtime.frame import Frame
from graph_fsdp.runtime.regions.regions import Region, cut

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results" / "executor_overhead.json"
TARGETS = {"region": 20.0, "collective": 30.0}  # microseconds
_METHODS = ("start", "wait")


class Counted:
    """Adds up the time spent in the methods of frames."""

    seconds = 0.0


def _counted(method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        begin = time.thread_time()
        value = method(*args)
        Counted.seconds += time.thread_time() - begin
        return value

    return call


@contextlib.contextmanager
def counting() -> Iterator[None]:
    methods = {name: getattr(Frame, name) for name in _METHODS}
    for name, method in methods.items():
        setattr(Frame, name, _counted(method))
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Frame, name, method)


@contextlib.contextmanager
def other_regions(program: Program, regions: Mapping[str, Any]) -> Iterator[None]:
    ordinary = program.ordinary
    program.ordinary = types.FunctionType(ordinary.__code__, {**ordinary.__globals__, **regions})
    try:
        yield
    finally:
        program.ordinary = ordinary


def measure(layers: int, repeats: int) -> dict[str, float]:
    """Microseconds per region and per collective: medians over ``repeats`` runs of both programs."""
    with fake_process_group(world_size=8):
        model = graph_fsdp.compile(GPT(GPTConfig(layers=layers, width=16, heads=2)), backend="eager")
        batch = torch.randint(0, 256, (2, 32))
        inputs: dict[int, list[Any]] = {}
        replayed: dict[int, dict[str, Callable[[list[Any]], Sequence[Any]]]] = {}
        programs = _record(model, batch, inputs, replayed)
        per_region, per_collective = [], []
        regions = sum(isinstance(step, Region) for p in programs for step in cut(p.graph))
        collectives = sum(len(p.graph.collectives) for p in programs)
        for _ in range(repeats):
            Counted.seconds, total = 0.0, 0.0
            for program in programs:
                with other_regions(program, replayed[id(program)]), counting():
                    arguments = list(inputs[id(program)])
                    begin = time.thread_time()
                    program(arguments)
                    total += time.thread_time() - begin
            per_collective.append(Counted.seconds / collectives * 1e6)
            per_region.append((total - Counted.seconds) / regions * 1e6)
    middle = repeats // 2
    return {
        "regions": regions,
        "collectives": collectives,
        "microseconds per region": round(sorted(per_region)[middle], 2),
        "microseconds per collective": round(sorted(per_collective)[middle], 2),
    }


def _record(
    model: GPT, batch: torch.Tensor, inputs: dict[int, list[Any]], replayed: dict[int, dict[str, Any]]
) -> list[Program]:
    """Run a step, keep what each program is called with, and what each of its regions returns."""
    model(batch, batch).backward()
    programs = [p for (_, phase), p in engine_of(model).programs.items() if phase != "inference"]

    def recording(program: Program) -> dict[str, Callable[[list[Any]], Any]]:
        outputs = replayed[id(program)] = {}

        def call(name: str, values: list[Any]) -> Any:
            found = program.constants[name](values)
            outputs[name] = lambda _: found
            return found

        names = [f"region_{i}" for i, step in enumerate(cut(program.graph)) if isinstance(step, Region)]
        return {name: partial(call, name) for name in names}

    run = Program.__call__

    def recorded(program: Program, args: list[Any]) -> Any:
        inputs[id(program)] = list(args)
        with other_regions(program, recording(program)):
            return run(program, args)

    with mock.patch.object(Program, "__call__", recorded):
        model(batch, batch).backward()
    return programs


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--save", type=Path, default=None, help=f"where to write JSON, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    found = measure(options.layers, options.repeats)
    for kind, target in TARGETS.items():
        print(f"{found[f'microseconds per {kind}']:.1f} µs per {kind} (target: under {target:.0f})")
    if options.save is not None:
        facts = {"torch": torch.__version__, "machine": platform.machine(), "layers": options.layers}
        options.save.write_text(json.dumps({**facts, **found}, indent=1) + "\n")
    return found


if __name__ == "__main__":
    main()
