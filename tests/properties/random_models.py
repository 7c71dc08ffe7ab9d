"""Models that are made of a description: blocks of layers, used in any order, shared or not, with several outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from random_cases import ModelCase
from random_layers import LAYERS
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

VOCABULARY = 7
LENGTH = 3
OF_PARAMETERS = {"bias", "weight_view", "penalty"}


class Block(nn.Module):
    def __init__(self, layers: list[nn.Module], residual: bool) -> None:
        super().__init__()
        self.layers, self.residual = nn.ModuleList(layers), residual

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return x + 0.5 * y if self.residual else y


@dataclass
class Output:
    value: Any
    others: list[Any]


pytree.register_dataclass(Output)


class RandomModel(nn.Module):
    def __init__(self, case: ModelCase) -> None:
        super().__init__()
        self.case = case
        if case.tokens:
            self.tokens = nn.Embedding(VOCABULARY, case.width)
        made = [Block([LAYERS[x.kind](case.width, x.size) for x in block], case.residual) for block in case.blocks]
        self.blocks = nn.ModuleList(made[i % len(made)] for i in case.registered)
        self.head = nn.Linear(case.width, 3)
        self.recompute = True  # as that of ``Checkpointed``

    def forward(self, x: Tensor) -> Any:
        source = x
        if self.case.tokens:
            x = self.tokens(x).mean(1)
        elif self.case.writes_input:
            x.mul_(0.5)
        seen = [x]
        for place, call in enumerate(self.case.calls[:1]):
            x = self._called(place, call, x)
            seen.append(x)
        if self.case.graph_break:  # not within a loop, which Dynamo would leave to Python
            torch._dynamo.graph_break()
        for place, call in enumerate(self.case.calls[1:], 1):
            x = self._called(place, call, x)
            seen.append(x)
        head = self.head(x)
        values: dict[str, Any] = {
            "x": head,
            "again": head,
            "view": head[:, :2],
            "hidden": seen[len(seen) // 2],
            "mean": x.mean(1),
            "detached": head.detach(),
            "input": source,
            "none": None,
            "number": 3,
        }
        if OF_PARAMETERS & set(self.case.outputs):  # outside of a graph they are shards, of which these are not all
            values |= {
                "bias": self.head.bias,
                "weight_view": self.head.weight.flatten(),  # a view, unless it is tied to a transposed one
                "penalty": self.head.weight.square().sum(),
            }
        chosen = {name: values[name] for name in self.case.outputs}
        match self.case.container:
            case "tensor":
                return next(iter(chosen.values()))
            case "tuple":
                return tuple(chosen.values())
            case "dict":
                return chosen
            case "nested":
                first, *others = chosen.values()
                return {"first": [first], "others": (others, {})}
        first, *others = chosen.values()
        return Output(first, others)

    def _called(self, place: int, call: int, x: Tensor) -> Tensor:
        block = self.blocks[call % len(self.blocks)]
        if place in self.case.checkpointed and self.recompute:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)


def make_model(case: ModelCase) -> tuple[RandomModel, list[nn.Parameter]]:
    """The model, in float64, and the parameters that are to be ignored."""
    with _default_dtype(torch.float64):
        model = RandomModel(case)
    own = {"recurse": False, "remove_duplicate": False}
    slots = [(module, name) for module in model.modules() for name, _ in module.named_parameters(**own)]
    for number in case.ties:
        pairs = [
            (a, b)
            for i, a in enumerate(slots)
            for b in slots[:i]
            if _kind(a) == _kind(b) and getattr(*a) is not getattr(*b)
        ]
        if pairs:
            (to, name), (module, other) = pairs[number % len(pairs)]
            setattr(to, name, getattr(module, other))
    parameters = list(model.parameters())
    for number in case.frozen:
        parameters[number % len(parameters)].requires_grad_(False)
    ignored = {id(p): p for p in (parameters[number % len(parameters)] for number in case.ignored)}
    for p in ignored.values():  # each rank would follow its own gradient
        p.requires_grad_(False)
    return model, list(ignored.values())


def _kind(slot: tuple[nn.Module, str]) -> tuple[Any, ...]:
    p = getattr(*slot)
    assert p is not None
    return tuple(p.shape), p.dtype, p.requires_grad


class _default_dtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.before)


def used_outputs(case: ModelCase, output: Any) -> list[Tensor]:
    """The outputs that the loss is made of: floating-point tensors."""
    tensors = [value for value in pytree.tree_leaves(output) if isinstance(value, Tensor) and value.is_floating_point()]
    return [tensors[i] for i in sorted({number % len(tensors) for number in case.used})] if tensors else []


def loss_of(case: ModelCase, output: Any) -> Tensor:
    """A mean over rows, so that the mean over ranks of equally many is that of the whole batch."""
    terms = [value.double().square().mean() for value in used_outputs(case, output)]
    return torch.stack(terms).sum() if terms else torch.zeros(())
