"""Saving and loading a training: graph_fsdp.checkpoint beside plain torch.distributed.checkpoint, in turns, on the same
tensors of the same model.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py --out benchmarks/results/checkpoint_speed.json

Plain is what a user of FSDP2 writes: ``get_state_dict`` and ``dcp.save``; ``get_state_dict``, ``dcp.load`` and
``set_state_dict``. Both write to the disk (fsync). Ours sums all bytes that it writes, and compares all that it reads.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import graph_fsdp
from graph_fsdp import checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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
    for turn in range(args.rounds + 1):
        for kind, functions in kinds.items():
            for which in (0, 1) if turn % 2 else (1, 0):
                name = ("plain", "ours")[which]
                if kind == "save" and dist.get_rank() == 0:
                    shutil.rmtree(folder / name, ignore_errors=True)
                gc.collect()
                dist.barrier()
                begin = time.perf_counter()
                functions[which]()
                dist.barrier()
                if turn:  # the first is for the caches, and for ranks to connect
                    seconds[kind][which].append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        report(seconds, sum(p.numel() * 12 for p in model.parameters()), args)
    dist.destroy_process_group()


def report(seconds: dict[str, list[list[float]]], nbytes: int, args: argparse.Namespace) -> None:
    table: dict[str, object] = {"torch": torch.__version__, "ranks": dist.get_world_size(), "bytes": nbytes}
    for kind, (plain, ours) in seconds.items():
        ratios = sorted(b / a for a, b in zip(plain, ours, strict=True))
        quartiles = statistics.quantiles(ratios, n=4)
        table[kind] = {"plain_s": plain, "ours_s": ours, "ratio_quartiles": quartiles}
        print(
            f"{kind}: plain {statistics.median(plain):.2f} s, ours {statistics.median(ours):.2f} s, ratio "
            f"{quartiles[1]:.2f} [{quartiles[0]:.2f}, {quartiles[2]:.2f}], {nbytes / 1e6:,.0f} MB"
        )
    if args.out:
        args.out.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
