"""The dialect: the operators and the typed node records that all passes share.

Each operator is a function below, decorated with its schema and what it does to the schedule (``Effect``): the function
is its fake, and its docstring says what the operator's value is. ``OPERATORS`` has all of them. What carries them out
(the executor, ``functional.py``, ``operators.py`` of the runtime, XLA) is a table from operators to functions each, and
a test looks whether each table is complete.

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

import enum
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import argument as argument
from graph_fsdp.passes.ir.records import STARTING as STARTING
from graph_fsdp.passes.ir.records import WAITING as WAITING
from graph_fsdp.passes.ir.records import NodeRecord as NodeRecord
from graph_fsdp.passes.ir.records import Role as Role
from graph_fsdp.passes.ir.records import has_role as has_role
from graph_fsdp.passes.ir.records import record as record
from graph_fsdp.passes.ir.records import set_record as set_record

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load of the backends

_LIBRARY = torch.library.Library("graph_fsdp", "DEF")


class Effect(enum.Enum):
    """What an operator does to the schedule."""

    TRACED = "stands for a collective until the bucket pass"
    START = "starts a collective, on whose order ranks agree"
    WAIT = "waits for a collective"
    COPY_START = "starts a copy of shards or gradients between the CPU and the device"
    COPY_WAIT = "waits for such a copy"
    ACTIVATION_COPY = "starts a copy of a saved activation, or waits for it"
    LOCAL = "is run by the executor between compute regions"


@dataclass(frozen=True)
class Operator:
    """An operator of the dialect. ``meaning``: of its value."""

    name: str
    effect: Effect
    meaning: str


OPERATORS: dict[compat.OpOverload[..., Any], Operator] = {}


def _operator(schema: str, effect: Effect) -> Callable[[Callable[..., Any]], compat.OpOverload[..., Any]]:
    """Define an operator, whose fake is the decorated function."""

    def define(fake: Callable[..., Any]) -> compat.OpOverload[..., Any]:
        name = fake.__name__
        _LIBRARY.define(name + schema)
        torch.library.register_fake(f"graph_fsdp::{name}", fake, lib=_LIBRARY)
        defined: compat.OpOverload[..., Any] = getattr(torch.ops.graph_fsdp, name).default
        OPERATORS[defined] = Operator(name, effect, " ".join((fake.__doc__ or "").split()))
        return defined

    return define


@_operator(
    "(Tensor shard, int[] shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    Effect.TRACED,
)
def gather_param(
    shard: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    """The full parameter."""
    return shard.new_empty(shape, dtype=dtype, device=device)


@_operator(
    "(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    Effect.TRACED,
)
def reduce_grad(
    grad: Tensor,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    group: str,
    replicate_group: str = "",
    device: torch.device | None = None,
) -> Tensor:
    """The shard of a gradient's mean."""
    return grad.new_empty(shard_shape, dtype=dtype, device=device)


@_operator(
    "(Tensor[] shards, int[] offsets, int length, ScalarType dtype, int world_size, str group, int[] messages=[],"
    " int[] numels=[], bool custom=False) -> Tensor",
    Effect.START,
)
def all_gather_start(
    shards: Sequence[Tensor], offsets: Sequence[int], length: int, dtype: torch.dtype, world_size: int, *_: Any
) -> Tensor:
    """The buffer of a gathered bucket, its contents unknown until it is waited for."""
    return shards[0].new_empty([world_size * length], dtype=dtype)


@_operator("(Tensor(a!) buffer) -> Tensor(a!)", Effect.WAIT)
def all_gather_wait(buffer: Tensor) -> Tensor:
    """The same buffer, gathered."""
    return buffer


@_operator(
    "(Tensor buffer, int[] offsets, int[] numels, int length, int world_size, int ranks, str group) -> Tensor",
    Effect.LOCAL,
)
def keep_shard(
    buffer: Tensor, offsets: Sequence[int], numels: Sequence[int], length: int, world_size: int, ranks: int, _: str
) -> Tensor:
    """A flat shard of a gathered bucket, over ``ranks`` ranks."""
    return buffer.new_empty([length * world_size // ranks])


@_operator("(Tensor(a!) buffer) -> ()", Effect.LOCAL)
def free(buffer: Tensor) -> None:
    """Nothing: the buffer's memory is given back."""


@_operator(
    "(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1, int[] messages=[],"
    " bool custom=False, *, float? factor=None, bool summed=False) -> Tensor",
    Effect.START,
)
def reduce_scatter_start(
    grads: Sequence[Tensor],
    dtype: torch.dtype,
    world_size: int,
    group: str,
    replicas: int = 1,
    messages: Sequence[int] = (),
    *_: Any,
    **__: Any,
) -> Tensor:
    """The flat shard of the gradients' means, unknown until it is waited for."""
    return grads[0].new_empty(reduced_offsets(grads, dtype, world_size, messages)[-1:], dtype=dtype)


@_operator(
    "(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1, *, float? factor=None,"
    " bool summed=False) -> Tensor",
    Effect.START,
)
def all_reduce_start(grads: Sequence[Tensor], dtype: torch.dtype, *_: Any, **__: Any) -> Tensor:
    """The flat means of gradients, whole, unknown until they are waited for."""
    return grads[0].new_empty([sum(g.numel() for g in grads)], dtype=dtype)


@_operator(
    "(Tensor(a!) shard, int ranks, str group, *, float? factor=None, bool summed=False) -> Tensor(a!)", Effect.START
)
def all_reduce_shard_start(shard: Tensor, *_: Any, **__: Any) -> Tensor:
    """The same buffer: the mean over replicas, in place, unknown until it is waited for."""
    return shard


@_operator("(Tensor(a!) buffer) -> Tensor(a!)", Effect.WAIT)
def reduce_wait(buffer: Tensor) -> Tensor:
    """The same buffer, reduced."""
    return buffer


@_operator(
    "(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param, Device? device=None)"
    " -> Tensor",
    Effect.LOCAL,
)
def accumulate_grad(
    grad: Tensor,
    shard_shape: Sequence[int],
    dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    param: str,
    device: torch.device | None = None,
) -> Tensor:
    """No gradient: ``grad`` is added to what is kept."""
    return grad.new_empty(shard_shape, dtype=dtype, device=device)


@_operator("(Tensor(a!) buffer, str unit) -> Tensor(a!)", Effect.LOCAL)
def reduce_hook(buffer: Tensor, unit: str) -> Tensor:
    """The same buffer, which a function of the user has seen."""
    return buffer


@_operator("(Tensor[] values, str op, str group) -> Tensor", Effect.LOCAL)
def reduce_payloads(values: Sequence[Tensor], op: str, group: str) -> Tensor:
    """What a tensor extension asks to be reduced, flat, one behind the other."""
    return values[0].new_empty([sum(v.numel() for v in values)])


@_operator("(Tensor value) -> Tensor", Effect.ACTIVATION_COPY)
def offload_activation(value: Tensor) -> Tensor:
    """A copy on the CPU, unknown until it is waited for."""
    return torch.empty_like(value, device="cpu")


@_operator("(Tensor(a!) host, Tensor value) -> Tensor(a!)", Effect.ACTIVATION_COPY)
def activation_offloaded(host: Tensor, value: Tensor) -> Tensor:
    """The same copy, which is there; ``value`` may go."""
    return host


@_operator("(Tensor host, Device device) -> Tensor", Effect.ACTIVATION_COPY)
def reload_activation(host: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, unknown until it is waited for."""
    return torch.empty_like(host, device=device)


@_operator("(Tensor(a!) buffer, Tensor host) -> Tensor(a!)", Effect.ACTIVATION_COPY)
def activation_reloaded(buffer: Tensor, host: Tensor) -> Tensor:
    """The same copy, which is there; ``host`` may go."""
    return buffer


@_operator("(Tensor[] shards, int[] offsets, int length, Device device) -> Tensor", Effect.COPY_START)
def fetch_start(shards: Sequence[Tensor], offsets: Sequence[int], length: int, device: torch.device) -> Tensor:
    """Flat shards: a copy on ``device``, unknown until it is waited for."""
    return shards[0].new_empty([length], device=device)


@_operator("(Tensor(a!) buffer) -> Tensor(a!)", Effect.COPY_WAIT)
def fetch_wait(buffer: Tensor) -> Tensor:
    """The same copy, which is there."""
    return buffer


@_operator("(Tensor[] values, bool pin_memory) -> Tensor", Effect.COPY_START)
def offload_start(values: Sequence[Tensor], pin_memory: bool) -> Tensor:
    """Flat gradients: a copy on the CPU, unknown until it is waited for."""
    return values[0].new_empty([sum(v.numel() for v in values)], device="cpu")


@_operator("(Tensor(a!) buffer) -> Tensor(a!)", Effect.COPY_WAIT)
def offload_wait(buffer: Tensor) -> Tensor:
    """The same copy, which is there."""
    return buffer


def _with(*effects: Effect) -> frozenset[compat.OpOverload[..., Any]]:
    return frozenset(target for target, found in OPERATORS.items() if found.effect in effects)


STARTS, WAITS = _with(Effect.START), _with(Effect.WAIT)
COPY_STARTS, COPY_WAITS = _with(Effect.COPY_START), _with(Effect.COPY_WAIT)
ACTIVATION_COPIES = _with(Effect.ACTIVATION_COPY)
EXECUTED = OPERATORS.keys() - _with(Effect.TRACED)  # what the executor runs itself, between compute regions


def is_custom(node: fx.Node) -> bool:
    """Whether an object of the user's runs a collective."""
    return node.target in (all_gather_start, reduce_scatter_start) and bool(argument(node, "custom"))


def parameter_of(node: fx.Node) -> str:
    """Name of the parameter of a ``gather_param`` or a ``reduce_grad``."""
    return str(argument(node, "param"))


def group_of(node: fx.Node) -> str:
    """Name of the process group of a collective."""
    return str(argument(node, "group"))


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
