"""Each operator of the dialect has a function here that runs it on process groups, in a program or called by itself.

Called by itself (a printed stage runs as Python), a start's handle is kept until the wait for its buffer.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.passes.ir.operands import by_name
from graph_fsdp.runtime.comm import collectives, copies, quantized
from graph_fsdp.runtime.comm.collectives import Pending

_pending: dict[int, Pending] = {}  # by the address of the buffer
_LIBRARY = torch.library.Library("graph_fsdp", "IMPL")
_GROUPS = ("group", "replicate_group")


def arguments_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, with process groups in place of their names, and with the ``layout`` of a
    bucket and the ``mean`` of a reduction added. Tensors may be fake."""
    given = by_name(target, args, kwargs)
    given.update({name: compat.resolve_group(given[name]) for name in _GROUPS if given.get(name)})
    if "summed" in given:
        dtype = given["dtype"] if "dtype" in given else given["shard"].dtype
        ranks = given["ranks"] if "ranks" in given else given["world_size"]
        given["mean"] = collectives.mean_of(dtype, ranks, given.get("replicas", 1), given["factor"], given["summed"])
    if "shards" in given:
        given["layout"] = GatherLayout.of(given)
    return given


def bound(function: Callable[..., Any], given: Mapping[str, Any]) -> functools.partial[Any]:
    """Bind those of an operator's arguments that ``function`` names, but for the first, the tensors."""
    return functools.partial(function, **{name: given[name] for name in _names(function)[1:] if name in given})


@functools.cache
def _names(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def _gather_param(shard: Tensor, shape: Sequence[int], dtype: torch.dtype, group: Any, device: Any) -> Tensor:
    shard = shard if device is None else shard.to(device)
    if math.prod(shape) == 0 or not shape or not group:
        return shard.to(dtype, copy=True).reshape(shape)
    layout = GatherLayout.make([0], [shard.numel()], shard.numel(), group.size())
    pending = collectives.start_all_gather([shard], layout, dtype, group)
    pending.finish()
    return pending.buffer.view(-1, *shape[1:])[: shape[0]].contiguous()


def _reduce_grad(
    grad: Tensor,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    group: Any,
    replicate_group: Any,
    device: Any,
) -> Tensor:
    if grad.numel() == 0:
        return grad.new_zeros(shard_shape, dtype=dtype, device=device)
    groups = [found for found in (group, replicate_group) if found]
    if not groups:
        return grad.to(dtype=dtype, device=device, copy=True)
    sizes = [found.size() for found in groups]
    start = quantized.start_reduce_scatter if shard_shape and group else collectives.start_all_reduce
    pending = start([grad], reduce_dtype, groups[0], collectives.mean_of(reduce_dtype, *sizes))
    pending.finish()
    for replicas in groups[1:]:
        mean = collectives.mean_of(reduce_dtype, math.prod(sizes))
        collectives.start_shard_all_reduce(pending.buffer, replicas, mean).finish()
    return pending.buffer.to(dtype=dtype, device=device).view(shard_shape)


def _accumulate_grad(grad: Tensor, shard_shape: Sequence[int], dtype: torch.dtype, device: Any) -> Tensor:
    # Operator by operator there is nothing that a gradient adds to.
    return grad.new_zeros(shard_shape, dtype=dtype, device=device)


def _free(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


def _finish(buffer: Tensor) -> Tensor:
    _pending.pop(buffer.data_ptr()).finish()
    return buffer


# A function's first argument is the operator's; the others have the names of ``arguments_of``.
FUNCTIONS: dict[Any, Callable[..., Any]] = {
    dialect.gather_param: _gather_param,
    dialect.reduce_grad: _reduce_grad,
    dialect.all_gather_start: collectives.start_all_gather,
    dialect.keep_shard: collectives.keep_shard,
    dialect.free: _free,
    dialect.reduce_scatter_start: quantized.start_reduce_scatter,
    dialect.all_reduce_start: collectives.start_all_reduce,
    dialect.all_reduce_shard_start: collectives.start_shard_all_reduce,
    dialect.accumulate_grad: _accumulate_grad,
    dialect.update_shard: lambda grad, param, last: torch.empty_like(grad),
    dialect.mean_over_groups: lambda buffer: buffer,
    dialect.reduce_hook: lambda buffer: buffer,
    dialect.reduce_payloads: collectives.reduce_payloads,
    dialect.fetch_start: copies.start_fetch,
    dialect.offload_start: copies.start_offload,
    dialect.offload_activation: copies.offload_activation,
    dialect.reload_activation: copies.reload_activation,
    **dict.fromkeys([*dialect.TRANSFER_WAITS, *dialect.ACTIVATION_WAITS], _finish),
}


def _called_alone(target: compat.OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
    value = bound(FUNCTIONS[target], arguments_of(target, args, kwargs))(args[0])
    if not isinstance(value, Pending):
        return value
    _pending[value.buffer.data_ptr()] = value
    return value.buffer


for _target in FUNCTIONS:
    _implementation = functools.partial(_called_alone, _target)
    _LIBRARY.impl(dialect.OPERATORS[_target].name, _implementation, "CompositeExplicitAutograd")
