"""What the examples share: which rank this is and where it computes, its part of the data, and means over ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class Ranks:
    """This rank among the others; the only one where nothing launched several."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None

    def batches(self, count: int, size: int, draws: torch.Generator | None = None) -> list[Tensor]:
        """This rank's batches of the indices below ``count``, up to ``size`` each. Every rank gets as many of them, or
        the others would wait for it. With ``draws``, shuffled, and what fills no batch on every rank is left out."""
        if draws is None:
            number = self.world * -(-count // (size * self.world))
            return list(torch.arange(count).tensor_split(number)[self.rank :: self.world])
        order = torch.randperm(count, generator=draws)
        number = count // (size * self.world)
        return list(order[: number * size * self.world].view(number, self.world, size)[:, self.rank])

    def sums(self, *values: float) -> list[float]:
        """The sum over ranks of each value."""
        tensor = torch.tensor(values, dtype=torch.float64).to(self.device, torch.float32)
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor.tolist()

    def from_first(self, value: str) -> str:
        """The first rank's value, and what it did before it came here is done."""
        values = [value]
        if self.mesh is not None:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def say(self, line: str) -> None:
        if self.rank == 0:
            print(line, flush=True)


def process_group_backend(device: str) -> str:
    """torch's choice: gloo, NCCL for CUDA, xccl for XPU."""
    backend: str = dist.get_default_backend_for_device(device)
    return backend


@contextlib.contextmanager
def launched(device: str | None = None) -> Iterator[Ranks]:
    """Alone, or one of torchrun's ranks. ``device``: cpu, cuda or xpu; None for the accelerator, or else the CPU."""
    if device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = accelerator.type if accelerator else "cpu"
    started = "RANK" in os.environ and not dist.is_initialized()
    if started:
        if device != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(process_group_backend(device))
    if dist.is_initialized():
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        place = torch.device("cpu" if device == "cpu" else f"{device}:{torch.accelerator.current_device_index()}")
        yield Ranks(dist.get_rank(), dist.get_world_size(), place, mesh)
    else:
        yield Ranks(0, 1, torch.device(device), None)
    if started:
        dist.destroy_process_group()


def arguments(description: str, **defaults: float) -> argparse.ArgumentParser:
    """A parser of the options that all examples have; ``defaults`` are numbers, and options too."""
    parser = argparse.ArgumentParser(
        description=description.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--device", help="cpu, cuda or xpu (default: the accelerator, or else cpu)")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=" ")
    return parser
