"""Buffers and inputs that forward writes to: backward computes with what they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graph_fsdp


class Gated(nn.Module):
    """The gradient of ``gain`` depends on a buffer after it was written to, that of ``scale`` on what it was before."""

    count: Tensor
    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.ones(3))
        self.gain, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        before = (self.level * 2)[1:] * self.scale
        self.level.mul_(0.5)
        self.count.add_(1)
        return torch.tanh(x + self.gain * (self.count % 3).to(x.dtype)) + before.sum() * self.level


def gradients(wrap: Callable[[nn.Module], nn.Module]) -> tuple[list[dict[str, Tensor]], nn.Module]:
    torch.manual_seed(0)
    model = wrap(Gated())
    found = []
    for _ in range(3):  # the buffers are others each time
        model(torch.linspace(-1, 1, 12).view(4, 3)).square().mean().backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        model.zero_grad()
    return found, model


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "eager"},
        {"backend": "eager", "activation_checkpointing": "unit"},
        {"backend": "eager", "activation_checkpointing": 0.0},
        {"backend": "inductor"},
        {"backend": "inductor", "regions": "whole"},
    ],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_gradients_are_those_of_the_buffers_as_they_were(options: dict[str, Any]) -> None:
    expected, _ = gradients(lambda model: model)

    def compiled(model: nn.Module) -> nn.Module:
        return graph_fsdp.compile(model, **options)

    found, model = gradients(compiled)
    for right, actual in zip(expected, found, strict=True):
        torch.testing.assert_close(actual, right)
    code = graph_fsdp.inspect(model).forward.stages["partition"].code
    assert "as_it_was = torch.ops.aten.clone" in code


class Halved(nn.Module):
    """Writes to its input, which it has read before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(torch.tanh(x))
        x.mul_(0.5)
        return self.last(self.first(y)) + x


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_gradients_are_those_of_inputs_as_they_were(backend: str) -> None:
    plain = Halved()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend=backend, activation_checkpointing=0.0)
    for factor in (1.0, 2.0):
        gradients = []
        for each in (plain, model):
            source = (factor * torch.linspace(-1, 1, 32).view(8, 4)).requires_grad_()
            given = source * 2
            (each(given).square().mean() + given.sum()).backward()
            gradients.append(source.grad)
        torch.testing.assert_close(gradients[1], gradients[0])
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_what_backward_does_not_need_is_not_copied() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.linear(x)

    model = graph_fsdp.compile(Counts(), backend="eager")
    model(torch.ones(2, 3)).sum().backward()
    code = graph_fsdp.inspect(model).forward.stages["partition"].code
    assert "aten.copy_" in code and "clone" not in code


class Shifted(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.shift
        return x


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"),
    reason="this torch keeps weak references to the inputs of graphs",
)
@pytest.mark.parametrize("options", [{"backend": "eager"}, {"backend": "inductor"}], ids=str)
def test_buffers_are_swapped_after_calls_too(options: dict[str, Any]) -> None:
    """As workers of reinforcement learning move them to the host and back."""
    plain = Shifted()
    model = graph_fsdp.compile(copy.deepcopy(plain), auto_wrap_policy={nn.Linear}, **options)
    for value in (1.0, 2.0, 3.0):
        for each in (plain, model):
            torch.utils.swap_tensors(each.shift, torch.full((3,), value))
        with torch.no_grad():
            torch.testing.assert_close(model(torch.ones(2, 3)), plain(torch.ones(2, 3)))
        found, expected = model(torch.ones(2, 3)), plain(torch.ones(2, 3))
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
