"""The dialect has the operators and the typed node records that all passes share.

Each operator is one entry below: its schema, what it does to the schedule (``Effect``), what its value is, and its
fake, which names the arguments that it reads. ``OPERATORS`` has all of them. The executor, ``whole.py``, the runtime's
``operators.py`` and XLA each have a table from operators to functions, and a test looks whether it is complete.

``gather_param`` and ``reduce_grad`` are each other's adjoints: differentiating the first gives the second, which is how
reductions come into the joint graph. The other operators exist only after the bucket pass.

A bucket is gathered in one message, or in several launched as a group, by ``messages``: begin and number of elements of
each in the bucket's shard. A parameter that has a message of its own lands in place; parameters that share one are
unpacked by the wait. ``shards`` are the parameters' chunks, or one flat tensor of ``length`` elements, which
``keep_shard`` cuts out of a gathered buffer (``reshard.py``), with chunks of ``numels`` elements at ``offsets``.

Gradients are reduced in ``dtype``; ``messages`` says how many of ``grads`` share each message, in order, and none is
one of all. A contiguous gradient that is alone in its message, with the reduction's type and equal chunks, is sent from
where it lies; what shares a message is packed. The results of messages start at multiples of ALIGNMENT bytes
(``reduced_offsets``).

``custom``: an object of the user's runs the collective, always in one message (``settings.py``).

``sent_as``: gradients are quantized to this 8-bit type, exchanged in one message and summed in ``dtype`` by the rank
that keeps the sum (``runtime/comm/quantized.py``).

On a mesh that also replicates, a gradient is reduced over the group that shards and the result over its replicas.
``replicas`` tells the first reduction that the second follows: types that could overflow are divided before the first
and after the last. ``ranks`` is the product of both groups' sizes. Groups that are not there are "". A reduction yields
the mean, unless ``factor`` says what the sum is divided by, or ``summed`` that the division is a kernel of its own.

``accumulate_grad`` takes the place of a reduction in graphs that do not reduce: a gradient, whole or reduced over the
ranks that shard, is added up in ``reduce_dtype`` until a graph reduces the parameter's gradient. Autograd is given no
gradient; the value, of ``shard_shape``, ``dtype`` and ``device``, exists for the tracer alone.

Where shards are kept on the CPU (``sources.py``), ``gather_param`` is told the ``device`` to gather on, and
``reduce_grad`` that of the shard; the bucket pass makes the copies between the two nodes of their own.

``reduce_payloads`` is an all-reduce that tensor extensions ask for, of small tensors of one type, flat and waited for
at once. ``op`` is that of functional collectives (``sources.py``).

A node's role is a fact of its ``meta["fsdp"]`` record, never of its name.
"""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import argument, by_name, defaults, define


class Role(enum.Enum):
    """Says what a node does in the schedule."""

    SHARD = "shard"  # a graph input: the local shard of a parameter
    TANGENT = "tangent"  # a graph input: the gradient of an output
    GATHER = "gather"
    GATHER_START = "gather_start"
    GATHER_WAIT = "gather_wait"
    UNPACK = "unpack"  # a view of one parameter in a gathered bucket
    FREE = "free"
    REDUCE = "reduce"
    REDUCE_START = "reduce_start"
    REDUCE_WAIT = "reduce_wait"
    REPLICATE_START = "replicate_start"  # what was reduced, reduced again over the replicas
    REPLICATE_WAIT = "replicate_wait"
    SHARD_GRAD = "shard_grad"  # the gradient of a local shard
    ACCUMULATE = "accumulate"  # keeps a gradient for a later graph, which reduces it
    UPDATE = "update"  # gives the gradient of a local shard to the optimizer
    MEAN_OVER_GROUPS = "mean_over_groups"  # of replica groups that come and go
    REDUCE_HOOK = "reduce_hook"
    KEPT = "kept"  # a gathered bucket that goes from forward to backward
    KEEP_SHARD = "keep_shard"  # cuts a shard out of a gathered bucket
    KEPT_SHARD = "kept_shard"  # such a shard, in backward
    UNSHARDED = "unsharded"  # a graph input: a parameter that was whole before the forward began
    OFFLOAD = "offload"  # copies a saved activation to the CPU
    RELOAD = "reload"  # and back, in backward
    PAYLOAD = "payload"  # what is gathered of a parameter that travels as something else
    PAYLOAD_REDUCE = "payload_reduce"  # an all-reduce of an extension's, for payloads
    FETCH_START = "fetch_start"  # shards that are kept on the CPU, to the device
    FETCH_WAIT = "fetch_wait"
    OFFLOAD_START = "offload_start"  # gradients of shards, to the CPU
    OFFLOAD_WAIT = "offload_wait"


@dataclass(frozen=True)
class NodeRecord:
    """Says what a node of the dialect does. ``nbytes`` counts the gathered, reduced or copied buffer. ``slot`` and
    ``landing_slot`` say where the buffers of a gather's start lie; None for memory of their own, or no such buffer."""

    role: Role
    unit: str
    bucket: str
    params: tuple[str, ...]
    nbytes: int = 0
    escapes: bool = False  # the buffer outlives the graph: kept for backward, or returned to the user
    slot: int | None = None
    landing_slot: int | None = None


RECORD = "fsdp"  # the key of a node's metadata under which its record lies


def record(node: fx.Node) -> NodeRecord | None:
    """Return the record of a node, None where it is not the dialect's."""
    return node.meta.get(RECORD)


def has_role(node: fx.Node, *roles: Role) -> bool:
    """Say whether a node has a record of one of these roles."""
    found = node.meta.get(RECORD)
    return found is not None and found.role in roles


def set_record(node: fx.Node, value: NodeRecord) -> fx.Node:
    """Give a node its record, and return the node."""
    node.meta[RECORD] = value
    return node


ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load of the backends

_LIBRARY = torch.library.Library("graph_fsdp", "DEF")


class Effect(enum.Enum):
    """Says what an operator does to the schedule."""

    TRACED = "stands for a collective until the bucket pass"
    START = "starts a collective, on whose order ranks agree"
    WAIT = "waits for a collective"
    COPY_START = "starts a copy of shards or gradients between the CPU and the device"
    COPY_WAIT = "waits for such a copy"
    ACTIVATION_COPY = "starts a copy of a saved activation, or waits for it"
    LOCAL = "is run by the executor between compute regions"


@dataclass(frozen=True)
class Operator:
    """Describes an operator, its effect and what its value means."""

    name: str
    effect: Effect
    meaning: str


OPERATORS: dict[compat.OpOverload[..., Any], Operator] = {}


def _define(
    schema: str, effect: Effect, meaning: str, fake: Callable[..., Any] | None = None
) -> compat.OpOverload[..., Any]:
    """Define an operator. Its fake is given those arguments that it names; without one, the operator works in the
    memory of its first argument, which is its value."""
    read = inspect.signature(fake).parameters if fake is not None else ()

    def called(*args: Any, **kwargs: Any) -> Any:
        given = by_name(defined, args, kwargs)
        return next(iter(given.values())) if fake is None else fake(**{name: given[name] for name in read})

    defined = define(_LIBRARY, schema, called)
    OPERATORS[defined] = Operator(schema.partition("(")[0], effect, meaning)
    return defined


def _define_wait(name: str, effect: Effect, meaning: str) -> compat.OpOverload[..., Any]:
    return _define(f"{name}(Tensor(a!) buffer) -> Tensor(a!)", effect, meaning)


gather_param = _define(
    "gather_param(Tensor shard, int[] shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    Effect.TRACED,
    "the full parameter",
    lambda shard, shape, dtype, device: shard.new_empty(shape, dtype=dtype, device=device),
)
reduce_grad = _define(
    "reduce_grad(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param, str group,"
    " str replicate_group='', Device? device=None) -> Tensor",
    Effect.TRACED,
    "the shard of a gradient's mean",
    lambda grad, shard_shape, dtype, device: grad.new_empty(shard_shape, dtype=dtype, device=device),
)
all_gather_start = _define(
    "all_gather_start(Tensor[] shards, int[] offsets, int length, ScalarType dtype, int world_size, str group,"
    " int[] messages=[], int[] numels=[], bool custom=False) -> Tensor",
    Effect.START,
    "the buffer of a gathered bucket, its contents unknown until it is waited for",
    lambda shards, length, dtype, world_size: shards[0].new_empty([world_size * length], dtype=dtype),
)
all_gather_wait = _define_wait("all_gather_wait", Effect.WAIT, "the same buffer, gathered")
keep_shard = _define(
    "keep_shard(Tensor buffer, int[] offsets, int[] numels, int length, int world_size, int ranks, str group)"
    " -> Tensor",
    Effect.LOCAL,
    "a flat shard of a gathered bucket, over ``ranks`` ranks",
    lambda buffer, length, world_size, ranks: buffer.new_empty([length * world_size // ranks]),
)
free = _define(
    "free(Tensor(a!) buffer) -> ()", Effect.LOCAL, "nothing: the buffer's memory is given back", lambda: None
)
reduce_scatter_start = _define(
    "reduce_scatter_start(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1,"
    " int[] messages=[], bool custom=False, *, float? factor=None, bool summed=False, ScalarType? sent_as=None)"
    " -> Tensor",
    Effect.START,
    "the flat shard of the gradients' means, unknown until it is waited for",
    lambda grads, dtype, world_size, messages: grads[0].new_empty(
        reduced_offsets(grads, dtype, world_size, messages)[-1:], dtype=dtype
    ),
)
all_reduce_start = _define(
    "all_reduce_start(Tensor[] grads, ScalarType dtype, int world_size, str group, int replicas=1, *,"
    " float? factor=None, bool summed=False) -> Tensor",
    Effect.START,
    "the flat means of gradients, whole, unknown until they are waited for",
    lambda grads, dtype: grads[0].new_empty([sum(grad.numel() for grad in grads)], dtype=dtype),
)
all_reduce_shard_start = _define(
    "all_reduce_shard_start(Tensor(a!) shard, int ranks, str group, *, float? factor=None, bool summed=False)"
    " -> Tensor(a!)",
    Effect.START,
    "the same buffer: the mean over replicas, in place, unknown until it is waited for",
)
reduce_wait = _define_wait("reduce_wait", Effect.WAIT, "the same buffer, reduced")
accumulate_grad = _define(
    "accumulate_grad(Tensor grad, int[] shard_shape, ScalarType dtype, ScalarType reduce_dtype, str param,"
    " Device? device=None) -> Tensor",
    Effect.LOCAL,
    "no gradient: ``grad`` is added to what is kept",
    lambda grad, shard_shape, dtype, device: grad.new_empty(shard_shape, dtype=dtype, device=device),
)
update_shard = _define(
    "update_shard(Tensor grad, str param, bool last) -> Tensor",
    Effect.LOCAL,
    "no gradient: the optimizer gets ``grad``, and steps with ``last``, for all that it got",
    lambda grad: grad.new_empty(grad.shape),
)
mean_over_groups = _define(
    "mean_over_groups(Tensor(a!) buffer, str bucket) -> Tensor(a!)",
    Effect.LOCAL,
    "the same buffer: the mean over replica groups that come and go, each of which has a program of its own",
)
reduce_hook = _define(
    "reduce_hook(Tensor(a!) buffer, str unit) -> Tensor(a!)",
    Effect.LOCAL,
    "the same buffer, which a function of the user has seen",
)
reduce_payloads = _define(
    "reduce_payloads(Tensor[] values, str op, str group) -> Tensor",
    Effect.LOCAL,
    "what a tensor extension asks to be reduced, flat, one behind the other",
    lambda values: values[0].new_empty([sum(value.numel() for value in values)]),
)
offload_activation = _define(
    "offload_activation(Tensor value) -> Tensor",
    Effect.ACTIVATION_COPY,
    "a copy on the CPU, unknown until it is waited for",
    lambda value: torch.empty_like(value, device="cpu"),
)
activation_offloaded = _define(
    "activation_offloaded(Tensor(a!) host, Tensor value) -> Tensor(a!)",
    Effect.ACTIVATION_COPY,
    "the same copy, which is there; ``value`` may go",
)
reload_activation = _define(
    "reload_activation(Tensor host, Device device) -> Tensor",
    Effect.ACTIVATION_COPY,
    "a copy on the device, unknown until it is waited for",
    lambda host, device: torch.empty_like(host, device=device),
)
activation_reloaded = _define(
    "activation_reloaded(Tensor(a!) buffer, Tensor host) -> Tensor(a!)",
    Effect.ACTIVATION_COPY,
    "the same copy, which is there; ``host`` may go",
)
fetch_start = _define(
    "fetch_start(Tensor[] shards, int[] offsets, int length, Device device) -> Tensor",
    Effect.COPY_START,
    "flat shards: a copy on ``device``, unknown until it is waited for",
    lambda shards, length, device: shards[0].new_empty([length], device=device),
)
fetch_wait = _define_wait("fetch_wait", Effect.COPY_WAIT, "the same copy, which is there")
offload_start = _define(
    "offload_start(Tensor[] values, bool pin_memory) -> Tensor",
    Effect.COPY_START,
    "flat gradients: a copy on the CPU, unknown until it is waited for",
    lambda values: values[0].new_empty([sum(value.numel() for value in values)], device="cpu"),
)
offload_wait = _define_wait("offload_wait", Effect.COPY_WAIT, "the same copy, which is there")


def _with(*effects: Effect) -> frozenset[compat.OpOverload[..., Any]]:
    return frozenset(target for target, found in OPERATORS.items() if found.effect in effects)


STARTS, WAITS = _with(Effect.START), _with(Effect.WAIT)
COMMUNICATION = STARTS | WAITS
COPY_STARTS, COPY_WAITS = _with(Effect.COPY_START), _with(Effect.COPY_WAIT)
TRANSFER_STARTS, TRANSFER_WAITS = STARTS | COPY_STARTS, WAITS | COPY_WAITS  # of collectives and of copies
ACTIVATION_STARTS = (offload_activation, reload_activation)
ACTIVATION_WAITS = (activation_offloaded, activation_reloaded)
EXECUTED = OPERATORS.keys() - _with(Effect.TRACED)  # what the executor runs itself, between compute regions


def parameter_of(node: fx.Node) -> str:
    """Return the name of the parameter of a ``gather_param`` or a ``reduce_grad``."""
    return str(argument(node, "param"))


def with_parameter(target: Any, args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    """Return the arguments of a call; of a ``gather_param`` or a ``reduce_grad`` those for the parameter ``name``."""
    is_named = target is gather_param or target is reduce_grad
    return (*args[:_PARAM], name, *args[_PARAM + 1 :]) if is_named else args


_PARAM = list(defaults(gather_param)).index("param")  # of reduce_grad, too


def group_of(node: fx.Node) -> str:
    """Return the name of the process group of a collective."""
    return str(argument(node, "group"))


# Waits for a collective of the model's own, and gives the memory that it has filled.
MODEL_WAIT: Any = torch.ops._c10d_functional.wait_tensor.default


def is_model_collective(node: fx.Node) -> bool:
    """Say whether a node starts a collective of the model's own (of tensor, context or expert parallelism)."""
    return node.op == "call_function" and _is_of_model(node.target)


@functools.cache
def _is_of_model(target: Any) -> bool:
    namespace = getattr(target, "namespace", "")
    return namespace in ("_c10d_functional", "_c10d_functional_autograd") and target is not MODEL_WAIT


def wait_of(start: fx.Node) -> fx.Node:
    """Return the node that waits for a collective or a copy."""
    waits = (*ACTIVATION_WAITS, MODEL_WAIT)
    return next(user for user in start.users if user.target in TRANSFER_WAITS or user.target in waits)


def chunk_numels(grads: Sequence[Tensor], world_size: int) -> list[int]:
    """Return the number of elements of each gradient's (padded) chunk. A size that is traced as an expression of
    inputs' sizes is that of the parameter."""
    return [-(-int(g.shape[0]) // world_size) * math.prod(map(int, g.shape[1:])) for g in grads]


def aligned(numel: int, dtype: torch.dtype) -> int:
    """Round ``numel`` up to a multiple of ALIGNMENT bytes."""
    step = max(1, ALIGNMENT // dtype.itemsize)
    return -(-numel // step) * step


def reduced_offsets(grads: Sequence[Tensor], dtype: torch.dtype, world_size: int, messages: Sequence[int]) -> list[int]:
    """Return the element at which each gradient's shard starts in what a reduction yields, and the last end."""
    numels = iter(chunk_numels(grads, world_size))
    offsets, end = [], 0
    for count in messages or [len(grads)]:
        end = aligned(end, dtype)
        for numel in itertools.islice(numels, count):
            offsets.append(end)
            end += numel
    return [*offsets, end]


def is_sent_as_it_is(grad: Tensor, dtype: torch.dtype, world_size: int) -> bool:
    """Say whether the gradient, alone in its message, is reduced from where it lies."""
    return grad.dtype is dtype and grad.shape[0] % world_size == 0 and grad.is_contiguous()


# --- autograd: reductions are born here


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shard, _, _, ctx.reduce_dtype, *names = inputs  # param, group, and what else is given
    ctx.shard_shape, ctx.dtype, ctx.given = list(shard.shape), shard.dtype, len(inputs)
    ctx.names = [*names[:3], *(shard.device for device in names[3:] if device is not None)]


def _gather_param_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shard_grad = reduce_grad(grad, ctx.shard_shape, ctx.dtype, ctx.reduce_dtype, *ctx.names)
    return shard_grad, *([None] * (ctx.given - 1))


torch.library.register_autograd(gather_param, _gather_param_backward, setup_context=_setup_context, lib=_LIBRARY)
