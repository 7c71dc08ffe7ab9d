"""Recurrent layers (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``) are one operator each, whatever the length of the sequence.

torch traces them step by step: a graph, and the time to compile it, grow with the length, each length has a graph of
its own, and the dropout between layers is left out (``num_layers < i - 1`` in ``torch._decomp``). ``recurrent_layer``
runs the layer that eager PyTorch runs, oneDNN's or cuDNN's where there is one. What such a layer saves for its backward
has no shape that a graph could know, so the backward runs the layer again: a graph saves a layer's inputs only.

| operator | meaning |
|---|---|
| ``recurrent_layer(kind, input, batch_sizes, state, weights, …)`` | output, ``h_n`` and ``c_n`` |
| ``recurrent_layer_backward(grads, needed, kind, …)`` | gradients of those of input, state and weights that need one |

``input`` is ``[length, batch, features]``, or ``[rows, features]`` of a ``PackedSequence`` with its ``batch_sizes``.
``state`` is ``[h_0]``, of an LSTM ``[h_0, c_0]``; the ``c_n`` of others is empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import define

aten = torch.ops.aten
KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_TAG = torch.Tag.flexible_layout  # without it nodes keep values of eager mode, and programs are not kept
_LAYER = (
    "str kind, Tensor input, Tensor? batch_sizes, Tensor[] state, Tensor[] weights, bool biases, bool bidirectional"
)


class _Layer(NamedTuple):
    kind: str
    input: Tensor
    batch_sizes: Tensor | None
    state: Sequence[Tensor]
    weights: Sequence[Tensor]
    biases: bool
    bidirectional: bool

    @property
    def values(self) -> list[Tensor]:
        """What may need a gradient."""
        return [self.input, *self.state, *self.weights]

    def of_values(self, values: Sequence[Any]) -> _Layer:
        end = 1 + len(self.state)
        return self._replace(input=values[0], state=values[1:end], weights=values[end:])

    def run(self, train: bool) -> tuple[Tensor, ...]:
        hidden = list(self.state) if self.kind == "lstm" else self.state[0]
        given = hidden, self.weights, self.biases, 1, 0.0, train, self.bidirectional
        if self.batch_sizes is None:
            outputs = getattr(aten, self.kind).input(self.input, *given, False)
        else:
            outputs = getattr(aten, self.kind).data(self.input, self.batch_sizes, *given)
        return tuple(outputs)


def _run_layer(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    *described, train = given
    layer = _Layer(*described)
    weights = [weight.detach().requires_grad_(train) for weight in layer.weights]  # which say what oneDNN runs
    with torch.set_grad_enabled(train):
        outputs = layer._replace(weights=weights).run(train)
    output, h_n, *c_n = (value.detach().contiguous() for value in outputs)
    return output, h_n, c_n[0] if c_n else output.new_empty(0)


def _fake_layer(*given: Any) -> tuple[Tensor, ...]:
    *described, _ = given
    layer = _Layer(*described)
    width = layer.state[0].shape[-1] * (2 if layer.bidirectional else 1)
    shapes = [[*layer.input.shape[:-1], width], *(value.shape for value in layer.state)]
    return tuple(layer.input.new_empty(shape) for shape in (*shapes, [0])[:3])


def _run_backward(grads: Sequence[Tensor], needed: Sequence[bool], *described: Any) -> list[Tensor]:
    layer = _Layer(*described)
    values = [value.detach().requires_grad_(need) for value, need in zip(layer.values, needed, strict=True)]
    with torch.enable_grad():
        outputs = layer.of_values(values).run(train=True)
    found = torch.autograd.grad(outputs, [v for v in values if v.requires_grad], list(grads[: len(outputs)]))
    return [value.contiguous() for value in found]


def _fake_backward(grads: Sequence[Tensor], needed: Sequence[bool], *described: Any) -> list[Tensor]:
    values = zip(_Layer(*described).values, needed, strict=True)
    return [value.new_empty(value.shape) for value, need in values if need]


recurrent_layer = define(
    _LIBRARY,
    f"recurrent_layer({_LAYER}, bool train) -> (Tensor, Tensor, Tensor)",
    _fake_layer,
    _TAG,
    CompositeExplicitAutograd=_run_layer,
)
recurrent_layer_backward = define(
    _LIBRARY,
    f"recurrent_layer_backward(Tensor[] grads, bool[] needed, {_LAYER}) -> Tensor[]",
    _fake_backward,
    _TAG,
    CompositeExplicitAutograd=_run_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *described, _ = inputs
    layer = _Layer(*described)
    ctx.layer = layer.of_values([None] * len(layer.values))._replace(batch_sizes=None)
    ctx.save_for_backward(layer.batch_sizes, *layer.values)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    batch_sizes, *values = ctx.saved_tensors
    layer = ctx.layer.of_values(values)._replace(batch_sizes=batch_sizes)
    needed = _Layer(*ctx.needs_input_grad[:-1]).values
    found = iter(recurrent_layer_backward(grads, needed, *layer))
    of = layer.of_values([next(found) if need else None for need in needed])
    return None, of.input, None, of.state, of.weights, None, None, None


@register_flop_formula(torch.ops.graph_fsdp.recurrent_layer)
def _flops(kind: str, input: Any, batch_sizes: Any, state: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    """Count those of the products of all steps."""
    per_step: int = sum(2 * math.prod(weight) for weight in weights if len(weight) == 2)
    rows: int = math.prod(input[:-1])
    return rows * per_step


@register_flop_formula(torch.ops.graph_fsdp.recurrent_layer_backward)
def _flops_of_backward(grads: Any, needed: Any, *layer: Any, **_: Any) -> int:
    return 3 * _flops(*layer)  # the forward once more


torch.library.register_autograd(recurrent_layer, _backward, setup_context=_setup_context, lib=_LIBRARY)


def _layers(every: _Layer, layers: int, dropout: float) -> tuple[Tensor, ...]:
    """Run layers with dropout between them. ``every``: has the states and weights of all."""
    differentiated = torch.is_grad_enabled() and any(value.requires_grad for value in every.values)
    dtype, result = _autocast(every.kind, every.input)
    every = every.of_values([value.to(dtype) for value in every.values])
    directions, each = (2 if every.bidirectional else 1), len(every.weights) // layers
    output, ends = every.input, []
    for i in range(layers):
        state = [value[directions * i : directions * (i + 1)] for value in every.state]
        layer = every._replace(input=output, state=state, weights=every.weights[each * i : each * (i + 1)])
        output, *end = recurrent_layer(*layer, differentiated)
        ends.append(end[: len(state)])
        if dropout and i < layers - 1:
            output = torch.dropout(output, dropout, train=True)
    return output.to(result), *(torch.cat(values).to(result) for values in zip(*ends, strict=True))


def _autocast(kind: str, input: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which autocast wants layers to be run and to return: on CPUs ``nn.GRU`` returns its own."""
    device = input.device.type
    if not torch.is_autocast_enabled(device) or input.dtype is torch.float64:
        return input.dtype, input.dtype
    dtype = torch.get_autocast_dtype(device)
    return dtype, input.dtype if kind == "gru" and device == "cpu" else dtype


def _of_sequences(kind: str, input: Tensor, hidden: Any, *given: Any) -> tuple[Tensor, ...]:
    """Stand for ``aten.lstm.input`` and its like."""
    *packed, batch_first = given
    if not batch_first:
        return _of_packed(kind, input, None, hidden, *packed)
    output, *ends = _of_packed(kind, input.transpose(0, 1), None, hidden, *packed)
    return output.transpose(0, 1), *ends


def _of_packed(kind: str, data: Tensor, batch_sizes: Tensor | None, hidden: Any, *given: Any) -> tuple[Tensor, ...]:
    """Stand for ``aten.lstm.data`` and its like, of a ``PackedSequence``."""
    weights, biases, layers, dropout, train, bidirectional = given
    state = hidden if kind == "lstm" else [hidden]
    every = _Layer(kind, data, batch_sizes, state, weights, biases, bidirectional)
    return _layers(every, layers, dropout if train else 0.0)


# What is traced in place of an operator of torch.
TRACED: dict[compat.OpOverload[..., Any], Callable[..., Any]] = {
    overload: functools.partial(function, kind)
    for kind in KINDS
    for overload, function in ((getattr(aten, kind).input, _of_sequences), (getattr(aten, kind).data, _of_packed))
}
