"""Training by libraries: the same program under DistributedDataParallel, or FSDP2, and under graph_fsdp."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tables import Table

NAME = "libraries_compatibility"
SECONDS = 900.0
BOUND = 1e-5  # relative, of losses and of norms of gradients: float32 in another order
TITAN = "its Trainer, optimizers and clipping; attention without masks of documents, bytes as text"
WHAT = "accumulation, evaluation, resumed from a checkpoint"


@dataclass(frozen=True)
class Program:
    """``file``: beside this one. ``packages``: that it needs; their versions stand in the table. ``beside``: which way
    of training it is compared with."""

    file: str
    packages: tuple[str, ...]
    what: str
    processes: int = 2
    beside: str = "ddp"

    def is_possible(self) -> bool:
        return all(importlib.util.find_spec(package) for package in self.packages)

    @property
    def versions(self) -> str:
        return ", ".join(f"{package} {version(package)}" for package in self.packages)


PROGRAMS = {
    "transformers": Program("trainer_program.py", ("transformers",), f"Trainer: {WHAT}"),
    "trl": Program(
        "trainer_program.py", ("trl", "datasets"), f"SFTTrainer: its chunked loss, activation checkpointing, {WHAT}"
    ),
    "trl-lora": Program("trainer_program.py", ("trl", "peft", "datasets"), f"SFTTrainer with LoRA: the same, {WHAT}"),
    "trl-dpo": Program("trainer_program.py", ("trl", "datasets"), f"DPOTrainer with a reference: {WHAT}"),
    "trl-reward": Program("trainer_program.py", ("trl", "datasets"), f"RewardTrainer: {WHAT}"),
    "trl-grpo-lora": Program(
        "trainer_program.py", ("trl", "peft", "datasets"), f"GRPOTrainer with LoRA, which generates: {WHAT}"
    ),
    "peft": Program(
        "loop_program.py", ("peft", "transformers"), "`get_peft_model` with LoRA in a loop; adapters saved"
    ),
    "lightning": Program("loop_program.py", ("lightning",), f"Trainer, `ModelParallelStrategy`: {WHAT}"),
    "nanogpt": Program(
        "loop_program.py",
        ("torch",),
        "nanoGPT's loop, as [from DDP](migrating.md#ddp): own seeds and `sync_module_states`, accumulation, evaluation",
    ),
    "accelerate-checkpointing": Program(
        "accelerate_program.py",
        ("accelerate", "transformers", "datasets"),
        "`accelerate.test_utils.scripts.external_deps.test_checkpointing`, and each of its checkpoints resumed",
    ),
    "accelerate-performance": Program(
        "accelerate_program.py",
        ("accelerate", "transformers", "datasets"),
        "`accelerate.test_utils.scripts.external_deps.test_performance`, and what `save_model` writes",
    ),
    "torchtitan-llama3": Program(
        "torchtitan_program.py", ("torchtitan",), f"llama3's debug model: {TITAN}", beside="fsdp2"
    ),
    "torchtitan-llama3-pipeline": Program(
        "torchtitan_program.py",
        ("torchtitan",),
        f"llama3's debug model, a pipeline on 4 processes, Interleaved 1F1B, float32, with torch 2.15: {TITAN}",
        processes=4,
        beside="fsdp2",
    ),
    "torchtitan-deepseek_v3": Program(
        "torchtitan_program.py",
        ("torchtitan",),
        f"deepseek_v3's debug model, experts on pairs of 4 processes: {TITAN}",
        processes=4,
        beside="fsdp2",
    ),
}


def run_all(folder: Path, only: list[str]) -> int:
    """Those whose packages are installed; how many failed."""
    rows = []
    for name, program in PROGRAMS.items():
        if program.is_possible() and (not only or name in only):
            rows.append(run(name, program))
            print(json.dumps(rows[-1]), flush=True)
    if rows:
        record(folder, rows)
    return sum(row["result"] != f"as {PROGRAMS[row['name']].beside.upper()}" for row in rows)


def run(name: str, program: Program) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = [losses(name, program, way, Path(folder) / way) for way in (program.beside, "graph_fsdp")]
            result = difference(*found, beside=program.beside.upper())
        except RuntimeError as error:
            result = str(error)
    return {"name": name, "version": program.versions, "what": program.what, "result": result}


def losses(name: str, program: Program, way: str, out: Path) -> dict[str, Any]:
    """
    Raises:
        RuntimeError: says with which error, or that it took too long.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    file = Path(__file__).with_name(program.file)
    command = [*launcher, str(program.processes), str(file), "--library", name, "--way", way, "--out", str(out)]
    path = os.pathsep.join([str(file.parents[1]), os.environ.get("PYTHONPATH", "")])
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


def difference(expected: dict[str, Any], found: dict[str, Any], beside: str = "DDP") -> str:
    """ "as DDP", or the first value that is not."""
    for part, values in expected.items():
        for key, wanted in values.items():
            got = found[part][key]
            if len(got) != len(wanted) or not wanted:
                return f"{part}: {len(got)} values of {key}, not {len(wanted)}"
            for step, (a, b) in enumerate(zip(got, wanted, strict=True)):
                if abs(a - b) > BOUND * abs(b):
                    return f"{part}: {key} {step} is {a:.6g}, not {b:.6g}"
    return f"as {beside}"


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
        "about": "Losses, norms of gradients and what is saved, beside the same program under DDP or FSDP2, on two "
        "processes of the CPU or as many as it says, `backend='eager'`; models of transformers with `fullgraph=False`",
        "rows": sorted([*kept, *rows], key=lambda row: list(PROGRAMS).index(row["name"])),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(written, indent=1) + "\n")
