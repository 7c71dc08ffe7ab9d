"""What ``import graph_fsdp`` costs on top of ``import torch``, and how soon ``graph-fsdp --help`` answers.

    python benchmarks/import_time.py --rounds 9

Each import is a fresh process that says how much CPU time it has used, from its start to the end of the import. The
programs take turns, so that a busy machine slows all of them down alike; a ratio is of one round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from tables import Table, quartile_cell

_TORCH = "import torch"
PROGRAMS = {
    "nothing": "pass",
    "torch": _TORCH,
    "torch, graph_fsdp": f"{_TORCH}, graph_fsdp",
    "torch, its Dynamo and FSDP": f"{_TORCH}, torch._dynamo, torch.distributed.fsdp",
    "torch, graph_fsdp.compile": f"{_TORCH}, graph_fsdp\ngraph_fsdp.compile",
    "torch, every name of graph_fsdp": f"{_TORCH}\nfrom graph_fsdp import *",
    "graph-fsdp --help": "import sys\nfrom graph_fsdp.cli.main import main\n"
    "try:\n    main(['--help'])\nexcept SystemExit:\n    pass",
}


def cpu_seconds(program: str) -> float:
    """CPU time of a process that runs the program, all of its threads."""
    said = f"{program}\nimport time\nprint(time.process_time())"
    done = subprocess.run([sys.executable, "-c", said], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def measure(rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each program by round. A first round, for the caches of files, is not counted."""
    found: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for turn in range(rounds + 1):
        names = list(PROGRAMS) if turn % 2 else list(reversed(PROGRAMS))
        for name in names:
            seconds = cpu_seconds(PROGRAMS[name])
            if turn:
                found[name].append(seconds)
    return found


def table(result: dict[str, Any]) -> Table:
    seconds: dict[str, list[float]] = result["cpu_seconds"]
    rows = []
    for name, values in seconds.items():
        # What comes on top of torch, by what torch itself costs on top of a process that imports nothing.
        bare, torch = seconds["nothing"], seconds["torch"]
        on_top = [(v - t) / (t - b) for v, t, b in zip(values, torch, bare, strict=True)]
        shown = name.startswith("torch,")
        rows.append([name, _cell(values, 1e3, 0), _cell(on_top, 1, 2) if shown else ""])
    return Table(("imported, or run", "CPU, ms", "on top of torch ÷ torch"), rows)


def _cell(values: Sequence[float], scale: float, digits: int) -> str:
    return quartile_cell(statistics.quantiles(values, n=4, method="inclusive"), scale, digits)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=harness.RESULTS / "import_time.json")
    args = parser.parse_args(arguments)
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} rounds have no quartiles; give 2 or more")
    machine = harness.machine("cpu", 1)
    result = {
        "benchmark": "import_time",
        "command": f"python benchmarks/import_time.py --rounds {args.rounds}",
        "about": f"One process at a time, {machine['cores']} CPU cores ({machine['cpu']}), torch {machine['torch']}, "
        f"Python {machine['python']}",
        "cpu_seconds": measure(args.rounds),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result).text())


if __name__ == "__main__":
    main(sys.argv[1:])
