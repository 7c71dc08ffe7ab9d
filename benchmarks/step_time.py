"""How long a training step takes: graph_fsdp beside what else PyTorch has, and beside compute with no communication.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --model llama --name step_time_llama
    torchrun --nproc-per-node 8 benchmarks/step_time.py --dtype bfloat16 --width 4096 --heads 32 --length 4096

All implementations are in the same processes and take turns, some steps each, in an order that changes from round to
round: what else the machine does falls on all of them. A step is forward, backward and AdamW (fused). Its time is the
slowest rank's; ratios are taken within a round, and the table has their median and quartiles. CPU time is that of all
threads of all ranks, for the same steps: on a busy machine it says more than wall time. With ``--bounds`` computing
alone and messages alone (``bounds.py``) take turns too, and each step is compared with the larger of the two.

Losses of every implementation are compared with plain PyTorch's on every step that is run, and a run in which one
differs fails (exit code 1). Peak memory is measured on models of their own, before the timed ones are made
(``peak_memory.py``); bytes of pack and unpack are counted in one step (``copies.py``).

What it does not show: gloo on one machine moves bytes through memory with the cores that compute, so a figure with
``--device cpu`` says what is done, and little about overlap on a network. Neither data loading nor the first step is
in it (``compile_time.py``). Implementations share a process, and so its allocator.
"""

from __future__ import annotations

import argparse
import gc
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import peak_memory
import torch
import torch.distributed as dist
from bounds import BOUNDS
from copies import copies_of
from harness import (
    POLICIES,
    command_of,
    default_device,
    forget,
    gather,
    machine,
    parser_of,
    process_group,
    run_on_ranks,
    say,
    synchronize,
    workload_of,
)
from implementations import IMPLEMENTATIONS, Implementation, Setup
from tables import Table, bytes_cell, quartile_cell
from training import TOLERANCES, Trainer, check_losses, reference_losses
from workloads import Workload

WARMUP = 3
Turn = tuple[float, float]  # wall and CPU seconds per step


class Steps(Protocol):
    def step(self) -> None: ...


def order_of(names: Sequence[str], index: int) -> list[str]:
    """The order of a round in which none always follows the same one."""
    order = [*names[index % len(names) :], *names[: index % len(names)]]
    return order[::-1] if index % 2 else order


def interleave(trainers: Mapping[str, Steps], rounds: int, steps: int, device: str) -> list[dict[str, Turn]]:
    """Each trainer in turn ``steps`` timed steps, after one that is not, in every round; this rank's times."""
    names = list(trainers)
    found = []
    for index in range(rounds):
        turns = {}
        for name in order_of(names, index):
            trainers[name].step()
            dist.barrier()
            synchronize(device)
            begin, cpu_begin = time.perf_counter(), time.process_time()
            for _ in range(steps):
                trainers[name].step()
            synchronize(device)
            turns[name] = (time.perf_counter() - begin) / steps, (time.process_time() - cpu_begin) / steps
        found.append(turns)
        said = ", ".join(f"{name} {1e3 * turns[name][0]:.0f}" for name in names)
        say(f"round {index + 1} of {rounds}, ms: {said}")
    return found


def combine(of_ranks: Sequence[Sequence[Mapping[str, Turn]]]) -> list[dict[str, Turn]]:
    """Of each round the slowest rank's wall time, and the CPU time of all ranks."""
    return [
        {name: (max(r[name][0] for r in ranks), sum(r[name][1] for r in ranks)) for name in ranks[0]}
        for ranks in zip(*of_ranks, strict=True)
    ]


def quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def run(
    options: argparse.Namespace, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> dict[str, Any] | None:
    """Measure on this rank; the result, on the first rank.

    Raises:
        Disagreement: an implementation's losses are not the reference's.
    """
    chosen = {name: implementations[name] for name in options.implementations}
    workload = workload_of(options)
    steps = WARMUP + 1 + options.rounds * (1 + options.steps)
    with process_group(options.device) as mesh:
        setup = Setup(workload.blocks, mesh, POLICIES[options.dtype], options.reshard_after_forward)
        expected = _expected(steps, workload, setup, chosen, implementations.get(options.reference))
        memory = {} if options.no_memory else _memory(workload, setup, chosen, options, expected)
        trainers, copies = {}, {}
        for name, implementation in chosen.items():
            say(f"building {name}")
            trainers[name] = trainer = Trainer(implementation, workload, setup)
            copies[name] = copies_of(trainer.model, trainer.step)
            for _ in range(WARMUP):
                trainer.step()
        bounds = {name: bound(workload, setup) for name, bound in BOUNDS.items() if options.bounds}
        for bound in bounds.values():
            for _ in range(WARMUP):
                bound.step()
        gc.collect()
        gc.freeze()  # one process holds what is usually spread over many: no collection is to walk all of it
        compiled = _compilations()
        rounds = combine(gather(interleave({**trainers, **bounds}, options.rounds, options.steps, options.device)))
        assert _compilations() == compiled, "something was compiled while steps were timed"
        found = {name: trainer.losses() for name, trainer in trainers.items()}
        difference = check_losses(found, expected, TOLERANCES[options.dtype])
        if dist.get_rank() != 0:
            return None
        tokens = workload.batch * workload.length * dist.get_world_size()
        rows = [_row(name, chosen[name], rounds, options, tokens, memory, copies) for name in chosen]
        return {
            "benchmark": "step_time",
            "command": command_of(__file__, options.arguments),
            "machine": machine(options.device, dist.get_world_size()),
            "settings": _settings(options),
            "loss": {"tolerance": TOLERANCES[options.dtype], "largest_difference": difference, "steps": steps},
            "rows": rows,
            "bounds": {name: quartiles([turns[name][0] for turns in rounds]) for name in bounds},
        }


def _expected(
    steps: int,
    workload: Workload,
    setup: Setup,
    chosen: Mapping[str, Implementation],
    reference: Implementation | None,
) -> dict[str, list[float]]:
    losses = {
        alone: reference_losses(steps, workload, setup, alone=alone, reference=reference)
        for alone in {implementation.alone for implementation in chosen.values()}
    }
    return {name: losses[implementation.alone] for name, implementation in chosen.items()}


def _memory(
    workload: Workload,
    setup: Setup,
    chosen: Mapping[str, Implementation],
    options: argparse.Namespace,
    expected: Mapping[str, Sequence[float]],
) -> dict[str, peak_memory.Peak]:
    found = {}
    for name, implementation in chosen.items():
        say(f"peak memory of {name}")
        forget()
        found[name] = peak_memory.measure(lambda i=implementation: Trainer(i, workload, setup), options.device)
    forget()
    checked = {name: peak.losses for name, peak in found.items()}
    check_losses(checked, {name: expected[name][: len(checked[name])] for name in chosen}, TOLERANCES[options.dtype])
    return found


def _compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _row(
    name: str,
    implementation: Implementation,
    rounds: Sequence[Mapping[str, Turn]],
    options: argparse.Namespace,
    tokens: int,
    memory: Mapping[str, peak_memory.Peak],
    copies: Mapping[str, dict[str, int] | None],
) -> dict[str, Any]:
    wall = [turns[name][0] for turns in rounds]
    row: dict[str, Any] = {
        "name": name,
        "about": implementation.about,
        "step_seconds": quartiles(wall),
        "cpu_seconds": quartiles([turns[name][1] for turns in rounds]),
        "tokens_per_second": tokens / statistics.median(wall),
        "rounds": wall,
        "ratio": {},
        "cpu_ratio": {},
    }
    for other in options.against:
        row["ratio"][other] = quartiles([turns[name][0] / turns[other][0] for turns in rounds])
        # Some systems count a process's time in steps of 10 ms, so that of a few short ones may be 0.
        row["cpu_ratio"][other] = quartiles([turns[name][1] / (turns[other][1] or math.nan) for turns in rounds])
    if options.bounds:
        row["bound_ratio"] = quartiles([turns[name][0] / max(turns[bound][0] for bound in BOUNDS) for turns in rounds])
    if name in memory:
        row["peak_bytes"], row["bytes_between_steps"] = memory[name].peak, memory[name].between_steps
    if copies[name] is not None:
        row["copied_bytes"] = copies[name]
    return row


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    left_out = {"arguments", "results", "images", "markdown", "name", "implementations", "ranks", "device"}
    return {name: value for name, value in vars(options).items() if name not in left_out}


# The table and the plot


def table(result: dict[str, Any]) -> Table:
    against = result["settings"]["against"]
    header = ["implementation", "step, ms", "tokens/s", *(f"÷ {name}" for name in against)]
    bounds = result.get("bounds", {})
    header += ["÷ bound"] * bool(bounds)
    header += ["CPU, ms", f"CPU ÷ {against[0]}", "peak, MB", "pack, MB", "unpack, MB"]
    rows = []
    for row in result["rows"]:
        copies = row.get("copied_bytes", {})
        rows.append(
            [
                row["name"],
                quartile_cell(row["step_seconds"], 1e3, 1),
                f"{row['tokens_per_second']:,.0f}",
                *(quartile_cell(row["ratio"][name], 1, 2) for name in against),
                *([quartile_cell(row["bound_ratio"], 1, 2)] if bounds else []),
                quartile_cell(row["cpu_seconds"], 1e3, 1),
                quartile_cell(row["cpu_ratio"][against[0]], 1, 2),
                bytes_cell(row.get("peak_bytes")),
                bytes_cell(copies.get("pack")),
                bytes_cell(copies.get("unpack")),
            ]
        )
    loss = result["loss"]
    note = (
        f"Medians, first to third quartile in brackets. Losses of all {loss['steps']} steps agree with plain PyTorch's "
        f"to {loss['largest_difference']:.1g} (allowed: {loss['tolerance']:g})."
    )
    if bounds:
        times = " and ".join(f"{name} {quartile_cell(seconds, 1e3, 1)} ms" for name, seconds in bounds.items())
        note += f" Bound: the larger of {times}, of each round."
    return Table(header, rows, note)


def plot(result: dict[str, Any], path: Path) -> None:
    import plots

    against = result["settings"]["against"][0]
    rows = [row for row in reversed(result["rows"]) if row["name"] != against]
    ratios = {row["name"]: row["ratio"][against] for row in rows}
    plots.bars_with_quartiles(ratios, f"step time, {against} = 1", path)


# The command


def parse(arguments: Sequence[str], implementations: Mapping[str, Implementation]) -> argparse.Namespace:
    parser = parser_of(__doc__, "step_time")
    parser.add_argument("--layers", type=int, default=Workload().layers)
    parser.add_argument("--implementations", nargs="+", choices=list(implementations), default=list(implementations))
    parser.add_argument("--against", nargs="+", help="for ratios (default: fsdp2_compiled, ddp, local)")
    parser.add_argument("--reference", choices=list(implementations), help="for losses (default: plain PyTorch)")
    parser.add_argument("--reshard-after-forward", type=_optional_bool, help="true, false (default: what each does)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a turn")
    parser.add_argument("--bounds", action="store_true", help="computing alone and messages alone (bounds.py) too")
    parser.add_argument("--no-memory", action="store_true", help="leave out peak memory")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.device = options.device or default_device()
    ran = options.implementations
    options.against = options.against or [n for n in ("fsdp2_compiled", "ddp", "local") if n in ran] or ran[:1]
    unknown = set(options.against) - set(ran)
    if unknown:
        parser.error(f"--against: {', '.join(sorted(unknown))} is not among --implementations")
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return options


def _optional_bool(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def main(
    arguments: Sequence[str] | None = None, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments, implementations)
    return run_on_ranks(__file__, arguments, options, lambda: run(options, implementations), table, plot)


if __name__ == "__main__":
    sys.exit(main())
