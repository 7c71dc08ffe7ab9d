"""Saving and loading a training: graph_fsdp.checkpoint beside plain torch.distributed.checkpoint, in turns, on the same
tensors of the same model.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py

Plain is what a user of FSDP2 writes: ``get_state_dict`` and ``dcp.save``; ``get_state_dict``, ``dcp.load`` and
``set_state_dict``. Both write to the disk (fsync). Ours sums all bytes that it writes, and compares all that it reads,
before it changes anything. Files were just written, and are read from memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tables import Table, quartile_cell
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import graph_fsdp
from graph_fsdp import checkpoint

SIDES = ("plain", "ours")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    graph_fsdp.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, args.width)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    box = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])

    def save_plain() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "plain")

    def load_plain() -> None:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / "plain")
        set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)

    kinds: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "save": (save_plain, lambda: checkpoint.save(folder / "ours", model, optimizer)),
        "load": (load_plain, lambda: checkpoint.load(folder / "ours", model, optimizer)),
    }
    seconds: dict[str, list[list[float]]] = {kind: [[], []] for kind in kinds}
    cpu_seconds: dict[str, list[list[float]]] = {kind: [[], []] for kind in kinds}
    for turn in range(args.rounds + 1):
        for kind, functions in kinds.items():
            for which in (0, 1) if turn % 2 else (1, 0):
                if kind == "save" and dist.get_rank() == 0:
                    shutil.rmtree(folder / SIDES[which], ignore_errors=True)
                gc.collect()
                dist.barrier()
                begin, cpu_begin = time.perf_counter(), time.process_time()
                functions[which]()
                cpu = torch.tensor(time.process_time() - cpu_begin)
                dist.barrier()
                if turn:  # the first is for the caches, and for ranks to connect
                    seconds[kind][which].append(time.perf_counter() - begin)
                    dist.all_reduce(cpu)
                    cpu_seconds[kind][which].append(cpu.item())
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        result: dict[str, Any] = {
            "benchmark": "checkpoint_speed",
            "command": f"OMP_NUM_THREADS=1 torchrun --nproc-per-node {dist.get_world_size()} "
            f"benchmarks/checkpoint_speed.py --layers {args.layers} --width {args.width} --rounds {args.rounds}",
            "machine": harness.machine("cpu", dist.get_world_size()),
            "bytes": sum(p.numel() * 12 for p in model.parameters()),
            "seconds": {kind: dict(zip(SIDES, sides, strict=True)) for kind, sides in seconds.items()},
            "cpu_seconds": {kind: dict(zip(SIDES, sides, strict=True)) for kind, sides in cpu_seconds.items()},
        }
        print(table(result).text())
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> Table:
    """Medians, and in brackets quartiles over the rounds; a ratio is that of the two turns of a round."""
    rows = []
    for kind, wall in result["seconds"].items():
        cpu = result["cpu_seconds"][kind]
        cells = [f"{statistics.median(wall[side]):.2f}" for side in SIDES]
        cells += [quartile_cell(_ratios(times), 1, 2) for times in (wall, cpu)]
        rows.append([kind, *cells])
    rounds = len(result["seconds"]["load"]["ours"])
    note = f"{result['bytes'] / 1e6:,.0f} MB, {rounds} rounds: median [quartiles]. CPU time is that of all ranks."
    return Table(("", "plain, s", "ours, s", "ours ÷ plain", "the same in CPU time"), rows, note)


def _ratios(times: dict[str, list[float]]) -> list[float]:
    return statistics.quantiles([b / a for a, b in zip(times["plain"], times["ours"], strict=True)], n=4)


if __name__ == "__main__":
    main(sys.argv[1:])
