"""Modules that code outside of graphs calls in backward, where it computes them again (``fullgraph=False``)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import graph_fsdp


class Adjoint(torch.autograd.Function):
    """As torchdiffeq's ``odeint_adjoint``: forward has no gradients, and backward computes a module again for those of
    the parameters that it was given."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.module(x), (x, *parameters), grads, allow_unused=True)


class WithAdjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.solve(x))

    @torch.compiler.disable
    def solve(self, x: torch.Tensor) -> Any:
        return Adjoint.apply(self.inside, x, *self.inside.parameters())


@pytest.mark.parametrize("policy", [None, {nn.Sequential}], ids=["in no unit", "a unit"])
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_a_module_that_backward_computes_again_has_the_parameters_that_were_saved(policy: Any) -> None:
    torch.manual_seed(0)
    plain, x = WithAdjoint(), torch.randn(3, 4)
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", fullgraph=False, auto_wrap_policy=policy)
    for _ in range(2):
        for made in (plain, model):
            made.zero_grad()
            made(x).square().sum().backward()
        for expected, found in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
    torch.testing.assert_close(model.inside(x), plain.inside(x))  # and compiled again, after backward
