"""What ``graph_fsdp.monitor`` costs: the host's time in it, by the time of a step.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/monitor_overhead.py

Trains the GPT of ``examples/gpt.py``, reports to a file, a port and a function, and adds up the time within the
monitor's own functions: its hooks on steps, the marks around waits, records, the store, and what it reports to. A
difference of steps with and without it would be lost in the noise of a step. ``--save`` writes what
docs/running.md has.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import graph_fsdp
from graph_fsdp.runtime.observe import Event, Observer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, GPTConfig

RESULTS = Path(__file__).parent / "results" / "monitor_overhead.json"


class Spent:
    """Adds up seconds in functions, without those of functions that are called from within these."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            value = function(*args)
            self.seconds += time.perf_counter() - begin
            return value

        return call

    def observer(self, observe: Callable[..., Observer | None]) -> Callable[..., Observer | None]:
        """Time an observer without the wait that it sees."""

        def call(*args: Any) -> Observer | None:
            begin = time.perf_counter()
            see = observe(*args)
            self.seconds += time.perf_counter() - begin
            return None if see is None else functools.partial(self._seen, see)

        return call

    def _seen(self, see: Observer, event: Event, wait: Callable[[], Any]) -> Any:
        within = 0.0

        def waiting() -> Any:
            nonlocal within
            begin = time.perf_counter()
            value = wait()
            within = time.perf_counter() - begin
            return value

        begin = time.perf_counter()
        value = see(event, waiting)
        self.seconds += time.perf_counter() - begin - within
        return value


@contextlib.contextmanager
def counted(spent: Spent) -> Iterator[None]:
    monitor = graph_fsdp.Monitor
    with contextlib.ExitStack() as stack:
        for name in ("forward", "clipped", "_before", "_after"):
            stack.enter_context(mock.patch.object(monitor, name, spent.timed(getattr(monitor, name))))
        stack.enter_context(mock.patch.object(monitor, "run", spent.observer(monitor.run)))
        yield


def measure(layers: int, width: int, steps: int, every: int) -> tuple[float, float]:
    """Return the seconds of a step, and those of them in the monitor: means over ``steps``."""
    torch.manual_seed(0)
    config = GPTConfig(layers=layers, width=width, heads=4)
    model = graph_fsdp.compile(GPT(config), backend="eager")
    optimizer = graph_fsdp.distribute_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    batch = torch.randint(0, config.vocab, (8, config.context))
    spent, warm = Spent(), 2 * every
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.prom"
        given: dict[str, Any] = {"every": every, "line": False, "path": path, "port": 0, "to": lambda *_: None}
        with counted(spent), graph_fsdp.monitor(model, **given):
            for step in range(warm + steps):
                if step == warm:
                    spent.seconds, begin = 0.0, time.perf_counter()
                model(batch, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            seconds, within = time.perf_counter() - begin, spent.seconds
    return seconds / steps, within / steps


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Return what each rank has measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--save", type=Path, default=None, help=f"where to write JSON, such as {RESULTS.name}")
    options = parser.parse_args(arguments)
    if own_group := "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    step, within = measure(options.layers, options.width, options.steps, options.every)
    mine = {"microseconds": within * 1e6, "step milliseconds": step * 1e3, "share": within / step}
    found: list[Any] = [mine]
    if dist.is_initialized():
        found *= dist.get_world_size()
        dist.all_gather_object(found, mine)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for rank, values in enumerate(found):
            print(f"rank {rank}: {', '.join(f'{name} {value:.4g}' for name, value in values.items())}")
        if options.save is not None:
            facts = {"torch": torch.__version__, "machine": platform.machine(), "every": options.every}
            options.save.write_text(json.dumps({**facts, "ranks": found}, indent=1) + "\n")
    if own_group:
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
