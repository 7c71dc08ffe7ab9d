"""Gradients that autograd calls a backward graph with, which torch holds to the graph's end before 2.13.

They may be large: those of a language model's logits are, where the loss is computed outside of the model. What runs
the graph takes the memory of those to which nothing else refers, and frees it after their last use.

[Note: gradients that nobody else refers to]
Autograd's engine and the tuples of Python's calls refer to each gradient until the graph has run, so it is not the
tensor that can be given up, but its memory: a new tensor takes it, and what they refer to is empty. That must not be
seen by anybody else: a hook or the caller of ``backward(gradient)`` may have kept the tensor, the engine may give it to
another function. Each of them is a reference more than those of the calls, in Python or in C++, so both are counted and
compared with what a gradient has that is known to be nobody else's. This is how AccumulateGrad of PyTorch decides
whether a gradient may become ``.grad`` without a copy. Tensors that share the memory without being the same tensor keep
it. A gradient may be a view, whose base nothing else refers to in turn; it is treated alike.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from graph_fsdp.compat.dispatch_modes import without_dispatch_modes
from graph_fsdp.compat.tensors import tensor_uses
from graph_fsdp.compat.traces.torch_compile import boxed

# Before torch 2.13, autograd holds the gradients that it calls a backward graph with until the graph has run.
HOLDS_TANGENTS = not hasattr(torch.autograd.Function, "boxed_grads_call")


def taking_tangents(run: Callable[[list[Any]], Any], places: Sequence[int]) -> Callable[[list[Any]], Any]:
    """Return ``run``, the program of a backward graph, for a list of inputs in which gradients at ``places`` are given
    up when it drops them, where nothing else refers to them."""
    if not HOLDS_TANGENTS or not places:
        return run

    def run_with_taken(args: list[Any]) -> Any:
        function = getattr(type(torch._C._current_autograd_node()), "_forward_cls", None)  # None: compiled autograd
        if function is not None and function.maybe_subclass_metadata is None:  # else parts of what it was given
            _take(args, places)
        return run(args)

    return boxed(run_with_taken)


def _take(args: list[Any], places: Sequence[int]) -> None:
    of_gradients, of_bases = _references_of_calls()
    for place in places:
        tangent = args[place]
        if type(tangent) is not Tensor or tangent.layout is not torch.strided or tensor_uses(tangent) != _IN_CPP:
            continue
        if sys.getrefcount(tangent) != of_gradients:
            continue
        args[place] = taken = tangent.detach()
        base, empty = tangent._base, taken.new_empty(0)
        tangent.data = empty
        if base is not None and tensor_uses(base) == _IN_CPP and sys.getrefcount(base) == of_bases:
            base.data = empty


_IN_CPP = 2  # references to a tensor: that of its Python object, and the engine's or, of a base, the view's


@functools.cache
def _references_of_calls() -> tuple[int, int]:
    """Return how many references in Python to a gradient there are where ``_take`` counts them, and how many to its
    base, if only Python's calls refer to them."""
    found: list[int] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            count(list(gradients))
            return torch.zeros(1, device="cpu")

    def count(args: list[Any]) -> None:
        tangent = args[0]
        found.append(sys.getrefcount(tangent))
        base = tangent._base
        found.append(sys.getrefcount(base))

    with without_dispatch_modes(), torch.enable_grad(), torch.inference_mode(False):
        x = torch.zeros(1, device="cpu", requires_grad=True)
        (Counted.apply(x).view(1, 1) * 2).sum().backward()
    return found[0], found[1]
