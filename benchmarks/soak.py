"""A long run, and what is left behind by it: resident memory, file descriptors, threads and compilations per rank.

    python benchmarks/soak.py
    python benchmarks/soak.py --steps 20000 --processes 4

Training with batches of several lengths, evaluation and checkpoints in between, most of them asynchronous. Every so
often the model is dropped and a new one made, compiled and filled from the last checkpoint in the same process; and the
processes themselves are started again, from it too.

Counted every few steps, after a garbage collection: resident bytes of the process, its open files, its threads, and
the graphs that the model of then has captured. In each process the first part of its steps, two models long, is
warm-up. What is held against the run: the most resident bytes after it over those at its end, the most files and
threads after it over those at its end, and whether any model captured more graphs than the first did. A run that grows
fails (exit code 1).

What it does not show: resident memory is what the operating system says, and holds what the allocator keeps for
later. Memory of accelerators is not in it. A loss that does not fall over the whole run fails it too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    command_of,
    default_device,
    default_ranks,
    gather,
    machine,
    on_a_rank,
    parser_of,
    process_group,
    publish,
    say,
    start_ranks,
    workload_of,
)
from plots import lines
from tables import Table
from torch.distributed.device_mesh import DeviceMesh
from workloads import Workload, loss_of

import graph_fsdp
from graph_fsdp import checkpoint

LENGTHS = (1.0, 0.75, 0.5)  # parts of --length, in turn
MODELS_OF_WARMUP = 2
ALLOWED_GROWTH = 0.02  # of resident memory
_FOLDER = "GRAPH_FSDP_SOAK_FOLDER"
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Sample:
    """Of one rank after so many steps of all. ``graphs``: captured by the model of now; ``model``: which of the
    process, from 0."""

    step: int
    process: int
    model: int
    resident: int
    files: int
    threads: int
    graphs: int


def size_of_process() -> tuple[int, int, int]:
    """Resident bytes, open files and threads of this process, once it saves nothing."""
    for thread in threading.enumerate():
        if thread.name.startswith("graph_fsdp-save"):  # counted between saves
            thread.join()
    time.sleep(0.05)  # for the system to know, too
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    files, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return resident, files, threads


def sample(step: int, process: int, model: int, graphs: int) -> Sample:
    return Sample(step, process, model, *size_of_process(), graphs)


class Life:
    """One model, from its making to its end."""

    def __init__(self, workload: Workload, mesh: DeviceMesh, backend: str, folder: Path) -> None:
        self.workload, self.device = workload, torch.device(mesh.device_type)
        self.model = graph_fsdp.compile(workload.make(self.device), mesh, backend=backend)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        # Lengths are counted from here, so that every model captures the same graphs.
        last = checkpoint.latest(folder)
        self.done = 0 if last is None else checkpoint.load(last, self.model, self.optimizer)["step"]

    def step(self, number: int) -> float:
        loss = loss_of(self.model(**self._batch(number)))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def evaluate(self, number: int) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = loss_of(self.model(**self._batch(number))).item()
        self.model.train()
        return loss

    def save(self, folder: Path, done: int, asynchronous: bool) -> None:
        path = folder / f"checkpoint{done}"
        checkpoint.save(path, self.model, self.optimizer, extra={"step": done}, asynchronous=asynchronous, keep=2)

    def graphs(self) -> int:
        return len(graph_fsdp.inspect(self.model).graphs)

    def _batch(self, number: int) -> dict[str, torch.Tensor]:
        tokens = self.workload.tokens(number, dist.get_rank(), self.device)
        length = int(self.workload.length * LENGTHS[(number - self.done) % len(LENGTHS)])
        return {name: value[:, :length] for name, value in tokens.items()}


def live(options: argparse.Namespace, folder: Path, process: int) -> None:
    """All steps of one process; its samples go into ``folder``."""
    per_process = options.steps // options.processes
    first, samples, losses = process * per_process, [], []
    with process_group(options.device) as mesh:
        life, number = None, -1
        for step in range(first, first + per_process):
            if (step - first) % options.restart_every == 0:
                del life
                gc.collect()
                number += 1
                life = Life(workload_of(options), mesh, options.backend, folder)
                assert life.done == step, "a checkpoint of another step"
                say(f"process {process}, model {number}, step {step}")
            assert life is not None
            losses.append(life.step(step))
            done = step + 1
            if done % options.evaluate_every == 0:
                life.evaluate(step)
            last = (done - first) % options.restart_every == 0
            if last or done % options.save_every == 0:
                life.save(folder, done, asynchronous=not last)
            if done % options.sample_every == 0:
                samples.append(sample(done, process, number, life.graphs()))
        found = gather(([asdict(s) for s in samples], losses))
        if dist.get_rank() == 0:
            (folder / f"process{process}.json").write_text(json.dumps(found))


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """What is held against one rank of one process (see above)."""
    warm = [s for s in samples if s.model < MODELS_OF_WARMUP]
    later = [s for s in samples if s.model >= MODELS_OF_WARMUP]
    assert warm and later, "a process needs more models than its warm-up has"
    begin = warm[-1]
    first = max(s.graphs for s in samples if s.model == 0)
    return {
        "resident_bytes": begin.resident,
        "resident_growth": max(s.resident for s in later) / begin.resident - 1,
        "files_growth": max(s.files for s in later) - begin.files,
        "threads_growth": max(s.threads for s in later) - begin.threads,
        "graphs_of_first_model": first,
        "graphs_of_any_model": max(s.graphs for s in samples),
    }


def grew(row: dict[str, Any]) -> list[str]:
    """What did, of one row of the result."""
    found = [what for what in ("files", "threads") if row[f"{what}_growth"] > 0]
    if row["resident_growth"] > ALLOWED_GROWTH:
        found.append("resident memory")
    if row["graphs_of_any_model"] > row["graphs_of_first_model"]:
        found.append("captured graphs")
    return found


def run(options: argparse.Namespace, script: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Start the ranks of each process in turn. None if they failed."""
    ranks = options.ranks or default_ranks(options.device)
    rows, samples, losses = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for process in range(options.processes):
            environment = {_FOLDER: folder, "GRAPH_FSDP_SOAK_PROCESS": str(process)}
            if start_ranks(script, arguments, ranks, options.device, **environment):
                return None
            for rank, (found, of_rank) in enumerate(json.loads((Path(folder) / f"process{process}.json").read_text())):
                of_process = [Sample(**values) for values in found]
                rows.append({"process": process, "rank": rank, **summary(of_process)})
                samples += found if rank == 0 else []
                losses += of_rank if rank == 0 else []
    part = max(1, len(losses) // 20)
    return {
        "benchmark": "soak",
        "command": command_of(script, arguments),
        "machine": machine(options.device, ranks),
        "steps": options.steps,
        "models": options.steps // options.restart_every,
        "backend": options.backend,
        "rows": rows,
        "samples_of_rank_0": samples,
        "first_losses": sum(losses[:part]) / part,
        "last_losses": sum(losses[-part:]) / part,
    }


def table(result: dict[str, Any]) -> Table:
    rows = [
        [
            f"process {row['process']}, rank {row['rank']}",
            f"{row['resident_bytes'] / 1e6:,.0f}",
            f"{100 * row['resident_growth']:+.2f}%",
            f"{row['files_growth']:+d}",
            f"{row['threads_growth']:+d}",
            f"{row['graphs_of_first_model']} / {row['graphs_of_any_model']}",
        ]
        for row in result["rows"]
    ]
    header = ("", "MB after warm-up", "at most after that", "files", "threads", "graphs: first model / any")
    note = (
        f"{result['steps']:,} steps, {result['models']} models, {result['backend']}; mean loss of the first steps "
        f"{result['first_losses']:.3f}, of the last {result['last_losses']:.3f}."
    )
    return Table(header, rows, note)


def plot(result: dict[str, Any], path: Path) -> None:
    series: dict[str, dict[int, float]] = {}
    for s in result["samples_of_rank_0"]:
        series.setdefault(f"process {s['process']}", {})[s["step"]] = s["resident"] / 1e6
    lines(series, ("step", "resident MB of rank 0"), path)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__, "soak")
    parser.set_defaults(width=64, heads=4, vocab=64, batch=4, length=32)
    group = parser.add_argument_group("the run")
    group.add_argument("--steps", type=int, default=2000, help="of all processes together")
    group.add_argument("--processes", type=int, default=2, help="one after the other, each --ranks of them")
    group.add_argument("--restart-every", type=int, default=200, help="steps that a model lives")
    group.add_argument("--evaluate-every", type=int, default=50)
    group.add_argument("--save-every", type=int, default=100)
    group.add_argument("--sample-every", type=int, default=50)
    group.add_argument("--layers", type=int, default=2)
    group.add_argument("--backend", choices=("eager", "inductor"), default="eager")
    options = parser.parse_args(arguments)
    options.device = options.device or default_device()
    if options.steps % (options.processes * options.restart_every):
        parser.error("--steps must be a multiple of --processes times --restart-every")
    if options.steps // options.processes // options.restart_every <= MODELS_OF_WARMUP:
        parser.error(f"a process must live longer than {MODELS_OF_WARMUP} models: raise --steps or lower the others")
    if on_a_rank():
        live(options, Path(os.environ[_FOLDER]), int(os.environ["GRAPH_FSDP_SOAK_PROCESS"]))
        return 0
    result = run(options, __file__, arguments)
    if result is None:
        return 1
    publish(options, result, table, plot)
    failed = [
        f"process {row['process']}, rank {row['rank']}: {', '.join(grew(row))}" for row in result["rows"] if grew(row)
    ]
    if failed:
        print("GREW: " + "; ".join(failed))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
