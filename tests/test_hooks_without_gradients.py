"""Hooks of a parameter are called for its gradient, and not in a backward that has none, as autograd calls them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from marks import fake_reductions
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graph_fsdp


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


@pytest.fixture(params=["one process", pytest.param("a group", marks=fake_reductions)])
def model(request: pytest.FixtureRequest) -> Any:
    if request.param == "a group":
        request.getfixturevalue("fake_group")
    torch.manual_seed(0)
    model = graph_fsdp.compile(TwoHeads(), backend="eager")
    assert isinstance(model.second.weight, DTensor) is (request.param == "a group")
    return model


def backward(model: Any, heads: int = 2) -> None:
    sum(y.sum() for y in model(torch.ones(4, 4))[:heads]).backward()


def hooked(model: Any, called: list[Any], kind: str) -> Any:
    if kind == "before":
        return model.second.weight.register_hook(called.append)
    return model.second.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad))


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_loss_of_other_outputs_calls_no_hook(model: Any, kind: str) -> None:
    called: list[Any] = []
    hooked(model, called, kind)
    backward(model, heads=1)
    assert model.first.weight.grad is not None and model.second.weight.grad is None and called == []
    backward(model)
    assert len(called) == 1 and torch.equal(called[0], model.second.weight.grad)
    backward(model, heads=1)
    assert len(called) == 1, "the gradient of before is no new one"


@fake_reductions
@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_micro_batch_without_reductions_calls_no_hook(fake_group: None, kind: str) -> None:
    model: Any = graph_fsdp.compile(TwoHeads(), backend="eager")
    called: list[Any] = []
    hooked(model, called, kind)
    model.set_requires_gradient_sync(False)
    backward(model)
    assert model.second.weight.grad is None and called == []
    model.set_requires_gradient_sync(True)
    backward(model)
    assert len(called) == 1


def test_a_hook_that_was_skipped_is_called_the_next_time_and_can_be_removed(model: Any) -> None:
    called: list[Any] = []
    kept = hooked(model, called, "before")
    failing = model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # before or after the other parameter's turn
        backward(model, heads=1)
    failing.remove()
    backward(model)
    assert len(called) == 1
    backward(model, heads=1)
    kept.remove()
    backward(model)
    assert len(called) == 1
