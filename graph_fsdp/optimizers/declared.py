"""What is declared of an optimizer is tried on a few numbers."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.groups import parameters_of

# Some steps treat a matrix of small dimensions as they do a vector, or change only after tens of steps.
SHAPES, PART, STEPS = ((5,), (2, 3, 2, 2), (128, 128)), 8_000, 100
GROUPS = 8  # the first ones are tried: where there are hundreds, one per layer, they differ in their learning rates
TOLERANCE = 1e-8  # of the largest change of a number, in float64


def check_element_wise(optimizer: optim.Optimizer, own_step: Callable[..., Any]) -> None:
    """Raise UnsupportedError where steps over a few tensors, and over a part of their numbers in one flat tensor,
    differ in that part, as they do where a step depends on norms, on shapes, or on what other ranks have.

    A copy of the optimizer steps, on the CPU, and none of torch's random numbers are used up. Where it cannot be
    copied, does not step these tensors, or steps them in another way each time, the declaration holds as it is.
    """
    name = type(optimizer).__name__
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the real step are shown
        try:
            begin, whole, again = (_stepped(optimizer, own_step, steps, flat=False) for steps in (0, STEPS, STEPS))
        except Exception:
            return
        if not torch.equal(whole, again):
            return
        try:
            flat = _stepped(optimizer, own_step, STEPS, flat=True)
        except Exception as error:
            raise _refused(name, f"its step over a flat tensor raises {type(error).__name__}") from error
    largest = (whole - begin).abs().max().item()
    difference = (flat - whole[:, :PART]).abs().max().item()
    if not difference <= TOLERANCE * largest:
        what = f"{difference:.1e} where the largest change is {largest:.1e}"
        raise _refused(name, f"{STEPS} steps over three tensors, and over a flat part of them, differ by {what}")


def _stepped(optimizer: optim.Optimizer, own_step: Callable[..., Any], steps: int, flat: bool) -> Tensor:
    """Return the numbers, of shape (groups, numbers), after so many steps of a copy."""
    generator = torch.Generator().manual_seed(0)

    def drawn() -> list[Tensor]:
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
        return [_joined(values)[:PART].clone()] if flat else values

    groups = [[nn.Parameter(value) for value in drawn()] for _ in optimizer.param_groups[:GROUPS]]
    copied = _copied(optimizer, groups)
    for _ in range(steps):
        for group in groups:
            for p, gradient in zip(group, drawn(), strict=True):
                p.grad = gradient + p.detach()  # so that numbers go somewhere, as learnt rates of steps ask for
        own_step(copied)
    return torch.stack([_joined(group) for group in groups])


def _joined(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten() for value in values])


def _copied(optimizer: optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> Any:
    """Return an optimizer of the same class and settings with these parameters, which have no state, and no hooks."""
    made: Any = object.__new__(type(optimizer))
    # What a copy knows of the parameters besides is empty, so that it steps none of them.
    known: dict[int, Any] = {id(p): nn.Parameter(torch.empty(0)) for p in parameters_of(optimizer)}
    known[id(optimizer)] = made
    settings = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups") and "hooks" not in k}
    vars(made).update(copy.deepcopy(settings, known))
    shared = {k: v for k, v in optimizer.state.items() if not isinstance(k, Tensor)}  # of no parameter
    made.state = defaultdict(dict, copy.deepcopy(shared, known))
    made.param_groups = [
        copy.deepcopy({k: v for k, v in group.items() if k != "params"}, known) | {"params": list(params)}
        for group, params in zip(optimizer.param_groups, groups, strict=False)
    ]
    return made


def _refused(name: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"element_wise=True: {name} does not treat each element by itself: {why}. Leave distribute_optimizer out, or "
        "declare with matrix_wise= how it steps whole matrices"
    )
