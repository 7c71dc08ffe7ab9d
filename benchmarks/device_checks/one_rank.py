"""Part A, too: what one rank of the process group that users have can do with another process, and with rings."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

import graph_fsdp
from device_checks import Figures, check
from device_checks.correctness import one_rank

SECONDS, WIDTH = 60, 256


@check("A", 120, needs=["cuda"], reason="memory of the CPU is shared otherwise, and tests do it")
def a_shard_in_another_process(device: torch.device) -> Figures:
    """A shard goes to another process by CUDA's IPC: it has the same values there, and writes reach this one."""
    with one_rank(device):
        mesh = init_device_mesh(device.type, (1,))
        model: Any = graph_fsdp.compile(nn.Linear(256, 256).to(device), mesh, backend="eager")
        shard = model.weight.to_local().detach()
        before = shard.sum().item()
        context = multiprocessing.get_context("spawn")
        given, answered = context.Queue(), context.Queue()
        process = context.Process(target=_add_one, args=(given, answered), daemon=True)
        process.start()
        try:
            given.put(shard)
            there = answered.get(timeout=SECONDS)
            after = model.weight.to_local().sum().item()
        finally:
            process.kill()
    assert there == before and abs(after - before - shard.numel()) < 1e-3 * shard.numel(), (before, there, after)
    return {"difference": there - before}


def _add_one(given: Any, answered: Any) -> None:
    """In the other process, which holds the memory until it is ended."""
    shard = given.get()
    there = shard.sum().item()
    shard.add_(1).sum().item()  # waits for the device
    answered.put(there)
    given.get()


@check("A", 120, needs=["cuda"], reason="context_parallel has no kernels of the CPU", cases=["eager", "inductor"])
def context_parallel_of_one_rank(device: torch.device, case: str) -> Figures:
    """Attention under torch's ``context_parallel`` has the gradients of the plain model; the ring is of one rank."""
    torch.manual_seed(0)
    plain = Attention().to(device, torch.bfloat16)
    x = torch.randn(2, 256, WIDTH, device=device, dtype=torch.bfloat16)
    with one_rank(device):
        mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("cp",))
        model: Any = graph_fsdp.compile(copy.deepcopy(plain), mesh, backend=case)
        plain(x).float().square().mean().backward()
        part = x.clone()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]):
            model(part).float().square().mean().backward()
        worst = max(map(_apart, model.parameters(), plain.parameters()))
    assert worst <= (0.0 if case == "eager" else 2e-2), worst
    return {"difference": worst}


class Attention(nn.Module):
    """Without positions, of which a rank would need those of its part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.first(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.last(mixed.transpose(1, 2).flatten(2))
        return x + out


def _apart(found: Any, plain: nn.Parameter) -> float:
    grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
    assert plain.grad is not None
    return ((grad - plain.grad).abs().max() / plain.grad.abs().max()).item()
