"""Modules that code outside of graphs calls in backward, where it computes them again (``fullgraph=False``)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from facts import Facts
from test_calls_ranks import check_gradients, pair, rows
from torch import nn
from torch.distributed.tensor import DTensor

import graph_fsdp

FACTS = Facts(__name__)


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


class Block(nn.Module):
    """Two residual streams, whose values backward computes again from those behind the block (reversible networks)."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, dim=1)
        one = one + self.f(two)
        return torch.cat([one, two + self.g(one)], dim=1)

    def before(self, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What came in, and its gradient, by a backward for each stream; parameters get gradients."""
        one, two = (value.detach().requires_grad_() for value in x.chunk(2, dim=1))
        grad_one, grad_two = grad.chunk(2, dim=1)
        with torch.enable_grad():
            added = self.g(one)
            added.backward(grad_two)
        grad_one = grad_one + one.grad
        two = (two - added).detach().requires_grad_()
        with torch.enable_grad():
            added = self.f(two)
            added.backward(grad_one)
        return torch.cat([one - added, two], dim=1).detach(), torch.cat([grad_one, grad_two + two.grad], dim=1)


class Reversed(torch.autograd.Function):
    """Saves the last values alone, as the reversible layers of Reformer do, and calls a method in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: nn.ModuleList) -> torch.Tensor:
        for block in blocks:
            x = block(x)
        ctx.blocks, ctx.values = blocks, x.detach()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, (grad,) = ctx.values, grads
        for block in reversed(ctx.blocks):
            x, grad = block.before(x, grad)
        return grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.through_blocks(x))

    @torch.compiler.disable(recursive=False)
    def through_blocks(self, x: torch.Tensor) -> Any:
        return Reversed.apply(x, self.blocks)


def reversible(policy: Any = None) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return pair(Reversible(), fullgraph=False, auto_wrap_policy=policy)


def backward(model: nn.Module, seed: int = 0) -> None:
    model(rows(3, 8, seed=seed).requires_grad_()).square().sum().backward()


@FACTS
def reversible_layers_call_a_method_of_theirs() -> None:
    for policy in ({nn.Linear}, {Block}):
        model, plain = reversible(policy)
        for seed in range(2):
            backward(model, seed)
            backward(plain, seed)
            check_gradients(model, plain)


@FACTS
def one_that_raises_leaves_shards() -> None:
    model, plain = reversible()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        loss = model(rows(3, 8).requires_grad_()).sum()
        patch.setattr(nn.Tanh, "forward", interrupted)
        loss.backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    for made in (model, plain):
        backward(made)
    check_gradients(model, plain)


def interrupted(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


test_on_two_ranks = FACTS.on(2)
