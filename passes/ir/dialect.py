"""The dialect: the operators and the typed node records that all passes share.

| operator | value | meaning |
|---|---|---|
| ``gather_param(shard, shape, dtype, reduce_dtype, param, group, replicate_group, device)`` | parameter | full |
| ``reduce_grad(grad, shard_shape, dtype, reduce_dtype, param, group, replicate_group, device)`` | its shard | mean |
| ``all_gather_start(shards, offsets, length, dtype, world_size, group, messages, numels)`` | buffer | unknown until |
| ``all_gather_wait(buffer)`` | the same buffer | …it is waited for |
| ``keep_shard(buffer, offsets, numels, length, world_size, ranks, group)`` | flat shard | of a bucket, over ``ranks`` |
| ``free(buffer)`` | nothing | the buffer's memory is given back |
| ``reduce_scatter_start(grads, dtype, world_size, group, replicas, messages)`` | flat shard of gradients | mean |
| ``all_reduce_start(grads, dtype, world_size, group, replicas)`` | flat gradients | mean, not sharded |
| ``all_reduce_shard_start(shard, ranks, group)`` | the same buffer | mean over replicas, in place |
| ``reduce_wait(buffer)`` | the same buffer | contents are there |
| ``accumulate_grad(grad, shard_shape, dtype, reduce_dtype, param)`` | no gradient | added to what is kept |
| ``reduce_hook(buffer, unit)`` | the same buffer | a function of the user has seen it |
| ``offload_activation(value)`` | copy on the CPU | contents unknown until |
| ``activation_offloaded(host, value)`` | the same copy | …it is waited for, and ``value`` may go |
| ``reload_activation(host, device)`` | copy on the device | contents unknown until |
| ``activation_reloaded(buffer, host)`` | the same copy | …it is waited for, and ``host`` may go |
| ``fetch_start(shards, offsets, length, device)`` | flat shards | a copy on ``device``, unknown until |
| ``fetch_wait(buffer)`` | the same buffer | …it is waited for |
| ``offload_start(values, pin_memory)`` | flat gradients | a copy on the CPU, unknown until |
| ``offload_wait(buffer)`` | the same buffer | …it is waited for |

``gather_param`` and ``reduce_grad`` are each other's adjoints: differentiating the first gives the second, which is
how reductions come into the joint graph. The other operators exist only after the bucket pass.

A bucket is gathered in one message, or in several launched as a group: ``messages`` (begin and number of elements of
each in the bucket's shard, one pair behind the other) says which parts. A parameter that has a message of its own
lands in place; parameters that share one are unpacked by the wait. ``shards`` are the parameters' chunks, or one flat
tensor of all ``length`` elements, in which ``numels`` says how long the chunks at ``offsets`` are. Such a tensor is
what ``keep_shard`` cuts out of a gathered buffer (see ``keep_shard.py``).

Gradients are reduced in ``dtype``, and in messages too: ``messages`` says how many of ``grads`` share each, in their
order; none is one of all. A gradient that has a message of its own is sent from where it lies, if it has the type of
the reduction and the ranks' chunks are equal; what shares a message is packed. The results of messages start at
multiples of ALIGNMENT bytes (``reduced_offsets``).

``custom``: an object that the user has brought runs the collective, always in one message (``settings.py``).

On a mesh that also replicates, a gradient is reduced over the group that shards and what comes out over the group of
its replicas. ``replicas`` tells the first reduction that the second follows: types that could overflow are divided
before the first and after the last. ``ranks`` is the product of both groups' sizes. Groups that are not there are "".

A reduction yields the mean, by the group's own means, unless ``factor`` says what the sum is divided by, or
``summed`` that the group adds and the division is a kernel of its own.

``accumulate_grad`` takes the place of a reduction in graphs that do not reduce: what it is given, a whole gradient or
one that was reduced over the ranks that shard, is added up in ``reduce_dtype`` until a graph reduces the parameter's
gradient, which takes it along. Autograd is then given no gradient; the value, of ``shard_shape`` and ``dtype``, and on
``device`` where shards lie on another one, exists for the tracer alone.
Where shards are kept on the CPU (``offload.py``), ``gather_param`` is told the ``device`` to gather on, and
``reduce_grad`` that of the shard; the bucket pass makes the copies between the two nodes of their own.

``reduce_payloads``: an all-reduce that tensor extensions ask for, of small tensors of one type: flat, one behind the
other, and waited for at once. ``op`` is that of functional collectives (``payloads.py``).

A node's role is a fact of its ``meta["fsdp"]`` record (``records.py``), never of its name. The operators'
implementations on process groups are in the runtime.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import overload
from graph_fsdp.passes.ir.records import STARTING as STARTING
from graph_fsdp.passes.ir.records import WAITING as WAITING
from graph_fsdp.passes.ir.records import NodeRecord as NodeRecord
from graph_fsdp.passes.ir.records import Role as Role
from graph_fsdp.passes.ir.records import has_role as has_role
from graph_fsdp.passes.ir.records import record as record
from graph_fsdp.passes.ir.records import set_record as set_record

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load of the backends

_LIBRARY = torch.library.Library("graph_fsdp", "DEF")
_SCHEMAS = (
    "gather_param(Tensor shard, int[] shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    "reduce_grad(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    "all_gather_start(Tensor[] shards, int[] offsets, int length, ScalarType dtype, int world_size, str group,"
    " int[] messages=[], int[] numels=[], bool custom=False) -> Tensor",
    "all_gather_wait(Tensor(a!) buffer) -> Tensor(a!)",
    "keep_shard(Tensor buffer, int[] offsets, int[] numels, int length, int world_size, int ranks, str group)"
    " -> Tensor",
    "free(Tensor(a!) buffer) -> ()",
    "reduce_scatter_start(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1,"
    " int[] messages=[], bool custom=False, *, float? factor=None, bool summed=False) -> Tensor",
    "all_reduce_start(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1,"
    " *, float? factor=None, bool summed=False) -> Tensor",
    "all_reduce_shard_start(Tensor(a!) shard, int ranks, str group, *, float? factor=None, bool summed=False)"
    " -> Tensor(a!)",
    "reduce_wait(Tensor(a!) buffer) -> Tensor(a!)",
    "accumulate_grad(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param,"
    " Device? device=None) -> Tensor",
    "reduce_hook(Tensor(a!) buffer, str unit) -> Tensor(a!)",
    "reduce_payloads(Tensor[] values, str op, str group) -> Tensor",
    "offload_activation(Tensor value) -> Tensor",
    "activation_offloaded(Tensor(a!) host, Tensor value) -> Tensor(a!)",
    "reload_activation(Tensor host, Device device) -> Tensor",
    "activation_reloaded(Tensor(a!) buffer, Tensor host) -> Tensor(a!)",
    "fetch_start(Tensor[] shards, int[] offsets, int length, Device device) -> Tensor",
    "fetch_wait(Tensor(a!) buffer) -> Tensor(a!)",
    "offload_start(Tensor[] values, bool pin_memory) -> Tensor",
    "offload_wait(Tensor(a!) buffer) -> Tensor(a!)",
)
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)

_ops = torch.ops.graph_fsdp
gather_param = _ops.gather_param.default
reduce_grad = _ops.reduce_grad.default
all_gather_start = _ops.all_gather_start.default
all_gather_wait = _ops.all_gather_wait.default
keep_shard = _ops.keep_shard.default
free = _ops.free.default
reduce_scatter_start = _ops.reduce_scatter_start.default
all_reduce_start = _ops.all_reduce_start.default
all_reduce_shard_start = _ops.all_reduce_shard_start.default
reduce_wait = _ops.reduce_wait.default
accumulate_grad = _ops.accumulate_grad.default
reduce_hook = _ops.reduce_hook.default
reduce_payloads = _ops.reduce_payloads.default
offload_activation = _ops.offload_activation.default
activation_offloaded = _ops.activation_offloaded.default
reload_activation = _ops.reload_activation.default
activation_reloaded = _ops.activation_reloaded.default
fetch_start = _ops.fetch_start.default
fetch_wait = _ops.fetch_wait.default
offload_start = _ops.offload_start.default
offload_wait = _ops.offload_wait.default

# Collectives. Ranks agree on the order of their starts.
STARTS = frozenset({all_gather_start, reduce_scatter_start, all_reduce_start, all_reduce_shard_start})
WAITS = frozenset({all_gather_wait, reduce_wait})
# Copies between the CPU and the device, which are a rank's own affair: of shards and gradients, and of activations.
COPY_STARTS = frozenset({fetch_start, offload_start})
COPY_WAITS = frozenset({fetch_wait, offload_wait})
ACTIVATION_COPIES = frozenset({offload_activation, activation_offloaded, reload_activation, activation_reloaded})
# What the executor runs itself, between compute regions.
_OTHERS = frozenset({keep_shard, free, accumulate_grad, reduce_hook, reduce_payloads})
EXECUTED = STARTS | WAITS | COPY_STARTS | COPY_WAITS | ACTIVATION_COPIES | _OTHERS


def argument(node: fx.Node, name: str) -> Any:
    """The argument of an operator of the dialect that its schema calls ``name``."""
    for index, described in enumerate(compat.schema_arguments(overload(node))):
        if described.name == name:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            return described.default_value if value is None else value
    raise KeyError(f"{node.target} has no argument {name!r}")


def is_custom(node: fx.Node) -> bool:
    """Whether an object of the user's runs a collective."""
    return node.target in (all_gather_start, reduce_scatter_start) and bool(argument(node, "custom"))


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective."""
    return str(argument(node, "group"))


# --- fakes: shapes and dtypes, for tracing and for the verifier


@torch.library.register_fake("graph_fsdp::gather_param", lib=_LIBRARY)
def _(
    shard: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    return shard.new_empty(shape, dtype=dtype, device=device)


@torch.library.register_fake("graph_fsdp::reduce_grad", lib=_LIBRARY)
def _(
    grad: Tensor,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    return grad.new_empty(shard_shape, dtype=dtype, device=device)


@torch.library.register_fake("graph_fsdp::all_gather_start", lib=_LIBRARY)
def _(
    shards: Sequence[Tensor],
    offsets: Sequence[int],
    length: int,
    dtype: torch.dtype,
    world_size: int,
    group: str,
    messages: Sequence[int] = (),
    numels: Sequence[int] = (),
    custom: bool = False,
) -> Tensor:
    return shards[0].new_empty([world_size * length], dtype=dtype)


@torch.library.register_fake("graph_fsdp::all_gather_wait", lib=_LIBRARY)
def _(buffer: Tensor) -> Tensor:
    return buffer


@torch.library.register_fake("graph_fsdp::keep_shard", lib=_LIBRARY)
def _(
    buffer: Tensor,
    offsets: Sequence[int],
    numels: Sequence[int],
    length: int,
    world_size: int,
    ranks: int,
    group: str,
) -> Tensor:
    return buffer.new_empty([length * world_size // ranks])


@torch.library.register_fake("graph_fsdp::free", lib=_LIBRARY)
def _(buffer: Tensor) -> None:
    return None


@torch.library.register_fake("graph_fsdp::reduce_scatter_start", lib=_LIBRARY)
def _(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    world_size: int,
    group: str,
    replicas: int = 1,
    messages: Sequence[int] = (),
    custom: bool = False,
    factor: float | None = None,
    summed: bool = False,
) -> Tensor:
    return grads[0].new_empty(reduced_offsets(grads, dtype, world_size, messages)[-1:], dtype=dtype)


@torch.library.register_fake("graph_fsdp::all_reduce_start", lib=_LIBRARY)
def _(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    world_size: int,
    group: str,
    replicas: int = 1,
    factor: float | None = None,
    summed: bool = False,
) -> Tensor:
    return grads[0].new_empty([sum(g.numel() for g in grads)], dtype=dtype)


@torch.library.register_fake("graph_fsdp::all_reduce_shard_start", lib=_LIBRARY)
def _(shard: Tensor, ranks: int, group: str, factor: float | None = None, summed: bool = False) -> Tensor:
    return shard


@torch.library.register_fake("graph_fsdp::reduce_wait", lib=_LIBRARY)
def _(buffer: Tensor) -> Tensor:
    return buffer


@torch.library.register_fake("graph_fsdp::accumulate_grad", lib=_LIBRARY)
def _(
    grad: Tensor,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    device: torch.device | None = None,
) -> Tensor:
    return grad.new_empty(shard_shape, dtype=dtype, device=device)


@torch.library.register_fake("graph_fsdp::reduce_hook", lib=_LIBRARY)
def _(buffer: Tensor, unit: str) -> Tensor:
    return buffer


@torch.library.register_fake("graph_fsdp::reduce_payloads", lib=_LIBRARY)
def _(values: Sequence[Tensor], op: str, group: str) -> Tensor:
    return values[0].new_empty([sum(v.numel() for v in values)])


@torch.library.register_fake("graph_fsdp::offload_activation", lib=_LIBRARY)
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="cpu")


@torch.library.register_fake("graph_fsdp::activation_offloaded", lib=_LIBRARY)
def _(host: Tensor, value: Tensor) -> Tensor:
    return host


@torch.library.register_fake("graph_fsdp::reload_activation", lib=_LIBRARY)
def _(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(host, device=device)


@torch.library.register_fake("graph_fsdp::activation_reloaded", lib=_LIBRARY)
def _(buffer: Tensor, host: Tensor) -> Tensor:
    return buffer


@torch.library.register_fake("graph_fsdp::fetch_start", lib=_LIBRARY)
def _(shards: Sequence[Tensor], offsets: Sequence[int], length: int, device: torch.device) -> Tensor:
    return shards[0].new_empty([length], device=device)


@torch.library.register_fake("graph_fsdp::fetch_wait", lib=_LIBRARY)
def _(buffer: Tensor) -> Tensor:
    return buffer


@torch.library.register_fake("graph_fsdp::offload_start", lib=_LIBRARY)
def _(values: Sequence[Tensor], pin_memory: bool) -> Tensor:
    return values[0].new_empty([sum(v.numel() for v in values)], device="cpu")


@torch.library.register_fake("graph_fsdp::offload_wait", lib=_LIBRARY)
def _(buffer: Tensor) -> Tensor:
    return buffer


def chunk_numels(grads: Sequence[Tensor], world_size: int) -> list[int]:
    """Elements of each gradient's (padded) chunk."""
    return [-(-g.shape[0] // world_size) * math.prod(g.shape[1:]) for g in grads]


def reduced_offsets(
    grads: Sequence[Tensor], dtype: torch.dtype, world_size: int, messages: Sequence[int] = ()
) -> list[int]:
    """Element at which each gradient's shard starts in what a ``reduce_scatter_start`` yields, and the end of the
    last."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    numels = iter(chunk_numels(grads, world_size))
    offsets, end = [], 0
    for count in messages or [len(grads)]:
        end = -(-end // step) * step
        for numel in itertools.islice(numels, count):
            offsets.append(end)
            end += numel
    return [*offsets, end]


def is_sent_as_it_is(grad: Tensor, dtype: torch.dtype, world_size: int) -> bool:
    """Whether the gradient, alone in its message, is reduced from where it lies."""
    return grad.dtype is dtype and grad.shape[0] % world_size == 0 and grad.is_contiguous()


# --- autograd: reductions are born here


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, _, ctx.reduce_dtype, *names = inputs  # param, group, and what else is given
    ctx.shard_shape, ctx.dtype, ctx.given = list(shard.shape), shard.dtype, len(inputs)
    offloaded = len(names) > 3 and names[3] is not None
    ctx.names = [*names[:3], shard.device] if offloaded else names[:3]


def _gather_param_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shard_grad = reduce_grad(grad, ctx.shard_shape, ctx.dtype, ctx.reduce_dtype, *ctx.names)
    return shard_grad, *([None] * (ctx.given - 1))


torch.library.register_autograd(
    "graph_fsdp::gather_param", _gather_param_backward, setup_context=_setup_context, lib=_LIBRARY
)
