"""Reading a model out of a checkpoint: graph_fsdp's reader beside those of torch.distributed.checkpoint, in turns.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/checkpoint_readers.py

``plain`` is ``FileSystemReader`` on the same files, ``safetensors`` ``HuggingFaceStorageReader`` on the same tensors in
files of ``HuggingFaceStorageWriter``. Each reads into the same shards, alone and after it has summed all bytes that it
reads. Files are in the page cache, or with ``--cold`` they are put out of it first, as far as the kernel does that.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
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
from tables import Table, bytes_cell, quartile_cell
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, HuggingFaceStorageReader, HuggingFaceStorageWriter, LoadPlan
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import graph_fsdp
from graph_fsdp import checkpoint
from graph_fsdp.checkpoint import checksums
from graph_fsdp.checkpoint.files import FillPlanner, Reader
from graph_fsdp.checkpoint.metadata import Checkpoint

FIRST = "ours, summed"  # what ``graph_fsdp.checkpoint.load`` does, and what the others are compared with


class PlainSummed(Reader):
    """The sums of ours, and the reading of ``FileSystemReader``."""

    read_data = FileSystemReader.read_data


class SafetensorsSummed(HuggingFaceStorageReader):
    """Sums each file of which this rank reads something: its own, where as many ranks have saved."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            checksums.sums_of(Path(), [checksums.Extent(name, 0, Path(name).stat().st_size)])
        return super().prepare_local_plan(plan)


def readers(folder: Path) -> dict[str, Callable[[], dcp.StorageReader]]:
    """Side → a new reader of the files."""
    ours, safetensors = folder / "ours", str(folder / "safetensors")
    return {
        FIRST: lambda: Reader(Checkpoint.open(ours), verify=True),
        "ours": lambda: Reader(Checkpoint.open(ours), verify=False),
        "plain, summed": lambda: PlainSummed(Checkpoint.open(ours), verify=True),
        "plain": lambda: FileSystemReader(ours),
        "safetensors, summed": lambda: SafetensorsSummed(safetensors),
        "safetensors": lambda: HuggingFaceStorageReader(safetensors),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, help="where to write (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    graph_fsdp.compile(model, backend="eager")
    box = [tempfile.mkdtemp(dir=args.folder) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    folder = Path(box[0])
    state = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    checkpoint.save(folder / "ours", model)
    writer = HuggingFaceStorageWriter(str(folder / "safetensors"), save_distributed=True)
    dcp.save(dict(state), storage_writer=writer)
    sides = readers(folder)
    measures: dict[str, dict[str, list[float]]] = {
        kind: {side: [] for side in sides} for kind in ("seconds", "cpu_seconds", "bytes_more")
    }
    for turn in range(args.rounds + 1):
        names = list(sides)
        for side in names[turn % len(names) :] + names[: turn % len(names)]:
            if args.cold and dist.get_rank() == 0:
                put_out_of_the_page_cache(folder)
            measured = measure(sides[side], state)
            for kind, value in zip(measures, measured, strict=True) if turn else ():  # the first is for the caches
                measures[kind][side].append(value)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        result: dict[str, Any] = {
            "benchmark": "checkpoint_readers",
            "command": f"OMP_NUM_THREADS=1 torchrun --nproc-per-node {dist.get_world_size()} "
            f"benchmarks/checkpoint_readers.py --layers {args.layers} --width {args.width} --rounds {args.rounds}"
            + " --cold"
            * args.cold,
            "machine": harness.machine("cpu", dist.get_world_size()),
            "bytes": sum(p.numel() * 4 for p in model.parameters()),
            **measures,
        }
        print(table(result).text())
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


def measure(reader: Callable[[], dcp.StorageReader], state: dict[str, Tensor]) -> tuple[float, float, float]:
    """Seconds; CPU seconds of all ranks; the most bytes that a rank had resident, files that it maps included, above
    those before."""
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    dcp.load(dict(state), storage_reader=reader(), planner=FillPlanner())
    cpu = torch.tensor(time.process_time() - cpu_begin)
    dist.barrier()
    seconds = time.perf_counter() - begin
    more = torch.tensor(float(resident("VmHWM") - before))
    dist.all_reduce(cpu)
    dist.all_reduce(more, dist.ReduceOp.MAX)
    return seconds, cpu.item(), more.item()


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def put_out_of_the_page_cache(folder: Path) -> None:
    """Pages that are on the disk, and that nobody has mapped."""
    for file in (file for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def table(result: dict[str, Any]) -> Table:
    """Medians, and in brackets quartiles over the rounds; a ratio is that of two turns of a round."""
    rows = []
    for side, seconds in result["seconds"].items():
        ratios = [quartile_cell(_ratios(result[kind], side), 1, 2) for kind in ("seconds", "cpu_seconds")]
        more = int(statistics.median(result["bytes_more"][side]))
        rows.append([side, f"{statistics.median(seconds):.3f}", *ratios, bytes_cell(more)])
    note = (
        f"{result['bytes'] / 1e6:,.0f} MB, {len(result['seconds'][FIRST])} rounds: median [quartiles]. CPU time is of "
        "all ranks, memory of the rank that has most, with files that it maps."
    )
    return Table(("", "s", f"÷ {FIRST}", "the same in CPU time", "memory, MB"), rows, note)


def _ratios(times: dict[str, list[float]], side: str) -> list[float]:
    return statistics.quantiles([b / a for a, b in zip(times[FIRST], times[side], strict=True)], n=4)


if __name__ == "__main__":
    main(sys.argv[1:])
