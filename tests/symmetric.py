"""Stand-ins for torch's symmetric memory, which only CUDA has: memory of any device, and a list of what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from graph_fsdp import compat


@dataclass
class Asked:
    """``backends``: that were set. ``pools``: devices whose pool was asked for. ``exchanged``: of each rendezvous, the
    ranks of its group and the bytes. ``addresses``: storages whose addresses ranks have exchanged."""

    backends: list[str] = field(default_factory=list)
    pools: list[str] = field(default_factory=list)
    exchanged: list[tuple[int, int]] = field(default_factory=list)
    addresses: set[int] = field(default_factory=set)

    def rendezvous(self, tensor: Tensor, group: str) -> None:
        self.exchanged.append((compat.resolve_group(group).size(), tensor.nbytes))
        self.addresses.add(tensor.untyped_storage().data_ptr())

    def get_mem_pool(self, device: torch.device) -> str:
        self.pools.append(device.type)
        return device.type


@contextlib.contextmanager
def standing_in(**instead: Any) -> Iterator[Asked]:
    """Say that every process group is NCCL's. ``instead``: other stand-ins, by name; None takes a name away."""
    asked = Asked()
    found = {"set_backend": asked.backends.append, "rendezvous": asked.rendezvous, "get_mem_pool": asked.get_mem_pool}
    pairs = ",".join(f"{device}:nccl" for device in ("cpu", "virtual"))
    with contextlib.ExitStack() as stack:
        for name, value in {**found, **instead}.items():
            if value is not None:
                stack.enter_context(mock.patch.object(symmetric, name, value, create=True))
            elif hasattr(symmetric, name):
                stack.enter_context(mock.patch.object(symmetric, name))
                delattr(symmetric, name)
        stack.enter_context(mock.patch.object(torch.cuda, "use_mem_pool", lambda pool: contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(dist, "get_backend_config", lambda group=None: pairs))
        yield asked
