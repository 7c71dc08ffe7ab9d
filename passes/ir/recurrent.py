"""Recurrent layers (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``) as one operator each, whatever the length of the sequence.

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
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import define

aten = torch.ops.aten
KINDS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_LAYER = (
    "str kind, Tensor input, Tensor? batch_sizes, Tensor[] state, Tensor[] weights, bool biases, bool bidirectional"
)


def _run(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    train: bool,
) -> tuple[Tensor, ...]:
    hidden = list(state) if kind == "lstm" else state[0]
    given = weights, biases, 1, 0.0, train, bidirectional
    if batch_sizes is None:
        outputs = getattr(aten, kind).input(input, hidden, *given, False)
    else:
        outputs = getattr(aten, kind).data(input, batch_sizes, hidden, *given)
    return tuple(outputs)


def _layer(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    given = [weight.detach().requires_grad_(train) for weight in weights]  # which says which of its kernels oneDNN runs
    with torch.set_grad_enabled(train):
        outputs = _run(kind, input, batch_sizes, state, given, biases, bidirectional, train)
    output, h_n, *c_n = (value.detach().contiguous() for value in outputs)
    return output, h_n, c_n[0] if c_n else input.new_empty(0)


def _fake_layer(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: bool,
    bidirectional: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    width = state[0].shape[-1] * (2 if bidirectional else 1)
    output = input.new_empty([*input.shape[:-1], width])
    return output, *(input.new_empty(value.shape) for value in state), *[input.new_empty(0)] * (2 - len(state))


def _layer_backward(
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    *layer: Any,
) -> list[Tensor]:
    given = [value.detach().requires_grad_(need) for value, need in zip((input, *state, *weights), needed, strict=True)]
    first, states = given[0], given[1 : 1 + len(state)]
    with torch.enable_grad():
        outputs = _run(kind, first, batch_sizes, states, given[1 + len(state) :], *layer, True)
    wanted = [value for value in given if value.requires_grad]
    found = torch.autograd.grad(outputs, wanted, list(grads[: len(outputs)]))
    return [value.contiguous() for value in found]


def _fake_layer_backward(
    grads: Sequence[Tensor],
    needed: Sequence[bool],
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    *layer: Any,
) -> list[Tensor]:
    given = zip((input, *state, *weights), needed, strict=True)
    return [value.new_empty(value.shape) for value, need in given if need]


recurrent_layer = define(
    _LIBRARY,
    f"recurrent_layer({_LAYER}, bool train) -> (Tensor, Tensor, Tensor)",
    _fake_layer,
    CompositeExplicitAutograd=_layer,
)
recurrent_layer_backward = define(
    _LIBRARY,
    f"recurrent_layer_backward(Tensor[] grads, bool[] needed, {_LAYER}) -> Tensor[]",
    _fake_layer_backward,
    CompositeExplicitAutograd=_layer_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.kind, input, batch_sizes, state, weights, *ctx.layer, _ = inputs
    ctx.states = len(state)
    ctx.save_for_backward(input, batch_sizes, *state, *weights)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
    input, batch_sizes, *others = ctx.saved_tensors
    state, weights = others[: ctx.states], others[ctx.states :]
    _, of_input, _, of_state, of_weights, *_ = ctx.needs_input_grad
    needed = [of_input, *of_state, *of_weights]
    found = iter(recurrent_layer_backward(grads, needed, ctx.kind, input, batch_sizes, state, weights, *ctx.layer))
    given = [next(found) if need else None for need in needed]
    return None, given[0], None, given[1 : 1 + ctx.states], given[1 + ctx.states :], None, None, None


@register_flop_formula(torch.ops.graph_fsdp.recurrent_layer)
def _flops(kind: str, input: Any, batch_sizes: Any, state: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    """Count those of the products of all steps."""
    return 2 * math.prod(input[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


@register_flop_formula(torch.ops.graph_fsdp.recurrent_layer_backward)
def _flops_of_backward(grads: Any, needed: Any, *layer: Any, **_: Any) -> int:
    return 3 * _flops(*layer)  # the forward once more


torch.library.register_autograd(recurrent_layer, _backward, setup_context=_setup_context, lib=_LIBRARY)


def _layers(
    kind: str,
    input: Tensor,
    batch_sizes: Tensor | None,
    hidden: Any,
    weights: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """Run layers with dropout between them."""
    states = tuple(hidden) if kind == "lstm" else (hidden,)
    dtype, result = _autocast(kind, input)
    input, *cast = (value.to(dtype) for value in (input, *states, *weights))
    states, weights = cast[: len(states)], cast[len(states) :]
    directions, each = (2 if bidirectional else 1), len(weights) // layers
    differentiated = torch.is_grad_enabled() and any(value.requires_grad for value in (input, *states, *weights))
    ends: list[Sequence[Tensor]] = []
    for i in range(layers):
        state = [value[directions * i : directions * (i + 1)] for value in states]
        of_layer = weights[each * i : each * (i + 1)]
        input, *end = recurrent_layer(kind, input, batch_sizes, state, of_layer, biases, bidirectional, differentiated)
        ends.append(end[: len(states)])
        if dropout and train and i < layers - 1:
            input = torch.dropout(input, dropout, train=True)
    return input.to(result), *(torch.cat(values).to(result) for values in zip(*ends, strict=True))


def _autocast(kind: str, input: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes in which autocast wants layers to be run and to return: on CPUs ``nn.GRU`` returns its own."""
    device = input.device.type
    if not torch.is_autocast_enabled(device) or input.dtype is torch.float64:
        return input.dtype, input.dtype
    dtype = torch.get_autocast_dtype(device)
    return dtype, input.dtype if kind == "gru" and device == "cpu" else dtype


def _of_sequences(kind: str, input: Tensor, hidden: Any, *layers: Any) -> tuple[Tensor, ...]:
    """Stand for ``aten.lstm.input`` and its like."""
    *layers, batch_first = layers
    if not batch_first:
        return _layers(kind, input, None, hidden, *layers)
    output, *ends = _layers(kind, input.transpose(0, 1), None, hidden, *layers)
    return output.transpose(0, 1), *ends


def _of_packed(kind: str, data: Tensor, batch_sizes: Tensor, hidden: Any, *layers: Any) -> tuple[Tensor, ...]:
    """Stand for ``aten.lstm.data`` and its like, of a ``PackedSequence``."""
    return _layers(kind, data, batch_sizes, hidden, *layers)


# What is traced in place of an operator of torch.
TRACED: dict[compat.OpOverload[..., Any], Callable[..., Any]] = {
    overload: functools.partial(function, kind)
    for kind in KINDS
    for overload, function in ((getattr(aten, kind).input, _of_sequences), (getattr(aten, kind).data, _of_packed))
}
