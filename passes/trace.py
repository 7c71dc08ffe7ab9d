"""The trace of one of several equal layers, and the operators that stand for them while the model around is traced.

A layer is called as ``repeat`` on its inputs and differentiated as ``repeat_backward`` on the gradients of its outputs.
Neither is ever run: what they compute is the trace, which takes their places (``repeat.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.passes import compat
from graph_fsdp.passes.graph import mutated_inputs

_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_LIBRARY.define("repeat(Tensor[] inputs, int trace, int call) -> Tensor[]")
_LIBRARY.define("repeat_backward(Tensor[] gradients, int trace, int call) -> Tensor[]")
repeat = torch.ops.graph_fsdp.repeat.default
repeat_backward = torch.ops.graph_fsdp.repeat_backward.default


class NotRepeatable(BaseException):  # AOTAutograd retells every Exception as one of its own
    """A layer does not repeat the trace of another, although it looked like it."""


@dataclass
class Trace:
    """``forward`` and ``backward`` are the nodes of ``module``, without its inputs, that are computed in either.

    ``inputs``: placeholders for the layer's inputs; ``tangents``: for the gradients of those ``outputs`` that are
    ``differentiable``. ``gradients``: per input the node, or None where it needs none. ``random``: it draws random
    numbers.
    """

    index: int
    module: fx.GraphModule
    inputs: list[fx.Node]
    tangents: list[fx.Node]
    forward: list[fx.Node]
    backward: list[fx.Node]
    outputs: list[fx.Node]
    differentiable: list[bool]
    gradients: list[fx.Node | None]
    random: bool


_registered: dict[int, Trace] = {}  # those that are in use while a model is traced


@contextmanager
def registered(traces: Sequence[Trace]) -> Iterator[None]:
    """For a time, ``repeat`` and ``repeat_backward`` know these traces."""
    _registered.update((trace.index, trace) for trace in traces)
    try:
        yield
    finally:
        for trace in traces:
            del _registered[trace.index]


def trace(
    index: int,
    function: fx.GraphModule,
    arguments: list[Tensor],
    differentiable: list[bool],
    prepare: Callable[[fx.GraphModule], fx.GraphModule],
    decompositions: dict[Any, Callable[..., Any]] | None,
) -> Trace:
    """Trace ``function`` on fake ``arguments``; with its gradients where AOTAutograd would.

    Raises:
        NotRepeatable: it writes to its inputs, returns views of them, or has something in it that is not an operator.
    """
    module, forward_outputs = compat.traced_by_aot_autograd(function, arguments, decompositions)
    if forward_outputs != len(differentiable):
        raise NotRepeatable("it has results that it does not return")
    random = any(map(_draws, module.graph.nodes))
    if not random:  # preparation replaces random operators in ways that do not bear repetition
        module = prepare(module)
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs, tangents = placeholders[: len(arguments)], placeholders[len(arguments) :]
    (returned,) = nodes[-1].args
    outputs, gradients = returned[:forward_outputs], returned[forward_outputs:] or [None] * len(inputs)
    _check(nodes, inputs, outputs)
    if gradients and len(tangents) not in (0, sum(differentiable)):
        raise NotRepeatable("it has other gradients than those of its outputs")
    forward, backward = _divide(nodes, outputs, tangents)
    return Trace(index, module, inputs, tangents, forward, backward, outputs, differentiable, gradients, random)


def _check(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
    for node in nodes:
        if node.op == "call_module" or isinstance(node.target, compat.HigherOrderOperator):
            raise NotRepeatable(f"{node.target} is no operator")
        if mutated_inputs(node):
            raise NotRepeatable(f"{node} writes to its input")
    if not all(isinstance(node, fx.Node) and isinstance(node.meta["val"], torch.Tensor) for node in outputs):
        raise NotRepeatable("it returns what is no tensor")
    memories = [compat.storage_id(node.meta["val"]) for node in [*inputs, *outputs]]
    if len(set(memories[len(inputs) :])) < len(outputs) or not set(memories[: len(inputs)]).isdisjoint(
        memories[len(inputs) :]
    ):
        raise NotRepeatable("it returns views of its inputs or of one value")


def _draws(node: fx.Node) -> bool:
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    if "dropout_p" not in names:
        return True
    index = names.index("dropout_p")  # attention
    return bool(node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0.0))


def _divide(
    nodes: list[fx.Node], outputs: list[fx.Node], tangents: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """What comes before the last output was traced in forward, what comes behind it in backward."""
    positions = {node: index for index, node in enumerate(nodes)}
    last = max((positions[node] for node in outputs), default=0)
    of_gradients = set(tangents)
    forward, backward = [], []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if positions[node] > last or not of_gradients.isdisjoint(node.all_input_nodes):
            of_gradients.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return forward, backward


# How a layer is called while the model around it is traced


def call(trace_index: int, call_index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    return _Call.apply(trace_index, call_index, *inputs)  # type: ignore[no-any-return,no-untyped-call]


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trace_index: int, call_index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.trace, ctx.call = _registered[trace_index], call_index
        ctx.set_materialize_grads(False)
        outputs = repeat(inputs, trace_index, call_index)
        pairs = zip(outputs, ctx.trace.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [g for g, differentiable in zip(gradients, ctx.trace.differentiable, strict=True) if differentiable]
        if any(gradient is None for gradient in given):
            raise NotRepeatable("an output of it has no gradient")
        found = iter(repeat_backward(given, ctx.trace.index, ctx.call))
        return None, None, *(None if node is None else next(found) for node in ctx.trace.gradients)


@torch.library.register_fake("graph_fsdp::repeat", lib=_LIBRARY)
def _(inputs: Sequence[Tensor], trace: int, call: int) -> list[Tensor]:
    return [_like(node) for node in _registered[trace].outputs]


@torch.library.register_fake("graph_fsdp::repeat_backward", lib=_LIBRARY)
def _(gradients: Sequence[Tensor], trace: int, call: int) -> list[Tensor]:
    return [_like(node) for node in _registered[trace].gradients if node is not None]


def _like(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
