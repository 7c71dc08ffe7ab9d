"""A forward that is patched on a class after ``compile`` is followed, as with FSDP2, and so is its being taken back."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import MLPBlock
from programs import start
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

import graph_fsdp
from graph_fsdp.engine.dynamo import apart


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class OfHead(Head):
    """Has the forward of the class above it."""


class Top(nn.Module):
    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), OfHead()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)

    def score(self, x: Tensor) -> Tensor:
        return self.head(x).sum()


class Breaks(Top):
    breaks = True


Patch = Callable[[Any, Tensor], Tensor]
PATCHES: dict[type[nn.Module], Patch] = {
    Block: lambda self, x: x - self.b(self.a(x)),  # of units
    OfHead: lambda self, x: self.out(x) * 2,  # of a module in no unit
    Head: lambda self, x: self.out(x) * 3,
    Top: lambda self, x: self.head(x),
    Inner: lambda self, x: self.linear(x).tanh(),  # of modules in units
}
X = torch.ones(2, 8)


def models(kind: type[nn.Module] = Top, **options: Any) -> tuple[Any, Any]:
    """Return a compiled model and its plain one."""
    torch.manual_seed(0)
    plain = kind()
    return graph_fsdp.compile(copy.deepcopy(plain), backend="eager", **options), plain


def causes(model: nn.Module) -> list[str]:
    return [str(capture.cause) for capture in graph_fsdp.inspect(model).captures]


def assert_same_steps(model: nn.Module, plain: nn.Module) -> None:
    """Assert that both have the same outputs and gradients."""
    outputs, gradients = [], []
    for each in (model, plain):
        each.zero_grad()
        outputs.append(each(X))
        outputs[-1].sum().backward()
        gradients.append([None if p.grad is None else p.grad for p in each.parameters()])
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("patched", PATCHES)
def test_a_patch_before_the_first_call_is_followed_until_it_is_taken_back(
    patched: type[nn.Module], fullgraph: bool
) -> None:
    model, plain = models(fullgraph=fullgraph)
    with mock.patch.object(patched, "forward", PATCHES[patched]):
        assert_same_steps(model, plain)
    assert_same_steps(model, plain)
    assert causes(model) == ["first call", f"another forward was set on {patched.__qualname__}"]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("patched", PATCHES)
def test_a_patch_after_the_first_call_has_a_graph_of_its_own_beside_the_first(
    patched: type[nn.Module], fullgraph: bool
) -> None:
    model, plain = models(fullgraph=fullgraph)
    assert_same_steps(model, plain)
    for _ in range(2):
        with mock.patch.object(patched, "forward", PATCHES[patched]):
            assert_same_steps(model, plain)
        assert_same_steps(model, plain)
    assert causes(model) == ["first call", f"another forward was set on {patched.__qualname__}"]


@pytest.mark.parametrize("patched", PATCHES)
def test_a_model_in_pieces_follows_a_patch(patched: type[nn.Module]) -> None:
    model, plain = models(Breaks, fullgraph=False)
    assert_same_steps(model, plain)
    before = len(causes(model))
    with mock.patch.object(patched, "forward", PATCHES[patched]):
        assert_same_steps(model, plain)
    if apart(fullgraph=False):  # before torch 2.13 Dynamo knows the pieces of the other graph, and names its guards
        assert causes(model)[before] == f"another forward was set on {patched.__qualname__}"
    after = len(causes(model))
    assert_same_steps(model, plain)
    assert len(causes(model)) == after


def test_each_of_several_patches_has_its_cause() -> None:
    model, plain = models()
    assert_same_steps(model, plain)
    for patched in (OfHead, Block):
        with mock.patch.object(patched, "forward", PATCHES[patched]):
            assert_same_steps(model, plain)
    assert causes(model)[1:] == ["another forward was set on OfHead", "another forward was set on Block"]


def test_units_that_are_called_by_themselves_follow_a_patch() -> None:
    model, plain = models()
    for name in ("blocks.0", "head"):
        module, expected = model.get_submodule(name), plain.get_submodule(name)
        kind = type(expected)
        assert torch.equal(module(X), expected(X))
        with mock.patch.object(kind, "forward", PATCHES[kind]):
            assert torch.equal(module(X), expected(X))
        assert torch.equal(module(X), expected(X))


def test_a_registered_method_is_the_one_that_was_registered_and_follows_patches_of_modules() -> None:
    model, plain = models()

    def doubled(self: Any, x: Tensor) -> Tensor:
        return self.head(x).sum() * 2

    with mock.patch.object(Top, "score", doubled):
        register_fsdp_forward_method(model, "score")
        expected = plain.score(X)
    assert torch.equal(model.score(X), expected)
    with mock.patch.object(OfHead, "forward", PATCHES[OfHead]):
        assert torch.equal(model.score(X), expected * 2)
    assert torch.equal(model.score(X), expected)
    assert causes(model) == ["first call of score", "another forward was set on OfHead"]


@pytest.mark.parametrize("patched", PATCHES)
def test_a_deep_copy_that_is_made_under_a_patch_follows_its_end(patched: type[nn.Module]) -> None:
    model, plain = models()
    with mock.patch.object(patched, "forward", PATCHES[patched]):
        copied = copy.deepcopy(model)
        assert_same_steps(copied, plain)
    assert_same_steps(copied, plain)
    assert_same_steps(model, plain)


def test_a_forward_of_the_instance_stays_under_a_patch_of_its_class() -> None:
    torch.manual_seed(0)
    plain = Top()
    plain.head.forward = functools.partial(PATCHES[Head], plain.head)  # type: ignore[method-assign]
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    with mock.patch.object(OfHead, "forward", PATCHES[OfHead]):
        assert torch.equal(model(X), plain(X))


def test_a_forward_that_is_set_on_the_model_has_a_cause_of_its_own() -> None:
    model, plain = models(fullgraph=False)
    assert torch.equal(model(X), plain(X))
    model.forward = functools.partial(PATCHES[Top], model)
    assert torch.equal(model(X), plain.head(X))
    del model.forward
    assert torch.equal(model(X), plain(X))
    assert causes(model) == ["first call", "another function was set as forward"]


class Partial(Head):
    def scaled(self, x: Tensor, by: int) -> Tensor:
        return self.out(x) * by

    forward = functools.partialmethod(scaled, by=2)  # type: ignore[assignment]  # a new function at each look


def test_a_partialmethod_is_captured_once() -> None:
    model, plain = models(Partial)
    for _ in range(2):
        assert torch.equal(model(X), plain(X))
    assert causes(model) == ["first call"]


@pytest.mark.usefixtures("fake_group")
def test_programs_of_other_forwards_are_not_found(tmp_path: Path) -> None:
    start(tmp_path)
    with mock.patch.object(MLPBlock, "forward", lambda self, x: x + self.down(self.up(x))):
        assert not start(tmp_path).found
    assert start(tmp_path).found
