"""What must be equal, and how nearly.

[Note: bounds]
Sums of other lengths and orders round otherwise, and a sum that cancels is as wrong as its terms are. So a tensor's
bound is a part of its own largest value, and a much smaller part of the largest value of all tensors of its kind. The
parts are some hundred roundings of the narrowest type that takes part. A factor of the number of ranks, a part of
another rank or a gradient that was added twice is larger than any of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from random_cases import Case
from random_training import Outcome
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor | None]

_OF_OWN = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 6e-2}
_OF_ALL = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2}


def narrowest(case: Case) -> torch.dtype:
    dtypes = {torch.float64}
    for of in ("mp", "mp_blocks"):
        dtypes |= {getattr(torch, name) for name in case.options.compile.get(of, {}).values()}
    if any(layer.kind == "single" for block in case.model.blocks for layer in block):
        dtypes.add(torch.float32)
    return max((dtype for dtype in dtypes if dtype in _OF_OWN), key=lambda dtype: _OF_OWN[dtype])


def differences(case: Case, outcomes: Sequence[Outcome], expected: Sequence[Outcome]) -> list[str]:
    """One line for each thing that a rank has seen and should not; ``expected``: of each rank, or one of all rows."""
    dtype = narrowest(case)
    found: list[str] = []
    for rank, actual in enumerate(outcomes):
        right = expected[rank if len(expected) > 1 else 0]
        stepped = case.options.program.get("optimizer") == "in_backward"  # which frees gradients
        for step, (a, b) in enumerate(() if stepped else zip(actual.gradients, right.gradients, strict=True)):
            found += _compare(f"rank {rank}, step {step}, gradient", _without_none(a, b), b, dtype)
        found += _compare(f"rank {rank}, parameter", actual.parameters, right.parameters, dtype)
        found += _compare(f"rank {rank}, buffer", actual.buffers, right.buffers, dtype)
        if len(expected) == len(outcomes):
            found += _losses(f"rank {rank}", [actual], right, dtype)
            found += _inputs(f"rank {rank}", [actual], right, dtype)
    if len(expected) != len(outcomes):
        found += _losses("mean of ranks", outcomes, expected[0], dtype)
        found += _inputs("all ranks", outcomes, expected[0], dtype)
    return found


def _without_none(actual: Tensors, expected: Tensors) -> dict[str, Tensor | None]:
    """A parameter that a graph uses has zeros where plain autograd, which has no graph, has None."""
    return {
        name: None if value is not None and expected.get(name) is None and not value.any() else value
        for name, value in actual.items()
    }


def _compare(what: str, actual: Tensors, expected: Tensors, dtype: torch.dtype) -> list[str]:
    if list(actual) != list(expected):
        return [f"{what}: names are {list(actual)} and should be {list(expected)}"]
    sizes = (value.abs().max().item() for value in expected.values() if value is not None and value.numel())
    largest = max(sizes, default=0.0)
    return [
        f"{what} {name}: {difference}"
        for name, value in expected.items()
        if (difference := _difference(actual[name], value, largest, dtype))
    ]


def _difference(actual: Tensor | None, expected: Tensor | None, largest: float, dtype: torch.dtype) -> str:
    """Nothing if they are equal within the bounds."""
    if actual is None or expected is None:
        return "" if actual is expected else f"is {_short(actual)} and should be {_short(expected)}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return f"is {_short(actual)} and should be {_short(expected)}"
    if not expected.numel():
        return ""
    if expected.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if not expected.is_floating_point():
        return "" if torch.equal(actual, expected) else f"is {_short(actual)} and should be {_short(expected)}"
    error = (actual.double() - expected.double()).abs().max().item()
    bound = _OF_OWN[dtype] * expected.double().abs().max().item() + _OF_ALL[dtype] * largest
    return "" if error <= bound else f"differs by {error:.3g} > {bound:.3g}: {_short(actual)} for {_short(expected)}"


def _losses(who: str, ranks: Sequence[Outcome], expected: Outcome, dtype: torch.dtype) -> list[str]:
    found = []
    for what in ("losses", "evaluations"):
        actual = torch.tensor([getattr(outcome, what) for outcome in ranks], dtype=torch.float64).mean(0)
        right = torch.tensor(getattr(expected, what), dtype=torch.float64)
        difference = _difference(actual, right, 0.0, dtype)
        found += [f"{who}, {what}: {difference}"] if difference else []
    return found


def _inputs(who: str, ranks: Sequence[Outcome], expected: Outcome, dtype: torch.dtype) -> list[str]:
    """The inputs after forward, and their gradients: of a mean over all rows, each rank's are by their number less."""
    found = []
    for step, right in enumerate(expected.inputs):
        actual = torch.cat([outcome.inputs[step] for outcome in ranks])
        found += _compare(f"{who}, step {step},", {"inputs": actual}, {"inputs": right}, dtype)
    for step, grad in enumerate(expected.input_gradients):
        grads = [outcome.input_gradients[step] for outcome in ranks]
        seen = None if any(g is None for g in grads) else torch.cat([g for g in grads if g is not None]) / len(ranks)
        right_one = {"gradient of inputs": grad}
        found += _compare(
            f"{who}, step {step},", _without_none({"gradient of inputs": seen}, right_one), right_one, dtype
        )
    return found


def _short(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    values = ", ".join(f"{value:.6g}" for value in tensor.flatten()[:6].tolist())
    more = ", …" if tensor.numel() > 6 else ""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} [{values}{more}]"
