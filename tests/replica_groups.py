"""Replica groups of two ranks each that train under torchft, and what they should come to."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import started
from models import MLP
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp.integrations.torchft import replicate

RANKS = 2
TIMEOUT = 120.0  # seconds, ends what hangs


def batch(step: int, group: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + 10 * group + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x[:, :5].sin()).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def built(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP(depth=2)


def manager_of(group: int, lighthouse: str, **options: Any) -> Any:
    import torchft

    wait = datetime.timedelta(seconds=TIMEOUT / 4)
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=wait),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        replica_id=f"group_{group}",
        lighthouse_addr=lighthouse,
        timeout=wait,
        quorum_timeout=wait,
        hostname="localhost",
        **options,
    )


@contextlib.contextmanager
def lighthouse() -> Iterator[str]:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=60_000, heartbeat_timeout_ms=3000)
    try:
        yield server.address().replace(f"//{os.uname().nodename}:", "//localhost:")
    finally:
        server.shutdown()


def say(folder: str, group: int, **line: Any) -> None:
    """Append a line to the group's log, from its first rank."""
    if dist.get_rank() == 0:
        with open(Path(folder) / f"group{group}", "a") as log:
            log.write(json.dumps(line) + "\n")


def read(folder: Path, group: int) -> list[dict[str, Any]]:
    path = folder / f"group{group}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def pause(folder: str, manager: Any, step: int, waits_at: int) -> None:
    """From step ``waits_at`` on, a group that is alone waits for the other one to start, and then goes on slowly."""
    if step < waits_at or manager.num_participants() > 1:
        return
    while not (Path(folder) / "rejoins").exists():
        time.sleep(0.02)
    time.sleep(0.05)


def train(
    group: int, lighthouse: str, folder: str, steps: int, waits_at: int = 1 << 30, rejoins: bool = False
) -> dict[str, Tensor]:
    """A rank of a group, whose step number and batches are the manager's. Return whole parameters."""
    import torchft

    torch.set_num_threads(1)
    model = graph_fsdp.compile(built(seed=group), backend="eager")  # a group heals at its first step, too
    plain = graph_fsdp.distribute_optimizer(optimizer_of(model))
    manager = manager_of(group, lighthouse, use_async_quorum=False)
    optimizer = torchft.Optimizer(manager, plain)
    replicate(model, manager, optimizer)
    if rejoins:
        dist.barrier()
        (Path(folder) / "rejoins").touch()
    while (step := manager.current_step()) < steps:
        optimizer.zero_grad()
        healed = manager.current_step() != step
        step = manager.current_step()
        loss = loss_of(model, batch(step, group, dist.get_rank()))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        before = manager.current_step()
        taking_part = manager.is_participating()
        optimizer.step()
        committed = manager.current_step() > before
        say(folder, group, step=step, loss=total.item() / RANKS, committed=committed, healed=healed, part=taking_part)
        pause(folder, manager, step, waits_at)
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    dist.barrier()
    manager.shutdown(wait=False)
    return whole


@contextlib.contextmanager
def group_of(number: int, directory: Path, *args: Any, **options: Any) -> Iterator[Any]:
    """The ranks of a group, and the folder in which their results come."""
    directory.mkdir()
    given = (train, RANKS, number, *args)
    with started(directory, *given, timeout=TIMEOUT, modules=["torchft"], **options) as ranks:
        yield ranks
