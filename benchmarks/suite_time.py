"""Where the tests' time goes: CPU seconds of each file of tests, with all processes that it starts, by what they do.

    python benchmarks/suite_time.py -n 2 --dist loadfile -m "not long"

What follows the script's name goes to pytest. ``imports``: of modules. ``tracing``: Dynamo, AOTAutograd, the
partitioner, FX and our passes. ``compiling``: Inductor. ``g++``: the compilers that Inductor starts. ``running``: all
else, the tests' own code and the operators that they run. ``ranks`` is the part of all these that processes with a rank
took. ``waiting``: wall time in which a worker of the tests used no CPU itself, because it waited for ranks or for other
programs. Sampling makes the run about 5% longer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, command_of, machine
from tables import Table

SAMPLER = Path(__file__).resolve().parent / "cpu_sampler"
KINDS = ("imports", "tracing", "compiling", "g++", "running")
SHOWN = 25  # files in the table; the result has all
_TIMES = re.compile(r"(\d+)m([\d.]+)s")


def read(folder: Path) -> dict[str, dict[str, float]]:
    """File of tests → what its time went to, in seconds, from what the processes left in ``folder``."""
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for path in folder.glob("*.json"):
        left = json.loads(path.read_text())
        for test, kinds in left["sums"].items():
            row = files[test or "outside of tests"]
            for kind, seconds in kinds.items():
                row[kind] += seconds
                row["ranks"] += seconds if left["process"] == "rank" else 0.0
    compiler = folder / "compiler.times"
    for line in compiler.read_text().splitlines() if compiler.exists() else ():
        test, _, times = line.partition(" ")
        files[test or "outside of tests"]["g++"] += sum(60 * int(m) + float(s) for m, s in _TIMES.findall(times))
    for path in folder.glob("*.walls"):
        for line in path.read_text().splitlines():
            test, wall, cpu = json.loads(line)
            files[test]["tests"] += 1
            files[test]["wall"] += wall
            files[test]["waiting"] += max(0.0, wall - cpu)
    for row in files.values():
        row["cpu"] = sum(row[kind] for kind in KINDS)
    return {name: {key: round(value, 1) for key, value in row.items()} for name, row in files.items()}


def table(result: dict[str, Any]) -> Table:
    files = sorted(result["files"].items(), key=lambda item: -item[1]["cpu"])
    columns = ("tests", "cpu", *KINDS, "ranks", "waiting")
    total = {column: sum(row.get(column, 0.0) for _, row in files) for column in columns}
    others = {column: sum(row.get(column, 0.0) for _, row in files[SHOWN:]) for column in columns}
    rows = [("all", total), *files[:SHOWN], (f"{len(files[SHOWN:])} others", others)]
    cells = [[name, *(f"{row.get(column, 0.0):,.0f}" for column in columns)] for name, row in rows]
    note = (
        f"CPU seconds; waiting in wall seconds. {result['wall']:,.0f} s of wall time, exit code {result['exit_code']}."
    )
    return Table(("", *columns), cells, note)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(SAMPLER), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"GRAPH_FSDP_SUITE_TIME": folder, "PYTHONPATH": path, "CXX": str(SAMPLER / "c++")}
        command = [sys.executable, "-m", "pytest", "-p", "wall_times", *arguments]
        start = os.times().elapsed
        finished = subprocess.run(command, env={**os.environ, **environment})
        wall = os.times().elapsed - start
        found = machine("cpu", 1)
        result = {
            "benchmark": "suite_time",
            "command": command_of(__file__, arguments),
            "about": f"{found['cores']} CPU cores ({found['cpu']}), torch {found['torch']}, Python {found['python']}",
            "wall": round(wall, 1),
            "exit_code": finished.returncode,
            "files": read(Path(folder)),
        }
    print(table(result).text())
    (RESULTS / "suite_time.json").write_text(json.dumps(result, indent=1) + "\n")
    return finished.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
