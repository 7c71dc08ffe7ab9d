"""Whoever has read shards to hold them whole finds out that they were written to since: by any optimizer's step, to a
DTensor or to this rank's rows, frozen or not. On a process group of one process that moves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import MLP, WIDTH
from torch import Tensor, optim
from torch.distributed.tensor import ones as distributed_ones

import graph_fsdp
from graph_fsdp import ParameterChangedError


class Broken(MLP):
    """Code outside of graphs reads a weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale()

    @torch.compiler.disable
    def scale(self) -> Tensor:
        return self.blocks[0].up.weight.mean()


def step_of(optimizer: optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()


def with_foreach(shards: list[Any]) -> None:
    step_of(optim.SGD(shards, lr=0.1, foreach=True))


def fused(shards: list[Any]) -> None:
    step_of(optim.AdamW(shards, lr=0.1, fused=True))


def one_by_one(shards: list[Any]) -> None:
    step_of(optim.SGD(shards, lr=0.1, foreach=False))


def distributed(shards: list[Any]) -> None:
    step_of(graph_fsdp.distribute_optimizer(optim.AdamW(shards, lr=0.1, foreach=True)))


def distributed_but_for_a_gradient_that_is_placed_otherwise(shards: list[Any]) -> None:
    optimizer = graph_fsdp.distribute_optimizer(optim.SGD(shards, lr=0.1, foreach=True))
    p = shards[0]
    whole = distributed_ones(p.shape, device_mesh=p.device_mesh)
    optimizer.register_step_pre_hook(lambda *_: setattr(p, "grad", whole))
    step_of(optimizer)


def in_own_rows(shards: list[Any]) -> None:
    for p in shards:
        p.to_local().mul_(0.5)


def while_frozen(shards: list[Any]) -> None:
    for p in shards:
        if not p.requires_grad:
            p.mul_(0.5)


WRITES = (
    with_foreach, fused, one_by_one, distributed, distributed_but_for_a_gradient_that_is_placed_otherwise, in_own_rows,
    while_frozen,
)  # fmt: skip


def forwards_of_units_that_stay_whole(model: Any, write: Callable[[], object]) -> None:
    model.set_reshard_after_backward(False)
    model(torch.ones(4, WIDTH)).sum().backward()
    write()
    model(torch.ones(4, WIDTH))


def unshard(model: Any, write: Callable[[], object]) -> None:
    model.unshard()
    write()
    model(torch.ones(4, WIDTH))


def unsharded(model: Any, write: Callable[[], object]) -> None:
    with graph_fsdp.unsharded(model):
        write()


def export(model: Any, write: Callable[[], object]) -> None:
    exported = graph_fsdp.export(model, max_bytes=1)
    next(exported)
    write()
    list(exported)


def code_outside_of_graphs(model: Any, write: Callable[[], object]) -> None:
    loss = model(torch.ones(4, WIDTH)).sum()
    write()
    loss.backward()


READS = (forwards_of_units_that_stay_whole, unshard, unsharded, export, code_outside_of_graphs)


@pytest.mark.parametrize("read", READS)
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_a_write_behind_what_was_read_is_an_error(fake_group: None, read: Any) -> None:
    kind, options = (Broken, {"fullgraph": False}) if read is code_outside_of_graphs else (MLP, {})
    model: Any = graph_fsdp.compile(kind(depth=1), backend="eager", **options)
    model.blocks[0].down.weight.requires_grad_(False)
    shards, missed = list(model.parameters()), []
    for write in WRITES:
        with contextlib.suppress(ParameterChangedError):
            read(model, torch.no_grad()(partial(write, shards)))
            missed.append(write.__name__)
        model.reshard()
    assert missed == []
    read(model, lambda: None)
