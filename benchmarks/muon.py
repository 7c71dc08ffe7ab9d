"""A step of Muon by owners of matrices, beside Muon on FSDP2's DTensors.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/muon.py --layers 4 --width 512

The matrices are those of a GPT's blocks: four of width x width, two of width x 4 width. Both sides have the same
gradients, and take turns. The first rank prints medians over rounds of the seconds of a step and of the processor
seconds of all ranks; the operations of the rank that has most of them, as torch counts them; and how many bytes a step
allocates at most beyond what is there between steps (``peak_memory.py``), as a part of the matrices' bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import peak_memory
import torch
import torch.distributed as dist
from tables import Table, quartile_cell
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.utils.flop_counter import FlopCounterMode

import graph_fsdp


class Matrices(nn.Module):
    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(shape) for shape in shapes)

    def forward(self) -> Tensor:
        return torch.stack([matrix.sum() for matrix in self.matrices]).sum()


class Side:
    """An implementation's matrices and optimizer."""

    def __init__(self, ours: bool, layers: int, width: int) -> None:
        torch.manual_seed(0)
        shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
        model = Matrices(shapes * layers)
        self.nbytes = sum(p.nbytes for p in model.parameters())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = graph_fsdp.compile(model, mesh, backend="eager") if ours else fully_shard(model, mesh=mesh)
        optimizer = optim.Muon(self.model.parameters())
        self.optimizer = graph_fsdp.distribute_optimizer(optimizer) if ours else optimizer
        for p in self.model.parameters():
            p.grad = distribute_tensor(torch.randn(p.shape), mesh, p.placements)  # type: ignore[attr-defined]

    def step(self) -> None:
        self.optimizer.step()

    def losses(self) -> list[float]:
        return []


def timed(side: Side) -> tuple[float, float]:
    dist.barrier()
    begin, processor = time.perf_counter(), time.process_time()
    side.step()
    own = torch.tensor(time.process_time() - processor)
    dist.all_reduce(own)
    return time.perf_counter() - begin, float(own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 4), ("width", 512), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    sides = {name: Side(name == "ours", options.layers, options.width) for name in ("ours", "fsdp2")}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    operations = {}
    for name, side in sides.items():
        with FlopCounterMode(display=False) as counter:
            side.step()
        most = torch.tensor(counter.get_total_flops())
        dist.all_reduce(most, dist.ReduceOp.MAX)
        operations[name] = int(most)
    for _ in range(options.rounds):
        for name, side in sides.items():
            seconds[name].append(timed(side))
    nbytes = sides["ours"].nbytes
    sides.clear()
    rows = []
    for name, measured in seconds.items():
        peak = peak_memory.measure(lambda ours=name == "ours": Side(ours, options.layers, options.width), "cpu")
        cells = [quartile_cell(statistics.quantiles(values, n=4), 1e3, 1) for values in zip(*measured, strict=True)]
        part = (peak.peak - peak.between_steps) / nbytes
        rows.append([name, *cells, f"{operations[name] / 1e9:,.2f}", f"{part:.2f}"])
    header = ["Muon", "step, ms", "all processors, ms", "10⁹ operations of a rank", "allocated of all matrices"]
    if dist.get_rank() == 0:
        print(Table(header, rows, f"{dist.get_world_size()} ranks").text())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
