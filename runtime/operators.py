"""The dialect's operators, called one by one: a printed stage runs as the Python that it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.runtime.comm.collectives import (
    Pending,
    keep_shard,
    reduce_payloads,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    start_shard_all_reduce,
)

_pending: dict[int, Pending] = {}
_LIBRARY = torch.library.Library("graph_fsdp", "IMPL")


def implement(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        return function

    return register


def started(pending: Pending) -> Tensor:
    _pending[pending.buffer.data_ptr()] = pending
    return pending.buffer


def finished(buffer: Tensor) -> Tensor:
    _pending.pop(buffer.data_ptr()).finish()
    return buffer


@implement("all_gather_start")
def _all_gather_start(
    shards: list[Tensor],
    offsets: list[int],
    length: int,
    dtype: torch.dtype,
    world_size: int,
    group: str,
    messages: Sequence[int] = (),
    numels: Sequence[int] = (),
    custom: bool = False,
) -> Tensor:
    layout = GatherLayout.make(offsets, numels or [s.numel() for s in shards], length, world_size, messages)
    return started(start_all_gather(shards, layout, dtype, compat.resolve_group(group)))


@implement("all_gather_wait")
def _all_gather_wait(buffer: Tensor) -> Tensor:
    return finished(buffer)


@implement("keep_shard")
def _keep_shard(
    buffer: Tensor,
    offsets: list[int],
    numels: list[int],
    length: int,
    world_size: int,
    ranks: int,
    group: str,
) -> Tensor:
    return keep_shard(buffer, offsets, numels, length, world_size // ranks, compat.resolve_group(group))


@implement("free")
def _free(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


@implement("reduce_scatter_start")
def _reduce_scatter_start(
    grads: list[Tensor],
    dtype: torch.dtype,
    world_size: int,
    group: str,
    replicas: int = 1,
    messages: Sequence[int] = (),
    custom: bool = False,
    factor: float | None = None,
    summed: bool = False,
) -> Tensor:
    resolved = compat.resolve_group(group)
    return started(start_reduce_scatter(grads, dtype, resolved, replicas, messages, factor, summed))


@implement("all_reduce_start")
def _all_reduce_start(
    grads: list[Tensor],
    dtype: torch.dtype,
    world_size: int,
    group: str,
    replicas: int = 1,
    factor: float | None = None,
    summed: bool = False,
) -> Tensor:
    return started(start_all_reduce(grads, dtype, compat.resolve_group(group), replicas, factor, summed))


@implement("all_reduce_shard_start")
def _all_reduce_shard_start(
    shard: Tensor, ranks: int, group: str, factor: float | None = None, summed: bool = False
) -> Tensor:
    return started(start_shard_all_reduce(shard, ranks, compat.resolve_group(group), factor, summed))


@implement("reduce_wait")
def _reduce_wait(buffer: Tensor) -> Tensor:
    return finished(buffer)


@implement("accumulate_grad")
def _accumulate_grad(
    grad: Tensor,
    shard_shape: list[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    device: torch.device | None = None,
) -> Tensor:
    return grad.new_zeros(
        shard_shape, dtype=dtype, device=device
    )  # operator by operator there is nothing that a gradient adds to


@implement("reduce_hook")
def _reduce_hook(buffer: Tensor, unit: str) -> Tensor:
    return buffer


@implement("reduce_payloads")
def _reduce_payloads(values: list[Tensor], op: str, group: str) -> Tensor:
    return reduce_payloads(values, op, compat.resolve_group(group))


@implement("gather_param")
def _gather_param(
    shard: Tensor,
    shape: list[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    shard = shard if device is None else shard.to(device)
    if math.prod(shape) == 0 or not shape or not group:
        return shard.to(dtype, copy=True).reshape(shape)
    process_group = compat.resolve_group(group)
    layout = GatherLayout.make([0], [shard.numel()], shard.numel(), process_group.size())
    pending = start_all_gather([shard], layout, dtype, process_group)
    pending.finish()
    return pending.buffer.view(-1, *shape[1:])[: shape[0]].contiguous()


@implement("reduce_grad")
def _reduce_grad(
    grad: Tensor,
    shard_shape: list[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros(shard_shape, dtype=dtype, device=device)
    groups = [compat.resolve_group(name) for name in (group, replicate_group) if name]
    if not groups:
        return grad.to(dtype=dtype, device=device, copy=True)
    ranks = math.prod(g.size() for g in groups)
    start = start_reduce_scatter if shard_shape and group else start_all_reduce
    pending = start([grad], reduce_dtype, groups[0], ranks // groups[0].size())
    pending.finish()
    for replicas in groups[1:]:
        start_shard_all_reduce(pending.buffer, ranks, replicas).finish()
    return pending.buffer.to(dtype=dtype, device=device).view(shard_shape)
