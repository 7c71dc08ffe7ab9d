"""One of several equal layers is traced, and operators stand for all while the model around is traced.

Layers that follow each other are called as ``repeat`` on their inputs and differentiated as ``repeat_backward`` on the
gradients of the last one's outputs; both are told which call it is. Neither is ever run: traces take their places
(``repeat.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.effects import draws, mutated_inputs
from graph_fsdp.passes.ir.operands import define
from graph_fsdp.passes.repeat.segments import NotRepeatable, Segment

_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
repeat = define(
    _LIBRARY, "repeat(Tensor[] inputs, int call) -> Tensor[]", lambda inputs, call: _values(CALLED[call].outputs)
)
repeat_backward = define(
    _LIBRARY,
    "repeat_backward(Tensor[] gradients, int call) -> Tensor[]",
    lambda gradients, call: _values([node for node in CALLED[call].gradients if node is not None]),
)

Prepare = Callable[[fx.GraphModule], fx.GraphModule]
Decompositions = dict[Any, Callable[..., Any]] | None


@dataclass
class Trace:
    """Holds what AOTAutograd made of ``segment``: ``forward`` and ``backward`` are the computed nodes of ``module``.

    ``inputs``: placeholders for the layer's inputs; ``tangents``: for the gradients of those ``outputs`` that are
    ``differentiable``. ``gradients``: per input the node, or None where it needs none. ``prepared``: for the backend,
    and not to be prepared again where it is put in. ``failures``: of layers whose gradients it does not compute.
    """

    index: int
    segment: Segment
    module: fx.GraphModule
    inputs: list[fx.Node]
    tangents: list[fx.Node]
    forward: list[fx.Node]
    backward: list[fx.Node]
    outputs: list[fx.Node]
    differentiable: list[bool]
    gradients: list[fx.Node | None]
    prepared: bool
    failures: list[NotRepeatable] = field(default_factory=list)


def trace(
    index: int, segment: Segment, module: fx.GraphModule, prepare: Prepare, decompositions: Decompositions
) -> Trace:
    """Trace a segment of Dynamo's ``module``, with its gradients where AOTAutograd would.

    Raises:
        NotRepeatable: it writes to its inputs, returns views of them, or has something in it that is not an operator.
    """
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in segment.inputs}
    for node in segment.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in segment.outputs))
    with compat.current_fake_mode():
        given = [node.meta["example_value"] for node in segment.inputs]
        arguments = [_like(value).requires_grad_(value.requires_grad) for value in given]
    differentiable = [node.meta["example_value"].requires_grad for node in segment.outputs]
    try:
        traced = compat.traced_by_aot_autograd(fx.GraphModule(module, graph), arguments, decompositions)
    except Exception as error:  # a wrong model is told so when it is traced whole
        raise NotRepeatable(f"by itself it is an error: {error}") from error
    module, forward_outputs = traced
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
    computed = _divide(nodes, tangents)
    return Trace(index, segment, module, inputs, tangents, *computed, outputs, differentiable, gradients, prepared)


def _check(nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node]) -> None:
    for node in nodes:
        if node.op == "call_module" or isinstance(node.target, compat.HigherOrderOperator):
            raise NotRepeatable(f"{node.target} is no operator")
        if mutated_inputs(node):
            raise NotRepeatable(f"{node} writes to its input")
    if reason := why_no_values_of_its_own(inputs, outputs):
        raise NotRepeatable(reason)


def why_no_values_of_its_own(inputs: Sequence[fx.Node], outputs: Sequence[Any]) -> str:
    """Say why the outputs of a graph are not tensors in memory of their own, each another's; "" where they are."""
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
    if not all(isinstance(value, Tensor) for value in values):
        return "it returns what is no tensor"
    given = {compat.storage_id(n.meta["val"]) for n in inputs if isinstance(n.meta.get("val"), Tensor)}
    returned = set(map(compat.storage_id, values))
    own = len(returned) == len(values) and returned.isdisjoint(given)
    return "" if own else "it returns views of its inputs or of one value"


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


# How layers are called while the model around them is traced


class Called(Protocol):
    """Says what a call computes: the nodes of its ``outputs``, those that are ``differentiable``, and per input that of
    its gradient, or None where it needs none. ``fail`` notes why traces cannot take the call's place: because of its
    input of a number, or of its outputs, None."""

    @property
    def outputs(self) -> Sequence[fx.Node]: ...

    @property
    def differentiable(self) -> Sequence[bool]: ...

    @property
    def gradients(self) -> Sequence[fx.Node | None]: ...

    def fail(self, reason: str, which: int | None = None) -> None: ...


CALLED: dict[int, Called] = {}  # by the index of a call


@contextlib.contextmanager
def called(calls: Mapping[int, Called]) -> Iterator[None]:
    """Let ``repeat`` and ``repeat_backward`` know what calls stand for, by index, and nothing else."""
    before = dict(CALLED)
    try:
        CALLED.clear()
        CALLED.update(calls)
        yield
    finally:
        CALLED.clear()
        CALLED.update(before)


def call(index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    outputs: tuple[Tensor, ...] = _LayerCall.apply(index, *inputs)
    return outputs


class _LayerCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, index: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.called, ctx.call = CALLED[index], index
        ctx.set_materialize_grads(False)
        outputs = repeat(inputs, index)
        pairs = zip(outputs, ctx.called.differentiable, strict=True)
        ctx.mark_non_differentiable(*(output for output, differentiable in pairs if not differentiable))
        ctx.versions = [(tensor, tensor._version) for tensor in (*inputs, *outputs)]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Which of its inputs and outputs a layer has saved, the trace does not say.
        called = ctx.called
        given = [g for g, differentiable in zip(gradients, called.differentiable, strict=True) if differentiable]
        written = [place for place, (tensor, version) in enumerate(ctx.versions) if tensor._version != version]
        if written or any(gradient is None for gradient in given):  # not raised here: autograd would warn of it
            if written:
                which = written[0] if written[0] < len(called.gradients) else None
                called.fail("an input or output of it is written to behind it", which)
            else:
                called.fail("an output of it has no gradient")
            return (None,) * (1 + len(called.gradients))
        found = iter(repeat_backward(given, ctx.call))
        return None, *(None if node is None else next(found) for node in called.gradients)


def _values(nodes: Sequence[fx.Node]) -> list[Tensor]:
    mode = compat.current_fake_mode()
    values = [node.meta["val"] for node in nodes]
    return [compat.fake_tensor(mode, v.shape, v.stride(), v.dtype, v.device, None, 0) for v in values]


def _like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
