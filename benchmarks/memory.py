"""The most bytes that a training step holds per rank, beside FSDP2 with the same model, batch and options.

    python benchmarks/memory.py
    torchrun --nproc-per-node 8 benchmarks/memory.py --model llama --dtype bfloat16 --width 4096 --heads 32

ZeRO-3 (``reshard_after_forward=True``) and ZeRO-2 (``False``), with and without ``torch.utils.checkpoint`` around each
block. Eager is compared with eager and compiled with compiled, since compilers choose what is saved for backward.
How bytes are counted stands in ``peak_memory.py``; both sides are counted alike. A figure is the most of all ranks.
Losses of each are compared with plain PyTorch's, and a run in which one differs fails (exit code 1).

What it does not show: memory that the allocator holds without having handed it out, and what NCCL takes for itself.
With ``--device cpu`` gloo clones what it reduces, which NCCL does not: a reduction under way counts twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peak_memory
import torch.distributed as dist
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
    workload_of,
)
from implementations import IMPLEMENTATIONS, Implementation, Setup
from tables import Table, bytes_cell
from training import TOLERANCES, Trainer, check_losses, reference_losses
from workloads import Workload

COMPARED = {"ours_eager": "fsdp2", "ours": "fsdp2_compiled", "ours_whole": "fsdp2_compiled"}
ZERO = {"ZeRO-3": True, "ZeRO-2": False}


def run(
    options: argparse.Namespace, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> dict[str, Any] | None:
    """Measure on this rank; the result, on the first rank.

    Raises:
        Disagreement: an implementation's losses are not the reference's.
    """
    rows, difference = [], 0.0
    steps = peak_memory.WARMUP + peak_memory.STEPS
    with process_group(options.device) as mesh:
        plain = workload_of(options)
        setup = Setup(plain.blocks, mesh, POLICIES[options.dtype])
        expected = reference_losses(steps, plain, setup, alone=False)
        for checkpointed in {"no": [False], "yes": [True], "both": [False, True]}[options.checkpointing]:
            workload = replace(plain, checkpointed=checkpointed)
            for zero in options.zero:
                setup = replace(setup, reshard_after_forward=ZERO[zero])
                for name in options.implementations:
                    forget()
                    peak = peak_memory.measure(
                        lambda n=name, w=workload, s=setup: Trainer(implementations[n], w, s), options.device
                    )
                    difference = max(
                        difference,
                        check_losses({name: peak.losses}, {name: expected}, TOLERANCES[options.dtype]),
                    )
                    of_ranks = gather((peak.peak, peak.between_steps))
                    row = {"name": name, "zero": zero, "checkpointed": checkpointed}
                    row |= {"peak_bytes": max(p for p, _ in of_ranks)}
                    row |= {"bytes_between_steps": max(b for _, b in of_ranks)}
                    rows.append(row)
                    say(f"{configuration(row)}, {name}: {bytes_cell(row['peak_bytes'])} MB")
        if dist.get_rank() != 0:
            return None
        return {
            "benchmark": "memory",
            "command": command_of(__file__, options.arguments),
            "machine": machine(options.device, dist.get_world_size()),
            "settings": {**plain.__dict__, "dtype": options.dtype},
            "loss": {"tolerance": TOLERANCES[options.dtype], "largest_difference": difference, "steps": steps},
            "rows": rows,
        }


def configuration(row: Mapping[str, Any]) -> str:
    return f"{row['zero']}{', checkpointed' if row['checkpointed'] else ''}"


# The table and the plot


def table(result: dict[str, Any]) -> Table:
    peaks = _peaks(result)
    names = list(dict.fromkeys(row["name"] for row in result["rows"]))
    pairs = [(ours, other) for ours, other in COMPARED.items() if ours in names and other in names]
    header = ["peak, MB", *names, *(f"{ours} ÷ {other}" for ours, other in pairs)]
    rows = [
        [
            case,
            *(bytes_cell(peaks[case][n]) for n in names),
            *(f"{peaks[case][a] / peaks[case][b]:.3f}" for a, b in pairs),
        ]
        for case in peaks
    ]
    held = {row["name"]: row["bytes_between_steps"] for row in result["rows"]}
    loss = result["loss"]
    note = (
        f"Between steps: {', '.join(f'{name} {bytes_cell(held[name])} MB' for name in names)}. Losses of "
        f"{loss['steps']} steps agree with plain PyTorch's to {loss['largest_difference']:.1g} (allowed: "
        f"{loss['tolerance']:g})."
    )
    return Table(header, rows, note)


def plot(result: dict[str, Any], path: Path) -> None:
    import plots

    megabytes = {case: {n: b / 1e6 for n, b in peaks.items()} for case, peaks in _peaks(result).items()}
    plots.grouped_bars(megabytes, "peak per rank, MB", path)


def _peaks(result: dict[str, Any]) -> dict[str, dict[str, int]]:
    peaks: dict[str, dict[str, int]] = {}
    for row in result["rows"]:
        peaks.setdefault(configuration(row), {})[row["name"]] = row["peak_bytes"]
    return peaks


# The command


def parse(arguments: Sequence[str], implementations: Mapping[str, Implementation]) -> argparse.Namespace:
    parser = parser_of(__doc__, "memory")
    default = [n for n in ("fsdp2", "ours_eager", "fsdp2_compiled", "ours") if n in implementations]
    parser.add_argument("--layers", type=int, default=Workload().layers)
    parser.add_argument("--implementations", nargs="+", choices=list(implementations), default=default)
    parser.add_argument("--zero", nargs="+", choices=list(ZERO), default=list(ZERO))
    parser.add_argument("--checkpointing", choices=("no", "yes", "both"), default="both")
    options = parser.parse_args(arguments)
    options.arguments = list(arguments)
    options.device = options.device or default_device()
    return options


def main(
    arguments: Sequence[str] | None = None, implementations: Mapping[str, Implementation] = IMPLEMENTATIONS
) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments, implementations)
    return run_on_ranks(__file__, arguments, options, lambda: run(options, implementations), table, plot)


if __name__ == "__main__":
    sys.exit(main())
