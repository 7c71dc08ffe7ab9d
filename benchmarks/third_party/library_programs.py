"""Training by libraries: the same trainer under DistributedDataParallel and under graph_fsdp, on two processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tables import Table

NAME = "libraries_compatibility"
PROGRAM = Path(__file__).with_name("trainer_program.py")
SECONDS = 900.0
BOUND = 1e-5  # relative, of losses and of norms of gradients: float32 in another order
WHAT = "accumulation, evaluation, resumed from a checkpoint"
# What the program is told, the packages that it needs, and what it is.
PROGRAMS: dict[str, tuple[tuple[str, ...], str]] = {
    "transformers": (("transformers",), f"Trainer: {WHAT}"),
    "trl": (("trl", "datasets"), f"SFTTrainer: its chunked loss, activation checkpointing, {WHAT}"),
    "trl-lora": (("trl", "peft", "datasets"), f"SFTTrainer with LoRA: the same, {WHAT}"),
}


def run_all(folder: Path, only: list[str]) -> int:
    """Those whose packages are installed; how many failed."""
    rows = []
    for name, (packages, what) in PROGRAMS.items():
        if all(importlib.util.find_spec(package) for package in packages) and (not only or name in only):
            rows.append(run(name, packages, what))
            print(json.dumps(rows[-1]), flush=True)
    if rows:
        record(folder, rows)
    return sum(row["result"] != "as DDP" for row in rows)


def run(name: str, packages: tuple[str, ...], what: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = [losses(name, way, Path(folder) / way) for way in ("ddp", "graph_fsdp")]
            result = difference(*found)
        except RuntimeError as error:
            result = str(error)
    return {"name": name, "version": ", ".join(f"{p} {version(p)}" for p in packages), "what": what, "result": result}


def losses(name: str, way: str, out: Path) -> dict[str, Any]:
    """
    Raises:
        RuntimeError: says with which error, or that it took too long.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(PROGRAM), "--library", name, "--way", way, "--out", str(out)]
    path = os.pathsep.join([str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", "")])
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": path}
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{way}: not done in {SECONDS:.0f} s") from None
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        raise RuntimeError(f"{way}: {(errors or ['failed'])[0].split(']:')[-1].strip()}".replace("|", "/"))
    return json.loads((out / "losses.json").read_text())  # type: ignore[no-any-return]


def difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """ "as DDP", or the first value that is not."""
    for part, values in expected.items():
        for key, wanted in values.items():
            got = found[part][key]
            if len(got) != len(wanted) or not wanted:
                return f"{part}: {len(got)} values of {key}, not {len(wanted)}"
            for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
                if abs(a - b) > BOUND * abs(b):
                    return f"{part}: {key} {step} is {a:.6g}, not {b:.6g}"
    return "as DDP"


def table(result: dict[str, Any]) -> Table:
    return Table(
        ["versions", "what", "result"], [[row["version"], row["what"], row["result"]] for row in result["rows"]]
    )


def record(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Replace the rows of the same programs."""
    path = folder / f"{NAME}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    kept = [row for row in old if row["name"] not in {new["name"] for new in rows}]
    written = {
        "benchmark": "third_party.library_programs",
        "command": "make compatibility",
        "about": "Losses and norms of gradients of training and evaluation beside the same trainer under DDP, on two "
        "processes of the CPU, `backend='eager'`, `fullgraph=False`",
        "rows": sorted([*kept, *rows], key=lambda row: list(PROGRAMS).index(row["name"])),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")
