"""How long it takes from a model to the end of its first training step, from a cold cache, against depth.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --depths 6 24 --implementations ours fsdp2_compiled --repeats 3
    python benchmarks/compile_time.py --depths 6 48 --starts cold warm precompiled --name compile_time_starts

Each measurement is one of its own: fresh processes, and an Inductor cache directory that holds nothing of the model.
It begins when the model exists on every rank, and ends when the slowest rank has done forward, backward and optimizer
step: sharding, tracing, passes, compilation, and the step itself. Implementations take turns at each depth. CPU
seconds are those of all ranks and of all processes that compile for them.

Once per toolchain Inductor finds out what the compiler can do and precompiles a header. That is done beforehand and
its time is shown apart; the measurements start from a cache directory with that and nothing else.

Columns on where the time went are the slowest rank's, from torch's own timers (``torch._dynamo.utils.compile_times``)
and our report: Inductor (code generation, C++ or Triton compilation, loading), our passes and their verifier, and
tracing, which is what else torch.compile does (Dynamo, AOTAutograd, partitioning). Losses of two steps are compared
with plain PyTorch's; a run in which one differs fails (exit code 1).

``--starts``: *warm* is the same again, with the caches that the cold start has left; *precompiled* is ours with what
``graph_fsdp.precompile`` has made, programs and kernels, and nothing else in the caches. A precompiled start is
compared with the other's cold one.

What it does not show: recompilations, imports, and the making of the model. It cannot run under torchrun, because it
starts its ranks anew for each measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    POLICIES,
    Disagreement,
    command_of,
    cores,
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
    synchronize,
    workload_of,
)
from implementations import IMPLEMENTATIONS, Implementation, Setup
from tables import Table
from training import TOLERANCES, Trainer, check_losses, reference_losses

import graph_fsdp

TOOLCHAIN, PRECOMPILE = "toolchain", "precompile"
STARTS = ("cold", "warm", "precompiled")
OURS = "ours"  # whose programs can be made ahead
COMPARED = "fsdp2_compiled"
STEPS = 2


# On a rank


def measure(options: argparse.Namespace, implementations: Mapping[str, Implementation]) -> dict[str, Any]:
    """One measurement; the same on every rank."""
    if options.measure == PRECOMPILE:
        return {"seconds": _precompile(options)}
    with process_group(options.device) as mesh:
        if options.measure == TOOLCHAIN:
            return {"seconds": max(gather(_compile_anything(options.device)))}
        implementation = implementations[options.measure]
        workload = workload_of(options, layers=options.depths[0])
        setup = Setup(workload.blocks, mesh, POLICIES[options.dtype])
        model = workload.make(setup.device)
        synchronize(options.device)
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), cpu_seconds()
        trainer = Trainer(implementation, workload, setup, model)
        trainer.step()
        synchronize(options.device)
        seconds, cpu = time.perf_counter() - begin, cpu_seconds()
        of_ranks = gather({"seconds": seconds, **_parts(trainer.model)})
        result = dict(max(of_ranks, key=lambda parts: parts["seconds"]))
        known = None if cpu is None or cpu_begin is None else cpu - cpu_begin
        result["cpu_seconds"] = _sum(gather(known))  # gathered from all, whether or not a rank knows its own
        for _ in range(STEPS - 1):
            trainer.step()
        expected = reference_losses(STEPS, workload, setup, alone=implementation.alone)
        losses = {options.measure: trainer.losses()}
        result["loss_difference"] = check_losses(losses, {options.measure: expected}, TOLERANCES[options.dtype])
        result["machine"] = machine(options.device, dist.get_world_size())
        return result


def _sum(of_ranks: list[float | None]) -> float | None:
    """None where a rank does not know."""
    known = [value for value in of_ranks if value is not None]
    return sum(known) if len(known) == len(of_ranks) else None


def _precompile(options: argparse.Namespace) -> float:
    """Make programs where Inductor's cache will be; on one process, whatever ``--ranks`` says."""
    workload, device = workload_of(options, layers=options.depths[0]), torch.device(options.device)
    begin = time.perf_counter()
    graph_fsdp.precompile(
        lambda: workload.make(torch.device("meta")),
        workload.tokens(0, 0, device),
        mesh_shape=(options.ranks,),
        path=Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "graph_fsdp" / "programs",
        device=device,
        mp_policy=POLICIES[options.dtype],
    )
    return time.perf_counter() - begin


def _compile_anything(device: str) -> float:
    begin = time.perf_counter()
    torch.compile(lambda x: torch.relu(x) + 1)(torch.ones(64, device=device))
    synchronize(device)
    return time.perf_counter() - begin


def _parts(model: torch.nn.Module) -> dict[str, float]:
    """Seconds of this rank's compilation; what torch has no timers for is left out."""
    names, values = torch._dynamo.utils.compile_times(repr="csv", aggregate=True)
    timers = dict(zip(names, map(float, values), strict=True))
    compiling = timers.get("_compile.compile_inner", 0.0) + timers.get("backward._backward_impl", 0.0)
    inductor = timers.get("compile_fx_inner", 0.0) + timers.get("graph_fsdp.build_kernels", 0.0)
    passes = 0.0
    if "_graph_fsdp" in model.__dict__:
        stages = [
            stage
            for captured in graph_fsdp.inspect(model).graphs
            for of_phase in captured.stages.values()
            for stage in of_phase.values()
            if stage.name != "partition"  # torch's
        ]
        passes = sum(stage.seconds + stage.verify_seconds + stage.snapshot_seconds for stage in stages)
    return {"tracing": compiling - inductor - passes, "passes": passes, "inductor": inductor}


def cpu_seconds() -> float | None:
    """CPU time of this process and all that descend from it, ended ones too; None where there is no ``/proc``."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has ended since
            stats[int(path.parent.name)] = path.read_text()
    if os.getpid() not in stats:
        return None
    # After the command's name, which may hold anything: state, parent, ..., and from the 12th on user and system time
    # of the process and of its ended children, in ticks.
    fields = {pid: text.rpartition(")")[2].split() for pid, text in stats.items()}
    counted, found = 0, {os.getpid()}
    while found:
        counted += sum(int(ticks) for pid in found for ticks in fields[pid][11:15])
        found = {pid for pid, values in fields.items() if int(values[1]) in found}
    return counted / os.sysconf("SC_CLK_TCK")


# Starting the ranks


def measure_all(options: argparse.Namespace, implementations: Mapping[str, Implementation]) -> dict[str, Any] | None:
    """All measurements, each on ranks of its own; None when one failed."""
    ranks = options.ranks or default_ranks(options.device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        toolchain, runs = None, []
        if any(implementations[name].inductor for name in options.implementations):
            found = _measure_one(options, ranks, TOOLCHAIN, 0, folder / TOOLCHAIN, ranks)
            if found is None:
                return None
            toolchain = found["seconds"]
        for repeat in range(options.repeats):
            for depth in options.depths:
                order = options.implementations if repeat % 2 == 0 else options.implementations[::-1]
                for implementation in order:
                    starts = _measure_starts(options, ranks, implementation, depth, folder)
                    if starts is None:
                        return None
                    for start, found in starts.items():
                        runs.append({"name": implementation, "depth": depth, "start": start, **found})
                        say(f"{implementation}, {depth} layers, {start}: {found['seconds']:.1f} s")
    return {
        "benchmark": "compile_time",
        "command": command_of(__file__, options.arguments),
        "machine": runs[0]["machine"],
        "settings": {**workload_of(options).__dict__, "dtype": options.dtype, "repeats": options.repeats}
        | {"depths": options.depths},
        "loss": {
            "tolerance": TOLERANCES[options.dtype],
            "largest_difference": max(run["loss_difference"] for run in runs),
            "steps": STEPS,
        },
        "toolchain_seconds": toolchain,
        "rows": _rows(runs, options),
    }


def _measure_starts(
    options: argparse.Namespace, ranks: int, implementation: str, depth: int, folder: Path
) -> dict[str, dict[str, Any]] | None:
    """The measurements of an implementation by start; None when one failed."""
    found = {}
    for start in (start for start in STARTS if start in options.starts):
        if start == "precompiled" and implementation != OURS:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as name:
            cache = Path(name) / "cache"
            if (folder / TOOLCHAIN).exists():
                shutil.copytree(folder / TOOLCHAIN, cache)
            before = {"cold": [], "warm": [(ranks, implementation)], "precompiled": [(1, PRECOMPILE)]}[start]
            for processes, what in [*before, (ranks, implementation)]:
                measured = _measure_one(options, ranks, what, depth, cache, processes)
                if measured is None:
                    return None
            found[start] = measured
    return found


def _measure_one(
    options: argparse.Namespace, ranks: int, what: str, depth: int, cache: Path, processes: int
) -> dict[str, Any] | None:
    into = cache.with_name("result.json")
    arguments = [*options.arguments, "--measure", what, "--into", str(into), "--depths", str(depth)]
    arguments += ["--ranks", str(ranks)]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    if options.device == "cpu":  # kernels are made for a number of threads
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    try:
        code = start_ranks(__file__, arguments, processes, options.device, **environment)
        result: dict[str, Any] | None = json.loads(into.read_text()) if code == 0 else None
        return result
    finally:
        into.unlink(missing_ok=True)


def _rows(runs: list[dict[str, Any]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians over the repeats."""
    rows = []
    for depth in options.depths:
        for name, start in itertools.product(options.implementations, STARTS):
            same = [run for run in runs if (run["name"], run["depth"], run["start"]) == (name, depth, start)]
            if not same:
                continue
            row: dict[str, Any] = {"name": name, "depth": depth, "start": start}
            for part in ("seconds", "cpu_seconds", "tracing", "passes", "inductor"):
                values = [run[part] for run in same if run[part] is not None]
                row[part] = statistics.median(values) if values else None
            row["runs"] = [run["seconds"] for run in same]
            rows.append(row)
    return rows


# The table and the plot


def table(result: dict[str, Any]) -> Table:
    rows = {(row["name"], row["depth"], row["start"]): row for row in result["rows"]}
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    depths = result["settings"]["depths"]
    least = 6 if 6 in depths else depths[0]
    compared = COMPARED if COMPARED in names else names[0]
    header = ["implementation", "layers", "start"]
    for kind, said in (("", "seconds"), ("CPU ", "CPU seconds")):
        header += [said, f"{kind}÷ {compared}", f"{kind}÷ {least} layers", f"{kind}÷ cold"]
    header += ["tracing", "passes", "Inductor"]
    lines = []
    for name, depth, start in itertools.product(names, depths, STARTS):
        row = rows.get((name, depth, start))
        if row is None:
            continue
        others = [
            rows.get((compared, depth, "cold" if start == "precompiled" else start)),
            rows.get((name, least, start)),
            rows.get((name, depth, "cold")),
        ]
        cells = [name, str(depth), start]
        for kind in ("seconds", "cpu_seconds"):
            cells += [_cell(row[kind], 1), *(_ratio(row, other, kind) for other in others)]
        lines.append([*cells, *(_cell(row[part], 1) for part in ("tracing", "passes", "inductor"))])
    loss = result["loss"]
    note = (
        f"Seconds. Inductor's toolchain, once: {_cell(result['toolchain_seconds'], 1) or '-'} s. Losses of "
        f"{loss['steps']} steps agree with plain PyTorch's to {loss['largest_difference']:.1g} (allowed: "
        f"{loss['tolerance']:g})."
    )
    return Table(header, lines, note)


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _ratio(row: dict[str, Any], other: dict[str, Any] | None, kind: str) -> str:
    return f"{row[kind] / other[kind]:.2f}" if row[kind] is not None and other is not None and other[kind] else ""


def plot(result: dict[str, Any], path: Path) -> None:
    import plots

    series: dict[str, dict[int, float]] = {}
    for row in result["rows"]:
        name = row["name"] if row["start"] == "cold" else f"{row['name']}, {row['start']}"
        series.setdefault(name, {})[row["depth"]] = row["seconds"]
    plots.lines(series, ("layers", "seconds to the end of the first step"), path)


# The command


def parse(arguments: Sequence[str], implementations: Mapping[str, Implementation]) -> argparse.Namespace:
    parser = parser_of(__doc__, "compile_time")
    default = [name for name in ("ours", COMPARED, "ddp") if name in implementations]
    parser.add_argument("--implementations", nargs="+", choices=list(implementations), default=default)
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 6, 12, 24, 48], help="numbers of layers")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=["cold"], help="from which caches")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what ranks are started for
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.set_defaults(width=256, heads=4, batch=1)
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.device = options.device or default_device()
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if on_a_rank() and options.measure is None:
        parser.error("this benchmark starts its own ranks (--ranks); run it without torchrun")
    return options


def main(
    arguments: Sequence[str] | None = None, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments, implementations)
    if on_a_rank():
        try:
            found = measure(options, implementations)
        except Disagreement as error:
            say(f"FAILED: {error}")
            return 1
        if os.environ["RANK"] == "0":
            options.into.write_text(json.dumps(found))
        return 0
    result = measure_all(options, implementations)
    if result is None:
        return 1
    publish(options, result, table, plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
