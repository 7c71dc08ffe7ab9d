"""Gradients of shards are added without autograd's nodes, and all that autograd does with a gradient still holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from marks import fake_reductions
from models import MLP
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import graph_fsdp
from graph_fsdp import compat

pytestmark = [pytest.mark.usefixtures("fake_group"), fake_reductions]


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return graph_fsdp.compile(MLP(), backend="eager")


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(4, 16)).square().sum()


def local(value: Tensor | None) -> Tensor:
    assert isinstance(value, DTensor)
    return value.to_local()


def gradients(model: nn.Module) -> list[Tensor]:
    return [local(p.grad).clone() for p in model.parameters()]


def test_gradients_of_a_backward_are_added_in_one_call(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of(model).backward()
    first, objects = gradients(model), [p.grad for p in model.parameters()]
    for grad, p in zip(objects, model.parameters(), strict=True):
        assert isinstance(grad, DTensor) and isinstance(p, DTensor)
        assert (grad.shape, grad.placements, grad.device_mesh) == (p.shape, p.placements, p.device_mesh)
    calls: list[int] = []
    add = compat.foreach_add

    def counted(sums: list[Tensor], added: list[Tensor]) -> None:
        calls.append(len(sums))
        add(sums, added)

    monkeypatch.setattr(compat, "foreach_add", counted)
    loss_of(model).backward()
    assert calls == [len(objects)]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), objects, strict=True))
    assert all(torch.equal(now, 2 * before) for now, before in zip(gradients(model), first, strict=True))
    model.zero_grad()
    loss_of(model).backward()
    assert calls == [len(objects)], "there is nothing to add to"
    assert all(torch.equal(now, before) for now, before in zip(gradients(model), first, strict=True))


def of_tensor(p: Tensor, called: list[Any]) -> Any:
    return p.register_hook(lambda grad: called.append(grad))


def of_tensor_after(p: Tensor, called: list[Any]) -> Any:
    return p.register_post_accumulate_grad_hook(lambda p: called.append(p.grad))


def of_node(p: Tensor, called: list[Any]) -> Any:
    node = get_gradient_edge(p).node
    return node, node.register_hook(lambda *_: called.append(p.grad))


def before_node(p: Tensor, called: list[Any]) -> Any:
    node = get_gradient_edge(p).node
    return node, node.register_prehook(lambda grads: called.append(*grads))


@pytest.mark.parametrize("register", [of_tensor, of_tensor_after, of_node, before_node])
def test_hooks_of_a_parameter_are_called(model: nn.Module, register: Callable[..., Any]) -> None:
    loss_of(model).backward()
    expected = gradients(model)
    p, called = next(model.parameters()), []
    kept = register(p, called)
    for times in (1, 2):
        model.zero_grad()
        loss_of(model).backward()
        assert len(called) == times and torch.equal(local(called[-1]), expected[0])
        assert all(torch.equal(now, before) for now, before in zip(gradients(model), expected, strict=True))
    loss_of(model).backward()
    assert len(called) == 3 and torch.equal(local(p.grad), 2 * expected[0])
    (kept[1] if isinstance(kept, tuple) else kept).remove()
    loss_of(model).backward()
    assert len(called) == 3 and torch.equal(local(p.grad), 3 * expected[0])


def test_a_hook_between_forward_and_backward_changes_the_gradient(model: nn.Module) -> None:
    loss_of(model).backward()
    expected = gradients(model)
    model.zero_grad()
    loss = loss_of(model)
    next(model.parameters()).register_hook(lambda grad: 2 * grad)
    loss.backward()
    assert torch.equal(local(next(model.parameters()).grad), 2 * expected[0])


@pytest.mark.parametrize("register", [of_node, before_node])
def test_a_hook_on_a_node_that_the_forward_made_is_called(model: nn.Module, register: Callable[..., Any]) -> None:
    p, called = next(model.parameters()), []
    for _ in range(2):
        loss = loss_of(model)
        other = torch.ones(1, requires_grad=True)
        other.register_hook(lambda grad: grad)  # of which this model knows nothing
        kept = register(p, called)
        loss.backward()
        assert len(called) == 1
        del kept, loss  # and with them the node
        loss_of(model).backward()
        assert len(called) == 1, "its node has gone"
        called.clear()


def test_a_node_that_the_forward_makes_is_not_asked_for_hooks(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of(model).backward()  # what compiles makes hooks too
    model.zero_grad()
    asked: list[Any] = []
    monkeypatch.setattr(compat, "is_hooked", asked.append)
    for times in (1, 2):
        torch.ones(1, requires_grad=True).register_hook(lambda grad: grad)
        loss_of(model).backward()
        assert not asked and all(p.grad is not None for p in model.parameters()), times


def test_autograd_grad_returns_gradients_and_keeps_none(model: nn.Module) -> None:
    loss_of(model).backward()
    expected, parameters = gradients(model), list(model.parameters())
    model.zero_grad()
    found = torch.autograd.grad(loss_of(model), parameters[::2])
    assert all(torch.equal(local(grad), right) for grad, right in zip(found, expected[::2], strict=True))
    assert all(p.grad is None for p in parameters)
    loss_of(model).backward(inputs=parameters[1:3])
    assert [p.grad is not None for p in parameters[:4]] == [False, True, True, False]
    assert torch.equal(local(parameters[1].grad), expected[1])


def test_a_gradient_of_the_users_own_is_added_to(model: nn.Module) -> None:
    loss_of(model).backward()
    expected, p = gradients(model), next(model.parameters())
    p.grad = torch.ones_like(p)
    loss_of(model).backward()
    assert torch.equal(local(p.grad), expected[0] + 1)


def test_zero_grad_drops_gradients_as_it_does_on_any_module(model: nn.Module) -> None:
    loss_of(model).backward()
    added = nn.Linear(2, 2)
    unit = next(module for module in model.modules() if module is not model and isinstance(module, FSDPModule))
    assert isinstance(unit, nn.Module)
    unit.zero_grad()
    own = {id(p) for p in unit.parameters()}
    assert own and all((p.grad is None) == (id(p) in own) for p in model.parameters())
    model.added = added.requires_grad_(False)
    added.weight.grad = torch.ones(2, 2)
    model.zero_grad(set_to_none=False)
    assert torch.equal(added.weight.grad, torch.zeros(2, 2)), "after the last look at modules"
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    loss_of(model).backward()
    added.weight.grad = torch.ones(2, 2)
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_between_a_forward_and_its_backward_drops_gradients(model: nn.Module) -> None:
    loss_of(model).backward()
    first = gradients(model)
    loss = loss_of(model)
    model.zero_grad()
    loss.backward()
    assert all(map(torch.equal, gradients(model), first))


def test_zero_grad_drops_gradients_of_whole_units(model: Any) -> None:
    shards = list(model.parameters())
    unit = next(module for module in model.modules() if module is not model and isinstance(module, FSDPModule))
    for each, count in ((unit, len(list(unit.parameters()))), (model, len(shards))):
        loss_of(model).backward()
        with graph_fsdp.unsharded(model):
            each.zero_grad(set_to_none=False)
            assert sum(not local(p.grad).any() for p in shards) == count
            each.zero_grad()
            assert sum(p.grad is None for p in shards) == count


def test_zero_grad_of_the_users_own_is_called() -> None:
    class Own(MLP):
        called = 0

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.called += 1
            super().zero_grad(set_to_none)

    model = graph_fsdp.compile(Own(), backend="eager")
    loss_of(model).backward()
    model.zero_grad()
    assert model.called == 1 and all(p.grad is None for p in model.parameters())


def test_compiled_autograd_is_refused_before_anything_runs(model: nn.Module) -> None:
    loss = loss_of(model)
    with torch._dynamo.config.patch(compiled_autograd=True):
        step = torch.compile(lambda: loss.backward(), backend="eager")
        with pytest.raises(graph_fsdp.UnsupportedError, match=r"leave torch\._dynamo\.config\.compiled_autograd False"):
            step()
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    loss_of(model).backward()
    assert all(map(torch.equal, found, gradients(model)))
