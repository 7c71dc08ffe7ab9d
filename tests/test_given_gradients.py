"""The gradients that a backward graph is given are freed after their last use, and stay what they were for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import graph_fsdp

CLASSES, WIDTH, ROWS = 512, 8, 4
watched: list[StorageWeakRef] = []  # the memory of the logits' gradient
freed: list[bool] = []  # whether it was, where backward came below the head


@torch.library.custom_op("graph_fsdp_tests::below_the_head", mutates_args=())
def below_the_head(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.custom_op("graph_fsdp_tests::backward_is_below_the_head", mutates_args=())
def backward_is_below_the_head(grad: Tensor) -> Tensor:
    freed.extend(storage.expired() for storage in watched)
    return grad.clone()


below_the_head.register_fake(torch.empty_like)
backward_is_below_the_head.register_fake(torch.empty_like)
below_the_head.register_autograd(lambda ctx, grad: backward_is_below_the_head(grad))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(below_the_head(self.body(x).tanh()))


def compiled() -> nn.Module:
    watched.clear()
    freed.clear()
    return graph_fsdp.compile(Model(), auto_wrap_policy={nn.Linear}, backend="eager")


def batch() -> tuple[Tensor, Tensor]:
    return torch.arange(2.0 * ROWS * WIDTH).view(2, ROWS, WIDTH) / 50, torch.arange(2 * ROWS)


def watch(grad: Tensor) -> None:
    watched.append(StorageWeakRef(grad.untyped_storage()))


def of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    """Backward gives a view of its gradient, whose base is nobody else's."""
    return F.cross_entropy(logits.view(-1, CLASSES), labels)


def in_float64(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES).double(), labels)


def of_a_product(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits * labels.view(2, ROWS, 1)).mean()


@pytest.mark.parametrize("loss", [of_rows, in_float64, of_a_product])
def test_the_gradient_of_logits_is_freed_after_its_last_use(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = compiled()
    x, labels = batch()
    for _ in range(2):
        logits = model(x)
        logits.register_hook(watch)
        loss(logits, labels).backward()
    assert freed[0] and freed[-1]


def kept_by_a_hook(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    kept: list[Tensor] = []
    logits.register_hook(kept.append)
    loss.backward()
    return kept[0]


def a_view_kept_by_a_hook(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    kept: list[Tensor] = []
    logits.register_hook(lambda grad: kept.append(grad.view(2, -1)))
    loss.backward()
    return kept[0].view(2, ROWS, CLASSES)


def kept_as_grad(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    logits.retain_grad()
    loss.backward()
    assert logits.grad is not None
    return logits.grad


def given_by_the_user(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss, logits)
    copy = grad.clone()
    logits.backward(grad)
    assert torch.equal(grad, copy)
    return grad


def kept_by_a_hook_of_the_node(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    kept: list[Tensor] = []
    assert logits.grad_fn is not None
    logits.grad_fn.register_hook(lambda _, grads: kept.extend(g for g in grads if g is not None))
    loss.backward()
    return kept[-1]


def asked_for(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    grad, *_ = torch.autograd.grad(loss, [logits, *model.parameters()])
    return grad


def given_to_another_function(model: nn.Module, logits: Tensor, loss: Tensor) -> Tensor:
    del loss
    other = torch.zeros_like(logits, requires_grad=True)
    of_rows(logits + other * 1.0, batch()[1]).backward()
    assert other.grad is not None
    return other.grad


@pytest.mark.parametrize(
    "keep",
    [
        kept_by_a_hook,
        a_view_kept_by_a_hook,
        kept_as_grad,
        given_by_the_user,
        kept_by_a_hook_of_the_node,
        asked_for,
        given_to_another_function,
    ],
)
@pytest.mark.parametrize("loss", [of_rows, in_float64])
def test_who_else_has_the_gradient_of_logits_keeps_it(
    keep: Callable[[nn.Module, Tensor, Tensor], Tensor], loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    x, labels = batch()
    found: list[tuple[Tensor, list[Tensor | None]]] = []
    for model in Model(), compiled():
        logits = model(x)
        found.append((keep(model, logits, loss(logits, labels)), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)
