"""Optimizers of other libraries in ``distribute_optimizer``, as these write them: declared element-wise, with classes,
states and groups that those of torch do not have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import Facts
from models import MLP
from test_distribute_optimizer import WORLD_SIZE, Lion, Net, assert_same, assert_same_training, give_gradients, train
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import graph_fsdp
from graph_fsdp import UnsupportedError, checkpoint
from graph_fsdp.optimizers import declared

FACTS = Facts(__name__)


@pytest.fixture
def make_model(fake_group: None) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(0)
        return graph_fsdp.compile(Net(), init_device_mesh("cpu", (WORLD_SIZE,)), backend="eager")

    return make


def distribute(optimizer: Any, **options: Any) -> Any:
    return graph_fsdp.distribute_optimizer(optimizer, element_wise=True, **options)


class Base(ABC, optim.Optimizer):
    """Begins with a class without attributes, as those of pytorch-optimizer do."""

    @abstractmethod
    def init_state(self, p: Tensor) -> dict[str, Any]: ...


class Counting(Base):
    """Momentum whose rate falls with a number of steps in the group, and one for all parameters, as MADGRAD's is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "kept": [0.0], "steps": torch.tensor(0.0)})
        self.state["k"] = torch.tensor([0])  # type: ignore[index, assignment]  # as MADGRAD does

    def init_state(self, p: Tensor) -> dict[str, Any]:
        return {"average": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        shared: Any = self.state["k"]  # type: ignore[index]
        for group in self.param_groups:
            group["k"] += 1
            group["kept"][0] += 1
            group["steps"] += 1
            count = group["k"] + group["kept"][0] + float(group["steps"]) + int(shared) + 1
            for p in group["params"]:
                if p.grad is not None:
                    if not self.state[p]:
                        self.state[p].update(self.init_state(p))
                    average = self.state[p]["average"].lerp_(p.grad, 0.1)
                    p.add_(average, alpha=-group["lr"] / count)
        shared.add_(1)


def test_a_class_that_begins_with_one_without_attributes_and_a_state_of_no_parameter(
    make_model: Callable[[], Any],
) -> None:
    model, expected = make_model(), make_model()
    optimizer, other = distribute(Counting(model.parameters())), Counting(expected.parameters())
    assert isinstance(optimizer, Counting) and type(optimizer).__name__ == "Counting"
    train(model, optimizer, frozen=("norm.weight",))
    train(expected, other, frozen=("norm.weight",))
    assert_same_training(model, optimizer, expected, other)


def test_a_state_of_no_parameter_is_not_in_checkpoints(make_model: Callable[[], Any], tmp_path: Path) -> None:
    model = make_model()
    optimizer = distribute(Counting(model.parameters()))
    with pytest.raises(TypeError, match=r"optimizer: Counting keeps a state 'k' that is no parameter's, which"):
        checkpoint.save(tmp_path / "step_1", model, optimizer)
    assert not list(tmp_path.iterdir())


class Blocks(Lion):
    """Keeps what is not a number for each element, as optimizers with states of 8 bits do."""

    def __init__(self, params: Any, value: Callable[[Tensor], Any]) -> None:
        super().__init__(params)
        self.value = value

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p, state in self.state.items():
            state["scales"] = self.value(p)


VALUES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda p: torch.ones(3), r"a Tensor of shape \(3,\), for a parameter of shape"),
    "in a list": (lambda p: [torch.zeros_like(p)], r"a Tensor of shape \(.*\) in a list, for a parameter"),
    "another class": (lambda p: nn.Buffer(p.detach().clone()).as_subclass(Coded), r"a Coded of shape"),
}


class Coded(torch.Tensor):
    """Stands for a tensor whose numbers are coded together."""


@pytest.mark.parametrize(("value", "message"), VALUES.values(), ids=VALUES)
def test_a_state_that_is_not_of_elements_is_refused(
    make_model: Callable[[], Any], value: Callable[[Tensor], Any], message: str
) -> None:
    model = make_model()
    optimizer = distribute(Blocks(model.parameters(), value))
    give_gradients(model, 0)
    with pytest.raises(UnsupportedError, match=rf"element_wise=True: Blocks keeps 'scales', {message}"):
        optimizer.step()
    assert not optimizer.state
    single = distribute(Blocks(model.parameters(), lambda p: torch.ones(1)))
    single.step()


class GlobalNorm(optim.Optimizer):
    """Divides by the norm of all gradients."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Steps(optim.Optimizer):
    """Subtracts what a function makes of each parameter and its gradient."""

    def __init__(self, params: Any, change: Callable[[Tensor, Tensor], Tensor], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.change, self.steps = change, 0
        self.known = [p for group in self.param_groups for p in group["params"]]
        self.subtract = self.subtract_from  # a method of this one

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.subtract(p, self.change(p, p.grad), group["lr"])
        for p in self.known:
            p.mul_(0.5)

    def subtract_from(self, p: Tensor, value: Tensor, lr: float) -> None:
        self.called = True
        p.sub_(value, alpha=lr)


def raises_of_vectors(p: Tensor, grad: Tensor) -> Tensor:
    if p.dim() < 2 and p.numel() > 5:
        raise RuntimeError("no matrix")
    return grad


NOT_OF_ELEMENTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "a norm": (
        lambda p, grad: grad / grad.norm(),
        "100 steps over three tensors, and over a flat part of them, differ by",
    ),
    "a number of dimensions": (lambda p, grad: grad + p * (p.dim() > 1), "100 steps over three tensors"),
    "an error": (raises_of_vectors, "its step over a flat tensor raises RuntimeError"),
}
OF_ELEMENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "signs": lambda p, grad: grad.sign(),
    "random": lambda p, grad: grad + torch.randn_like(p),
}


@pytest.mark.parametrize(("change", "message"), NOT_OF_ELEMENTS.values(), ids=NOT_OF_ELEMENTS)
def test_an_optimizer_that_is_not_as_declared_is_refused(
    make_model: Callable[[], Any], change: Callable[[Tensor, Tensor], Tensor], message: str
) -> None:
    optimizer = Steps(make_model().parameters(), change)
    with pytest.raises(UnsupportedError, match=rf"element_wise=True: Steps does not treat each .* itself: {message}"):
        distribute(optimizer)
    assert type(optimizer) is Steps and not optimizer.state and not optimizer.steps and "called" not in vars(optimizer)


def test_an_optimizer_with_many_groups_is_tried_by_some(make_model: Callable[[], Any]) -> None:
    groups = [{"params": [p], "lr": 0.1 / n} for n, p in enumerate(make_model().parameters(), 1)]
    groups += [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(declared.GROUPS)]
    distribute(Steps(groups, lambda p, grad: grad.sign()))
    with pytest.raises(UnsupportedError, match="Steps does not treat each element by itself"):
        distribute(Steps(groups, lambda p, grad: grad / grad.norm()))


def test_an_optimizer_of_the_norm_of_all_gradients_is_refused(make_model: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"GlobalNorm does not treat each element by itself: 100 steps over"):
        distribute(GlobalNorm(make_model().parameters()))


@pytest.mark.parametrize("change", OF_ELEMENTS.values(), ids=OF_ELEMENTS)
def test_a_declaration_is_tried_without_a_trace(
    make_model: Callable[[], Any], change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    model = make_model()
    optimizer, values = Steps(model.parameters(), change), [p.to_local().clone() for p in model.parameters()]
    called = []
    optimizer.register_step_pre_hook(lambda *given: called.append(given))
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    distribute(optimizer)
    assert torch.equal(torch.rand(1), expected) and not called and not optimizer.steps and not optimizer.state
    assert all(torch.equal(p.to_local(), value) for p, value in zip(model.parameters(), values, strict=True))


def test_what_wraps_an_optimizer_is_refused_and_may_wrap_a_distributed_one(make_model: Callable[[], Any]) -> None:
    class Wrapper(optim.Optimizer):
        def __init__(self, inside: optim.Optimizer) -> None:
            vars(self).update(vars(inside), inside=inside)

        @property
        def state(self) -> Any:  # type: ignore[override]
            return self.inside.state

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inside.step()

    model, expected = make_model(), make_model()
    with pytest.raises(UnsupportedError, match=r"this Wrapper has the state of an optimizer that it wraps; give that"):
        distribute(Wrapper(optim.AdamW(model.parameters())))
    wrapper = Wrapper(graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters())))
    other = optim.AdamW(expected.parameters())
    train(model, wrapper)
    train(expected, other)
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))


@FACTS
def what_is_counted_once_per_step_is_counted_once_in_backward() -> None:
    def trained(in_backward: bool) -> Any:
        torch.manual_seed(0)
        model: Any = graph_fsdp.compile(MLP(depth=3), backend="eager")
        optimizer = distribute(Counting(model.parameters()), in_backward=in_backward)
        steps = optimizer.param_groups[0]["steps"]
        for step in range(3):
            model(torch.randn(4, 16, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["k"] == steps == 3
        return dict(model.named_parameters()), optimizer.state_dict()

    for found, expected in zip(trained(True), trained(False), strict=True):
        assert_same(found, expected)


test_on_two_ranks = FACTS.on(2)
