"""Replica groups of two ranks each that train under torchft, and what they should come to."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import json
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import started
from models import MLP
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graph_fsdp
from graph_fsdp.integrations.torchft import replicate


def _missing() -> str:
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed (the extra torchft)"
    try:
        socket.getaddrinfo(socket.gethostname(), None)
    except OSError:
        return "the name of this host does not resolve, by which torchft's transport is found"
    return ""


needs_torchft = pytest.mark.skipif(bool(_missing()), reason=_missing())
RANKS = 2
TIMEOUT = 240.0  # seconds, ends what hangs
CLIPPED = 0.5


@dataclass(frozen=True)
class Training:
    """``dies_at``: the step in whose backward the group's processes are killed, between two buckets. ``waits_at``: from
    there on a group that is alone waits for another to start, and then goes on slowly. ``rejoins``: it is that one."""

    folder: str
    lighthouse: str
    steps: int
    seed: int = 0
    asynchronous: bool = False
    microbatches: int = 1
    reduce_dtype: torch.dtype | None = None
    dies_at: int = -1
    waits_at: int = 1 << 30
    rejoins: bool = False


def batch(step: int, group: int, rank: int, micro: int) -> Tensor:
    draws = torch.Generator().manual_seed(10_000 * step + 100 * group + 10 * rank + micro)
    return torch.randn(4, 16, generator=draws)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = (model(x) - x[:, :5].sin()).square().mean()
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def built(seed: int = 0) -> MLP:
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
def lighthouse(groups: int = 1) -> Iterator[str]:
    """torchft's, and its address. A quorum has so many groups, or more."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=groups, join_timeout_ms=60_000, heartbeat_timeout_ms=3000)
    try:
        yield f"http://localhost:{server.address().rpartition(':')[2]}"
    finally:
        server.shutdown()


def train(group: int, given: Training) -> dict[str, Tensor]:
    """A rank of a group, whose step number and batches are the manager's. Return its whole parameters."""
    import torchft

    torch.set_num_threads(1)
    rank = dist.get_rank()
    policy = MixedPrecisionPolicy(reduce_dtype=given.reduce_dtype)
    model: Any = graph_fsdp.compile(built(given.seed), backend="eager", mp_policy=policy)
    # The initial values are equal. Else a rank that takes those of another group has no part in an asynchronous first
    # step, and each rank of a group may take another one's.
    manager = manager_of(group, given.lighthouse, use_async_quorum=given.asynchronous, init_sync=False)
    optimizer = torchft.Optimizer(manager, graph_fsdp.distribute_optimizer(optimizer_of(model)))
    replicate(model, manager, optimizer)

    def die(reduced: Tensor) -> None:
        if manager.current_step() == given.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    model.blocks[1].set_all_reduce_hook(die)  # the last block's gradients come first
    if given.rejoins:
        dist.barrier()
        (Path(given.folder) / "rejoins").touch()
    while manager.current_step() < given.steps:
        optimizer.zero_grad()
        step, total = manager.current_step(), torch.zeros(())
        for micro in range(given.microbatches):
            model.set_requires_gradient_sync(micro == given.microbatches - 1)
            loss = loss_of(model, batch(step, group, rank, micro)) / given.microbatches
            loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(CLIPPED)
        takes_part, participants = manager.is_participating(), manager.num_participants()
        step = manager.current_step()  # a group that heals beside its forward learns it now
        optimizer.step()
        dist.all_reduce(total)
        line = {"step": step, "loss": total.item() / RANKS, "participants": participants, "takes_part": takes_part}
        if rank == 0:
            with open(Path(given.folder) / f"group{group}", "a") as log:
                log.write(json.dumps({**line, "committed": manager.current_step() > step}) + "\n")
        _pause(given, step, participants)
    whole = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    dist.barrier()
    manager.shutdown(wait=False)
    return whole


def _pause(given: Training, step: int, participants: int) -> None:
    if step >= given.waits_at and participants == 1:
        wait_for((Path(given.folder) / "rejoins").exists)
        time.sleep(0.05)


def read(folder: Path, group: int) -> list[dict[str, Any]]:
    """What a group has logged of its steps."""
    path = folder / f"group{group}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_for(happens: Callable[[], object], *directories: Path) -> None:
    """Wait until something happens; raise what ranks of these groups have raised meanwhile."""
    deadline = time.monotonic() + TIMEOUT
    errors = [directory / f"error{rank}" for directory in directories for rank in range(RANKS)]
    while not happens():
        assert not (found := [path.read_text() for path in errors if path.exists()]), "\n".join(found)
        assert time.monotonic() < deadline, "nothing has happened"
        time.sleep(0.02)


@contextlib.contextmanager
def group_of(number: int, directory: Path, given: Training) -> Iterator[Any]:
    """The ranks of a group, with a process group and a store of their own."""
    directory.mkdir()
    with started(directory, train, RANKS, number, given, timeout=TIMEOUT) as ranks:
        yield ranks


def results(*directories: Path) -> list[dict[str, Tensor]]:
    """What the ranks of groups have returned, when all have; an error that one has left is raised."""
    paths = [directory / f"result{rank}.pt" for directory in directories for rank in range(RANKS)]
    wait_for(lambda: all(path.exists() for path in paths), *directories)
    return [torch.load(path) for path in paths]


def expected(given: Training, steps: dict[int, dict[int, int]]) -> tuple[list[dict[int, float]], dict[str, Tensor]]:
    """The loss of each group in each step, and the parameters, of one process that takes the mean over the batches of
    the groups that took part. ``steps``: step → group → by what the sum of gradients is divided."""
    model = built(given.seed)
    optimizer = optimizer_of(model)
    losses: list[dict[int, float]] = []
    for step in range(given.steps):
        losses.append({})
        for group, participants in steps[step].items():
            parts = [batch(step, group, rank, micro) for rank in range(RANKS) for micro in range(given.microbatches)]
            loss = torch.stack([loss_of(model, x) for x in parts]).mean()
            (loss / participants).backward()
            losses[-1][group] = loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIPPED)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def took_part(folder: Path) -> dict[int, dict[int, dict[str, Any]]]:
    """Step → group → its line, of the steps that a group committed with a part in it."""
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for group in range(2):
        for line in read(folder, group):
            if line["committed"] and line["takes_part"]:
                found.setdefault(line["step"], {})[group] = line
    return found


def check(folder: Path, given: Training, parameters: list[dict[str, Tensor]], tolerance: float = 1e-4) -> None:
    """All ranks have the same parameters, and they and all losses are those of one process."""
    lines = took_part(folder)
    assert sorted(lines) == list(range(given.steps)), "no step is lost"
    divisors = {step: {group: line["participants"] for group, line in of.items()} for step, of in lines.items()}
    losses, last = expected(given, divisors)
    for step, groups in lines.items():
        for group, line in groups.items():
            assert math.isclose(line["loss"], losses[step][group], rel_tol=tolerance), (step, group, line)
    for found in parameters:
        for name, value in found.items():
            assert torch.equal(value, parameters[0][name]), name
            torch.testing.assert_close(value, last[name], rtol=tolerance, atol=tolerance)
