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

from graph_fsdp import compat
from graph_fsdp.passes.ir.effects import draws, mutated_inputs

_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_LIBRARY.define("repeat(Tensor[] inputs, int trace, int call) -> Tensor[]")
_LIBRARY.define("repeat_backward(Tensor[] gradients, int trace, int call) -> Tensor[]")
repeat = torch.ops.graph_fsdp.repeat.default
repeat_backward = torch.ops.graph_fsdp.repeat_backward.default


class NotRepeatable(BaseException):  # AOTAutograd retells every Exception as one of its own
    """A layer does not repeat the trace of another, although it looked like it. The message says why, ``call`` which
    layer, by the index of its call, where it is a single one."""

    def __init__(self, reason: str, call: int | None = None) -> None:
        super().__init__(reason)
        self.call = call


@dataclass
class Trace:
    """What AOTAutograd made of a layer. ``forward`` and ``backward`` are the nodes of ``module``, without its inputs,
    that are computed in either.

    ``inputs``: placeholders for the layer's inputs; ``tangents``: for the gradients of those ``outputs`` that are
    ``differentiable``. ``gradients``: per input the node, or None where it needs none. ``prepared``: for the backend,
    and not to be prepared again where it is put in.
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
    prepared: bool

    @property
    def found_gradients(self) -> list[fx.Node]:
        """What ``repeat_backward`` returns."""
        return [node for node in self.gradients if node is not None]


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
    try:
        module, forward_outputs = compat.traced_by_aot_autograd(function, arguments, decompositions)
    except Exception as error:  # a wrong model is told so when it is traced whole
        raise NotRepeatable(f"by itself it is an error: {error}") from error
    if forward_outputs != len(differentiable):
        raise NotRepeatable("it writes to its inputs, or returns views of what it computes")
    prepared = not any(map(draws, module.graph.nodes))  # a backend may make one seed per graph, and number the draws
    if prepared:
        module = prepare(module)
    nodes = list(module.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs, tangents = placeholders[: len(arguments)], placeholders[len(arguments) :]
    (returned,) = nodes[-1].args
    outputs, gradients = returned[:forward_outputs], returned[forward_outputs:] or [None] * len(inputs)
    _check(nodes, inputs, outputs)
    if len(gradients) != len(inputs) or len(tangents) not in (0, sum(differentiable)):
        raise NotRepeatable("it has other gradients than those of its outputs for its inputs")
    forward, backward = _divide(nodes, tangents)
    return Trace(index, module, inputs, tangents, forward, backward, outputs, differentiable, gradients, prepared)


def _check(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
    for node in nodes:
        if node.op == "call_module" or isinstance(node.target, compat.HigherOrderOperator):
            raise NotRepeatable(f"{node.target} is no operator")
        if mutated_inputs(node):
            raise NotRepeatable(f"{node} writes to its input")
    if not all(isinstance(node, fx.Node) and isinstance(node.meta["val"], Tensor) for node in outputs):
        raise NotRepeatable("it returns what is no tensor")
    given = {compat.storage_id(node.meta["val"]) for node in inputs}
    returned = {compat.storage_id(node.meta["val"]) for node in outputs}
    if len(returned) < len(outputs) or not returned.isdisjoint(given):
        raise NotRepeatable("it returns views of its inputs or of one value")


def _divide(nodes: list[fx.Node], tangents: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    of_gradients = set(tangents)  # what a backend has put in is known by what it reads alone
    forward, backward = [], []
    for node in nodes:
        if node.op in ("placeholder", "output"):
            continue
        if compat.is_of_backward(node) or not of_gradients.isdisjoint(node.all_input_nodes):
            of_gradients.add(node)
            backward.append(node)
        else:
            forward.append(node)
    return forward, backward


# How a layer is called while the model around it is traced

_registered: dict[int, Trace] = {}
_failures: list[NotRepeatable] = []


@contextmanager
def registered(traces: Sequence[Trace]) -> Iterator[None]:
    """For a time, ``repeat`` and ``repeat_backward`` know these traces."""
    _registered.update((trace.index, trace) for trace in traces)
    try:
        yield
    finally:
        _registered.clear()
        _failures.clear()


def raise_failures() -> None:
    """Raise the NotRepeatable of the first layer whose gradients the trace does not compute."""
    if _failures:
        raise _failures[0]


def call(trace_index: int, call_index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _LayerCall.apply(trace_index, call_index, *inputs)
    return outputs


class _LayerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trace_index: int, call_index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.trace, ctx.call = _registered[trace_index], call_index
        ctx.set_materialize_grads(False)
        outputs = repeat(inputs, trace_index, call_index)
        pairs = zip(outputs, ctx.trace.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        ctx.versions = [(tensor, tensor._version) for tensor in (*inputs, *outputs)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Which of its inputs and outputs a layer has saved, the trace does not say.
        given = [g for g, differentiable in zip(gradients, ctx.trace.differentiable, strict=True) if differentiable]
        failure = None
        if any(tensor._version != version for tensor, version in ctx.versions):
            failure = "an input or output of it is written to behind it"
        elif any(gradient is None for gradient in given):
            failure = "an output of it has no gradient"
        if failure is not None:  # not raised here: autograd would warn of it
            _failures.append(NotRepeatable(failure, ctx.call))
            return (None,) * (2 + len(ctx.trace.gradients))
        found = iter(repeat_backward(given, ctx.trace.index, ctx.call))
        return None, None, *(None if node is None else next(found) for node in ctx.trace.gradients)


@torch.library.register_fake("graph_fsdp::repeat", lib=_LIBRARY)
def _(inputs: Sequence[Tensor], trace: int, call: int) -> list[Tensor]:
    return [_like(node) for node in _registered[trace].outputs]


@torch.library.register_fake("graph_fsdp::repeat_backward", lib=_LIBRARY)
def _(gradients: Sequence[Tensor], trace: int, call: int) -> list[Tensor]:
    return [_like(node) for node in _registered[trace].found_gradients]


def _like(node: fx.Node) -> Tensor:
    value = node.meta["val"]
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
