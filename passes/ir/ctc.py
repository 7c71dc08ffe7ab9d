"""``ctc_loss`` is one operator here: torch's saves for its backward what has no shape that a graph could know.

| operator | meaning |
|---|---|
| ``ctc_loss(log_probs, targets, input_lengths, …)`` | the loss of each sequence |
| ``ctc_loss_backward(grad, log_probs, targets, …)`` | the gradient of ``log_probs``; it computes the loss again |

``log_probs`` is ``[length, batch, classes]``, the loss ``[batch]``; of one sequence ``[length, classes]`` and ``[]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp import compat
from graph_fsdp.passes.ir.operands import define

aten = torch.ops.aten
_LIBRARY = torch.library.Library("graph_fsdp", "FRAGMENT")
_GIVEN = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, SymInt blank, bool zero_infinity"
)
_NONE, _MEAN = 0, 1  # reductions; 2 is the sum


def _run(log_probs: Tensor, *given: Any) -> Tensor:
    *tensors, blank, zero_infinity = given
    loss: Tensor = aten.ctc_loss.Tensor(log_probs, *tensors, blank, _NONE, zero_infinity)
    return loss


def _fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


def _run_backward(grad: Tensor, log_probs: Tensor, *given: Any) -> Tensor:
    log_probs = log_probs.detach().requires_grad_()
    with torch.enable_grad():
        loss = _run(log_probs, *given)
    (found,) = torch.autograd.grad(loss, log_probs, grad)
    return found.contiguous()


def _fake_backward(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


# Without the first, nodes keep values of eager mode, and programs are not kept; the host waits for the lengths.
_TAGS = torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe

ctc_loss = define(_LIBRARY, f"ctc_loss({_GIVEN}) -> Tensor", _fake, *_TAGS, CompositeExplicitAutograd=_run)
ctc_loss_backward = define(
    _LIBRARY,
    f"ctc_loss_backward(Tensor grad, {_GIVEN}) -> Tensor",
    _fake_backward,
    *_TAGS,
    CompositeExplicitAutograd=_run_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    found = ctc_loss_backward(grad, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity)
    return found, None, None, None, None, None


torch.library.register_autograd(ctc_loss, _backward, setup_context=_setup_context, lib=_LIBRARY)


def _reduced(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Stand for ``aten.ctc_loss``, whose lengths are a tensor each, or lists of numbers."""
    inputs, goals = map(_as_tensor, (input_lengths, target_lengths))
    loss: Tensor = ctc_loss(log_probs, targets, inputs, goals, blank, zero_infinity)
    if reduction == _NONE:
        return loss
    return (loss / goals.to(loss).clamp_min(1)).mean() if reduction == _MEAN else loss.sum()


def _as_tensor(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)


# What is traced in place of an operator of torch.
TRACED: dict[compat.OpOverload[..., Any], Callable[..., Any]] = {
    aten.ctc_loss.Tensor: _reduced,
    aten.ctc_loss.IntList: _reduced,
}
