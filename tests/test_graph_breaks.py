"""``fullgraph=False``: whatever Python does between and around graphs, a model computes what it computes without us."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graph_fsdp

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def assert_as_plain(
    build: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]], calls: int = 3, **options: Any
) -> nn.Module:
    """Outputs, and the gradients of all parameters, are the plain model's, call after call."""
    torch.manual_seed(0)
    plain = build().double()  # differences of rounding are none then
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", **{"fullgraph": False, **options})
    for _ in range(calls):
        torch.manual_seed(1)
        values = inputs()
        found, expected = model(*values), plain(*values)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    return model


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


class Loop(nn.Module):
    """A branch on data in each turn: Dynamo leaves the loop to Python, and traces a layer for all layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            scale = 2 if bool((mask == mask).all()) else 1
            x = x + scale * torch.relu(layer(x))
        return x


def test_a_break_in_a_loop_runs_each_layer_with_its_own_parameters() -> None:
    model = assert_as_plain(lambda: Loop(12), lambda: (torch.randn(2, WIDTH).double(), torch.ones(3)))
    causes = [graph.cause for graph in graph_fsdp.inspect(model).graphs]
    assert [cause.kind for cause in causes].count("parameters") == 10
    assert "runs with 'layers.11.up.weight', 'layers.11.up.bias'" in causes[-1].text


class Exchanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.active = self.experts[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.active(x)


def test_a_module_that_is_exchanged_for_one_of_its_kind_runs_with_its_own_parameters() -> None:
    plain = Exchanging()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    x = torch.randn(2, WIDTH)
    for which in (0, 1, 2, 0, 1):
        model.active, plain.active = model.experts[which], plain.experts[which]
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert_same_gradients(model, plain)


class ChunkedProduct(torch.autograd.Function):
    """As libraries write losses over a large vocabulary: chunks, products into a buffer, a backward of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(len(x), len(weight))
        for row in range(len(x)):
            torch.mm(x[row : row + 1], weight.t(), out=out[row : row + 1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.body(x))

    @torch.compiler.disable
    def logits(self, x: Tensor) -> Tensor:
        return ChunkedProduct.apply(x, self.head.weight)


def vectors() -> tuple[Tensor]:
    return (torch.randn(2, WIDTH).double(),)


def test_a_function_of_autograd_outside_of_graphs_gets_the_whole_parameter() -> None:
    with pytest.warns(UserWarning, match=r"reads parameter 'head\.weight': its unit .* is gathered"):
        model = assert_as_plain(Chunked, vectors)
    causes = [graph.cause for graph in graph_fsdp.inspect(model).graphs]
    assert [cause.kind for cause in causes].count("python") == 1
