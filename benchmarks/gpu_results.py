"""What ``gpu_checks.py`` came to on a GPU, for ``docs/gpu.md``.

    python benchmarks/gpu_results.py FOLDER...    write benchmarks/results/gpu_checks.json and gpu_speed.json
    python benchmarks/update_docs.py

A folder holds the files that a run has written (``--out``). Runs follow each other, and what was written before. Steps
of the simulated cluster are planned here, for the same hardware and link.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import simulated_cluster
import torch
from gpu_checks import CANNOT_RUN, FAILED, PARTS, PASSED, Result, cannot
from harness import RESULTS
from llama import LENGTHS, llama
from tables import Table

import graph_fsdp
from graph_fsdp.passes.analysis import hardware

MEASURED = (
    "steps_of_a_simulated_cluster",
    "host_time",
    "optimizer_steps",
    "memory_beside_the_plan",
    "memory_of_other_options_beside_the_plan",
    "steps_of_2048_tokens",
    "steps_of_2048_tokens_on_a_full_device",
    "steps_with_a_link_of_normal_priority",
    "steps_of_32_layers",
)
CLUSTERS = {"nvlink": "8 ranks, NVLink", "infiniband": "64 ranks, InfiniBand"}


def merged(folders: Sequence[Path], before: Mapping[str, Result] | None = None) -> dict[str, Result]:
    """What checks came to ``before``, and in these folders, one after the other. That a check passed or failed counts
    more than that it could not run; of part C nothing counts that ran side by side, whose seconds are not right."""
    found = dict(before or {})
    for file in (folder / f"gpu_checks_{part}.json" for folder in folders for part in PARTS):
        if not file.exists():
            continue
        run = json.loads(file.read_text())
        for name, row in run["checks"].items():
            measured_aside = file.stem.endswith("C") and run["side_by_side"]
            if measured_aside or (cannot(row) and name in found and not cannot(found[name])):
                continue
            found[name] = {key: row[key] for key in ("state", "figures", "says")}
            found[name]["says"] = "".join(row["says"].splitlines()[:1])
    return found


def record(folders: Sequence[Path]) -> None:
    """Write what the documentation shows."""
    written = RESULTS / "gpu_checks.json"
    found = merged(folders, json.loads(written.read_text())["checks"] if written.exists() else None)
    made = found["versions"]["figures"]
    about = f"{made['name']}, torch {made['torch']}, CUDA {made['cuda']}, NCCL {made['nccl']}, Python {made['python']}"
    result = {"benchmark": "gpu_results", "command": "make gpu", "about": about, "checks": found}
    (RESULTS / "gpu_checks.json").write_text(json.dumps(result, indent=1) + "\n")
    for name, figures in found[MEASURED[0]]["figures"].items():
        figures["planned_s"] = planned_seconds(name, made["name"])
    speed = {name: row for name, row in found.items() if name in MEASURED}
    result |= {"table": "speed_table", "command": "make gpu PART=C", "checks": speed}
    (RESULTS / "gpu_speed.json").write_text(json.dumps(result, indent=1) + "\n")


def planned_seconds(cluster: str, device: str) -> float:
    """What ``graph_fsdp.plan`` says of the step that was measured on a device of this name."""
    known = next(entry for entry, parts in hardware.DEVICE_NAMES.items() if any(part in device for part in parts))
    described, length = simulated_cluster.CLUSTERS[cluster], LENGTHS["8b"]
    joined = simulated_cluster.joined_as(hardware.HARDWARE[known], described, grouped=True)
    return graph_fsdp.plan(
        lambda: llama("8b", 8, length, torch.device("meta")),
        {"input_ids": torch.zeros(1, length, dtype=torch.long)},
        mesh_shape=(described.ranks,),
        hardware=joined,
        mp_policy=simulated_cluster.POLICY,
    ).step_seconds


def table(result: Result) -> Table:
    """A row for each check, with its cases."""
    cases: dict[str, list[Result]] = {}
    for name, row in result["checks"].items():
        cases.setdefault(name.partition(":")[0], []).append(row)
    rows = []
    for name, found in cases.items():
        states = Counter(row["state"] for row in found)
        says = list(dict.fromkeys(row["says"] for row in found if row["says"]))
        differences = [row["figures"]["difference"] for row in found if "difference" in row["figures"]]
        shown = [f"difference at most {max(differences):.1g}"] if differences else []
        rows.append([f"`{name}`", *(str(states[state] or "") for state in (PASSED, FAILED, CANNOT_RUN))])
        more = [f"{len(says) - 1} more"] if len(says) > 1 else []
        rows[-1].append("; ".join([*shown, *says[:1], *more]))
    return Table(("check", "cases passed", "failed", "could not run", ""), rows)


def speed_table(result: Result) -> Table:
    """A row for each quantity that was measured of ours and of FSDP2, or planned."""
    figures = {name: row["figures"] for name, row in result["checks"].items()}
    rows = []
    shapes = {
        "steps_of_a_simulated_cluster": "8 layers",
        "steps_with_a_link_of_normal_priority": "the same without priority of the link",
        "steps_of_2048_tokens": "8 layers, 2,048 tokens",
        "steps_of_2048_tokens_on_a_full_device": "8 layers, 2,048 tokens, planned for a device that is full",
        "steps_of_32_layers": "32 layers",
    }
    steps = [(shapes[check], *row) for check in shapes for row in figures.get(check, {}).items()]

    def add(what: str, ours: float, theirs: float, unit: float, digits: int) -> None:
        rows.append([what, f"{ours / unit:,.{digits}f}", f"{theirs / unit:,.{digits}f}", f"{ours / theirs:.3f}"])

    for shape, name, cluster in steps:
        ours, theirs = (cluster[who] for who in ("graph_fsdp", "FSDP2, compiled blocks"))
        label = f"Llama-3-8B's shapes, {shape}, {CLUSTERS[name]}"
        add(f"{label}: ms of a step", ours["step_s"], theirs["step_s"], 1e-3, 1)
        if "planned_s" in cluster:
            add(f"{label}: the same, measured and planned", ours["step_s"], cluster["planned_s"], 1e-3, 1)
        add(f"{label}: the same where collectives take no time", ours["compute_s"], theirs["compute_s"], 1e-3, 1)
        add(f"{label}: step over max(compute, link)", ours["over_bound"], theirs["over_bound"], 1, 3)
        add(f"{label}: GiB at the peak", ours["peak_bytes"], theirs["peak_bytes"], 2**30, 2)
    host, optimizer = (figures[name] for name in MEASURED[1:3])
    for ours, theirs in (
        ("ours", "FSDP2"),
        ("ours", "FSDP2, compiled blocks"),
        ("ours, CUDA graphs", "FSDP2, compiled blocks"),
    ):
        label = f"GPT of 24 narrow layers, ms of the host in a step: {ours}, {theirs}"
        add(label, host[ours]["host_s"], host[theirs]["host_s"], 1e-3, 1)
    for ours in ("ours", "ours, distributed"):
        label = f"the same, ms of fused AdamW's step: {ours}, FSDP2"
        add(label, optimizer[ours]["step_s"], optimizer["FSDP2"]["step_s"], 1e-3, 2)
    memory = {"plain": figures[MEASURED[3]], **figures[MEASURED[4]]}
    for name, row in memory.items():
        if "planned live" in row:
            label = f"Llama of 8 layers of width 1,024, MB at the peak: measured, planned ({name})"
            add(label, row["live"] - row["before"], row["planned live"], 1e6, 0)
    return Table(("", "graph_fsdp, or measured", "FSDP2, or planned", "ratio"), rows)


if __name__ == "__main__":
    record([Path(folder) for folder in sys.argv[1:]])
