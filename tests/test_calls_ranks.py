"""The ways in which users call models: against plain PyTorch, whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts
from models import MLP, SEQUENCE, VOCABULARY, llama
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import graph_fsdp

FACTS = Facts(__name__)


def rows(*shape: int, seed: int = 0) -> Tensor:
    """This rank's own."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def pair(model: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A compiled model, and the plain one."""
    plain = copy.deepcopy(model)
    return graph_fsdp.compile(model, backend="eager", **options), plain


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    """The same gradients, and none where the plain model has none; then there are none left."""
    for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DTensor), name
        assert (p.grad is None) == (expected.grad is None), name
        if expected.grad is not None:
            dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
            found = whole(p.grad)
            assert found is not None
            torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    model.zero_grad()
    plain.zero_grad()


def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(model(x), dim=1), F.normalize(model(y), dim=1)
    return F.cross_entropy(a @ b.t(), torch.arange(len(x)))


@FACTS
def two_forwards_and_one_backward() -> None:
    model, plain = pair(MLP(depth=1))
    for step in range(2):
        for m in (model, plain):
            contrast(m, rows(4, 16, seed=step), rows(4, 16, seed=step + 1)).backward()
        check_gradients(model, plain)


@FACTS
def a_mask_that_masks_something_on_one_rank_alone() -> None:
    """Ranks run different graphs, with the same collectives; and one alone captures another."""
    model, plain = pair(llama())
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE), generator=torch.Generator().manual_seed(dist.get_rank()))
    for padded_rank in (0, 1, None, 0):
        mask = torch.ones(2, SEQUENCE, dtype=torch.long)
        mask[0, :3] = padded_rank != dist.get_rank()
        for m in (model, plain):
            m(tokens, attention_mask=mask, labels=tokens).loss.backward()
        check_gradients(model, plain)
    captures = graph_fsdp.inspect(model).captures
    assert [capture.cause.kind for capture in captures] == ["first", "inputs"]


def redirected(model: Any, method: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Call the method in the forward's place, as Fabric and TRL do for losses that use parts of a model."""
    forward = model.forward

    def once(*args: Tensor) -> Tensor:
        model.forward = forward
        return method(*args)

    model.forward = once
    return model(*args)  # type: ignore[no-any-return]


@FACTS
def losses_in_the_place_of_a_forward_share_one_graph() -> None:
    model, plain = pair(MLP(depth=2), fullgraph=False)
    for step in range(3):
        for m in (model, plain):

            def loss(x: Tensor, m: Any = m) -> Tensor:
                for block in m.blocks:
                    x = block(x)
                return (x @ m.head.weight.t()).square().mean()

            redirected(m, loss, rows(4, 16, seed=step)).backward()
        check_gradients(model, plain)
    assert len(graph_fsdp.inspect(model).graphs) == 1
    torch.testing.assert_close(model(rows(4, 16)), plain(rows(4, 16)))


@FACTS.long
def two_forwards_of_different_shapes_and_a_backward_of_each() -> None:
    model, plain = pair(MLP())
    for m in (model, plain):
        first, second = m(rows(4, 16)), m(rows(6, 16))
        first.square().mean().backward()
        second.square().mean().backward()
    check_gradients(model, plain)


@FACTS.long
def backwards_in_the_order_of_the_forwards_or_against_it() -> None:
    model, plain = pair(MLP(), reshard_after_forward=False)
    for m in (model, plain):
        losses = [m(rows(4, 16, seed=seed)).square().mean() for seed in range(3)]
        for index in (2, 0, 1):
            losses[index].backward()
    check_gradients(model, plain)


@FACTS
def two_backwards_of_one_forward() -> None:
    for reshard in (True, False):
        model, plain = pair(MLP(), reshard_after_forward=reshard)
        for m in (model, plain):
            loss = m(rows(4, 16)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
        check_gradients(model, plain)


@FACTS.long
def gradients_by_autograd_grad() -> None:
    model, plain = pair(MLP())
    x = rows(4, 16).requires_grad_()
    for m in (model, plain):
        (grad,) = torch.autograd.grad(m(x).square().mean(), x)
        (again,) = torch.autograd.grad(m(x).square().mean(), x)
        assert torch.equal(grad, again)
    (expected,) = torch.autograd.grad(plain(x).square().mean(), x)
    torch.testing.assert_close(torch.autograd.grad(model(x).square().mean(), x)[0], expected, rtol=1e-5, atol=1e-7)
    found = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    expected_all = torch.autograd.grad(plain(x).square().mean(), list(plain.parameters()))
    for grad, e in zip(found, expected_all, strict=True):
        dist.all_reduce(e, dist.ReduceOp.AVG)
        torch.testing.assert_close(whole(grad), e, rtol=1e-5, atol=1e-7)


def asked_for_inputs_alone(m: nn.Module) -> None:
    x = rows(4, 16, seed=1).requires_grad_()
    torch.autograd.grad(m(x).square().mean(), x)
    m(x).square().mean().backward(inputs=[x])


def set_sync(m: nn.Module, synchronises: bool) -> None:
    if isinstance(m, FSDPModule):
        m.set_requires_gradient_sync(synchronises)


@FACTS
def gradients_that_were_not_asked_for_are_not_accumulated() -> None:
    """The one backward is without reductions, and the other reduces: it takes none of what was kept before."""
    model, plain = pair(MLP(depth=1))
    for m in (model, plain):
        set_sync(m, False)
        asked_for_inputs_alone(m)
        m(rows(4, 16)).square().mean().backward(inputs=[m.head.weight])
        set_sync(m, True)
        asked_for_inputs_alone(m)
        m(rows(4, 16, seed=2)).square().mean().backward()
    check_gradients(model, plain)


@FACTS
def a_parameter_that_is_frozen_between_forward_and_backward_has_no_gradient() -> None:
    model, plain = pair(MLP(depth=1))
    for m in (model, plain):
        loss = m(rows(4, 16)).square().mean()
        m.head.weight.requires_grad_(False)
        loss.backward()
        assert m.head.weight.grad is None
        m.head.weight.requires_grad_(True)
    check_gradients(model, plain)


@FACTS
def a_backward_in_a_block_of_autocast_computes_as_its_forward() -> None:
    model, plain = pair(MLP(depth=1))
    for m in (model, plain):
        loss = m(rows(4, 16)).square().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=m is model):
            loss.backward()
    check_gradients(model, plain)


@FACTS
def a_second_derivative_is_refused_and_training_goes_on() -> None:
    model, plain = pair(MLP(depth=1))
    for through in ("loss", "input"):
        x = rows(4, 16).requires_grad_()
        loss = model(x).square().mean()
        try:
            if through == "loss":
                loss.backward(create_graph=True)
            else:
                torch.autograd.grad(loss, x, create_graph=True)
        except graph_fsdp.UnsupportedError as error:
            assert "create_graph=True" in str(error) and "in the model's forward" in str(error)
        else:
            raise AssertionError("not refused")
    for m in (model, plain):
        m(rows(4, 16)).square().mean().backward()
    check_gradients(model, plain)


@FACTS
def a_batch_of_gradients_is_refused_and_one_after_another_are_not() -> None:
    model, plain = pair(MLP(depth=1))
    x = rows(2, 16)
    jacobian = torch.autograd.functional.jacobian
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"jacobian\(vectorize=True\)"):
        jacobian(lambda rows: model(rows).sum(0), x, vectorize=True)
    found, expected = jacobian(lambda rows: model(rows).sum(0), x), jacobian(lambda rows: plain(rows).sum(0), x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@dataclass
class Result:
    values: list[Tensor]


class Holder:
    def __init__(self, values: list[Tensor]) -> None:
        self.values = values


class Wrapping(MLP):
    """Returns its values in an object of a class that pytree does not know."""

    kind: Callable[[list[Tensor]], Any]

    def forward(self, x: Tensor) -> Any:
        return self.kind([super().forward(x)])


@FACTS
def backwards_that_are_refused_are_refused_of_any_object() -> None:
    for kind in (Result, Holder):
        model, plain = pair(Wrapping(depth=1))
        Wrapping.kind = kind
        for batched in (False, True):
            x = rows(4, 16).requires_grad_()
            y = model(x).values[0]
            directions = torch.eye(y.numel()).view(-1, *y.shape) if batched else torch.ones_like(y)
            with pytest.raises(graph_fsdp.UnsupportedError, match="goes through a model"):
                torch.autograd.grad(y, x, directions, is_grads_batched=batched, create_graph=not batched)
        for m in (model, plain):
            m(rows(4, 16)).values[0].square().mean().backward()
        check_gradients(model, plain)


@FACTS
def a_generator_through_a_discriminator() -> None:
    generator, plain_generator = pair(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
    critic, plain_critic = pair(MLP(depth=1))
    for step in range(2):
        for g, d in ((generator, critic), (plain_generator, plain_critic)):
            noise, real = rows(4, 8, seed=step), rows(4, 16, seed=step + 5)
            (d(real).mean() - d(g(noise).detach()).mean()).backward()
        assert all(p.grad is None for p in generator.parameters())
        check_gradients(critic, plain_critic)
        for g, d in ((generator, critic), (plain_generator, plain_critic)):
            d.requires_grad_(False)
            d(g(rows(4, 8, seed=step + 9))).mean().backward()
            d.requires_grad_(True)
        assert all(p.grad is None for p in critic.parameters())
        check_gradients(generator, plain_generator)


@FACTS
def evaluations_between_training_steps() -> None:
    model, plain = pair(nn.Sequential(MLP(depth=1), nn.Dropout(0.5), nn.Linear(5, 5)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
        with mode():
            outputs = [m.eval()(rows(4, 16, seed=step)) for m in (model, plain)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
        assert not outputs[0].requires_grad and outputs[0].is_inference() == (mode is torch.inference_mode)
        for m in (model, plain):
            torch.manual_seed(step)
            m.train()(rows(4, 16, seed=step + 7)).square().mean().backward()
        for (_, p), e in zip(model.named_parameters(), plain.parameters(), strict=True):
            dist.all_reduce(e.grad, dist.ReduceOp.AVG)
            torch.testing.assert_close(whole(p.grad), e.grad, rtol=1e-5, atol=1e-7)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.text, self.image = MLP(depth=1), MLP(depth=1)

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return scale * self.text(self.embed(x))

    def both(self, x: Tensor) -> Tensor:
        return self(x) + self.encode(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.image(self.embed(x))


@FACTS
def registered_methods_run_compiled() -> None:
    model, plain = pair(TwoTowers())
    for name in ("encode", "both"):
        register_fsdp_forward_method(model, name)
    for m in (model, plain):
        (m.encode(rows(4, 16), scale=2.0) * m(rows(4, 16))).mean().backward()
    check_gradients(model, plain)
    for m in (model, plain):
        m.both(rows(4, 16)).square().mean().backward()
    check_gradients(model, plain)
    with torch.no_grad():
        torch.testing.assert_close(model.encode(rows(4, 16)), plain.encode(rows(4, 16)), rtol=1e-5, atol=1e-7)
    assert model.encode.__name__ == "encode"
    assert len(graph_fsdp.inspect(model).graphs) == 4


@FACTS
def a_method_that_is_not_registered_calls_one_module_after_another() -> None:
    model, plain = pair(TwoTowers())
    for m in (model, plain):
        m.encode(rows(4, 16)).square().mean().backward()
    check_gradients(model, plain)
    with pytest.raises(RuntimeError, match="DTensor"):
        model.embed.weight @ rows(16, 4)
    with graph_fsdp.unsharded(model), torch.no_grad():
        torch.testing.assert_close(model.encode(rows(4, 16)), plain.encode(rows(4, 16)))


@FACTS
def units_can_be_called_by_themselves() -> None:
    model, plain = pair(MLP())
    for _ in range(2):
        for m in (model, plain):
            m.blocks[1](m.blocks[0](rows(4, 16))).square().mean().backward()
        check_gradients(model, plain)
    with torch.no_grad():
        torch.testing.assert_close(model.blocks[0](rows(4, 16)), plain.blocks[0](rows(4, 16)), rtol=1e-5, atol=1e-7)


@FACTS
def a_layer_in_the_place_of_another_is_in_the_model_twice() -> None:
    model, plain = pair(MLP())
    for m in (model, plain):
        m(rows(4, 16)).square().mean().backward()
        m.blocks[0] = m.blocks[1]
        m(rows(4, 16, seed=1)).square().mean().backward()
    check_gradients(model, plain)


@FACTS
def a_model_that_sets_attributes_in_its_forward() -> None:
    class Counts(MLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            self.seen = x.mean()
            return super().forward(x)

    model, plain = pair(Counts(depth=1))
    for m in (model, plain):
        for _ in range(2):
            m(rows(4, 16)).square().mean().backward()
    assert model.calls == plain.calls == 2
    assert torch.equal(model.seen, plain.seen)
    check_gradients(model, plain)


test_on_two_ranks = FACTS.on(2)
