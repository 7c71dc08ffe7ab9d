"""The ways in which users call models: against plain PyTorch, whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from facts import Facts, Failures, check
from models import MLP, llama
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
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


def gathers_of(model: nn.Module) -> int:
    return graph_fsdp.inspect(model).collectives.get("all_gather", 0)


def contrast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(model(x), dim=1), F.normalize(model(y), dim=1)
    return F.cross_entropy(a @ b.t(), torch.arange(len(x)))


@FACTS
def two_forwards_and_one_backward() -> None:
    model, plain = pair(MLP())
    for step in range(2):
        for m in (model, plain):
            contrast(m, rows(4, 16, seed=step), rows(4, 16, seed=step + 1)).backward()
        check_gradients(model, plain)


@FACTS
def two_forwards_of_different_shapes_and_a_backward_of_each() -> None:
    model, plain = pair(MLP())
    for m in (model, plain):
        first, second = m(rows(4, 16)), m(rows(6, 16))
        first.square().mean().backward()
        second.square().mean().backward()
    check_gradients(model, plain)


@FACTS
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


@FACTS
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


@FACTS
def a_second_derivative_is_refused_and_training_goes_on() -> None:
    model, plain = pair(MLP())
    for through in ("loss", "input"):
        x = rows(4, 16).requires_grad_()
        loss = model(x).square().mean()
        try:
            if through == "loss":
                loss.backward(create_graph=True)
            else:
                torch.autograd.grad(loss, x, create_graph=True)
        except graph_fsdp.UnsupportedError as error:
            assert "create_graph=True" in str(error) and "fully_shard" in str(error)
        else:
            raise AssertionError("not refused")
    for m in (model, plain):
        m(rows(4, 16)).square().mean().backward()
    check_gradients(model, plain)


@FACTS
def a_generator_through_a_discriminator() -> None:
    generator, plain_generator = pair(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16)))
    critic, plain_critic = pair(MLP())
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
    model, plain = pair(nn.Sequential(MLP(), nn.Dropout(0.5), nn.Linear(5, 5)))
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
        self.text, self.image = MLP(), MLP()

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
def a_method_that_is_not_registered_is_an_error_and_not_a_crash() -> None:
    model, plain = pair(TwoTowers())
    with pytest.raises(RuntimeError, match="DTensor"):
        model.encode(rows(4, 16))
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
def a_model_that_sets_attributes_in_its_forward() -> None:
    class Counts(MLP):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            self.seen = x.mean()
            return super().forward(x)

    model, plain = pair(Counts())
    for m in (model, plain):
        for _ in range(2):
            m(rows(4, 16)).square().mean().backward()
    assert model.calls == plain.calls == 2
    assert torch.equal(model.seen, plain.seen)
    check_gradients(model, plain)


def generate(model: Any, prompt: Tensor) -> Tensor:
    model.eval()
    return model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=True, pad_token_id=0)


@FACTS
def hugging_face_generation_with_a_cache() -> None:
    model, plain = pair(llama())
    prompt = torch.randint(1, 32, (2, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = generate(plain, prompt)
    assert torch.equal(generate(model, prompt), expected)
    before = gathers_of(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    units = gathers_of(model) - before
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert torch.equal(generate(model, prompt), expected)
    assert gathers_of(model) == before + units
    model.reshard()
    model.reset_iter_state()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    with graph_fsdp.unsharded(model):
        assert torch.equal(generate(model, prompt), expected)
    model.train()
    for m in (model, plain):
        m(input_ids=prompt, labels=prompt).loss.backward()
    check_gradients(model, plain)


def trained(prepare: Any, **options: Any) -> tuple[dict[str, Tensor], int]:
    """Parameters after two steps of two microbatches, and how many gathers they took. ``prepare(model, step, last)``
    is called before each microbatch."""
    torch.manual_seed(0)
    model = graph_fsdp.compile(MLP(depth=3), backend="eager", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for last in (False, True):
            prepare(model, step, last)
            model(rows(4, 16, seed=2 * step + last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return found, gathers_of(model)


def fsdp2_trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MLP(depth=3)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        for last in (False, True):
            model(rows(4, 16, seed=2 * step + last)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def units_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _unshard_all(model: Any, step: int, last: bool) -> None:
    for unit in units_of(model):
        unit.unshard()


def _unshard_first(model: Any, step: int, last: bool) -> None:
    handles = [model.blocks[0].unshard(async_op=True), model.unshard(async_op=True)]
    if step == 1:
        handles[0].wait()
        assert not isinstance(model.blocks[0].up.weight, DTensor) and isinstance(model.head.weight, DTensor)


def _stay_after_backward(model: Any, step: int, last: bool) -> None:
    model.set_reshard_after_backward(last)


def _stay_one_after_backward(model: Any, step: int, last: bool) -> None:
    model.blocks[1].set_reshard_after_backward(last, recurse=False)


def _evaluate_without_gathers(model: Any, step: int, last: bool) -> None:
    if step == last == 0:
        model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(rows(4, 16))
        gathered = gathers_of(model)
        model(rows(4, 16, seed=1))
        assert gathers_of(model) == gathered


def once(change: Any) -> Any:
    def prepare(model: Any, step: int, last: bool) -> None:
        if step == last == 0:
            change(model)

    return prepare


# What is set → the number of gathers in 2 steps of 2 microbatches. 4 units, and
# the one that is gathered last is kept from forward to backward.
SETTINGS: dict[str, tuple[Any, int]] = {
    "nothing": (lambda *_: None, 4 * 7),
    "unshard() of all units": (_unshard_all, 4 * 4),
    "unshard(async_op=True)": (_unshard_first, 4 * 5),
    "set_reshard_after_backward(False) in accumulation": (_stay_after_backward, 2 * 4),
    "set_reshard_after_backward(False) of one unit": (_stay_one_after_backward, 4 * 5 + 2),
    "set_reshard_after_forward(True)": (once(lambda m: m.set_reshard_after_forward(True)), 4 * 8),
    "set_reshard_after_forward(False)": (once(lambda m: m.set_reshard_after_forward(False)), 4 * 4),
    "set_reshard_after_forward(False) of one": (once(lambda m: m.blocks[0].set_reshard_after_forward(False)), 4 * 6),
    "evaluations in between": (_evaluate_without_gathers, 4 * 4),
    "forward prefetch": (once(lambda m: m.blocks[0].set_modules_to_forward_prefetch([*m.blocks[1:], m])), 4 * 7),
    "backward prefetch": (
        once(lambda m: m.blocks[2].set_modules_to_backward_prefetch([m.blocks[1], m.blocks[0]])),
        4 * 7,
    ),
}


@FACTS
def settings_change_gathers_and_not_numbers() -> None:
    """Bit for bit FSDP2's."""
    expected = fsdp2_trained()
    for name, (prepare, gathers) in SETTINGS.items():
        torch._dynamo.reset()
        found, counted = trained(prepare)
        assert counted == gathers, f"{name}: {counted} gathers and not {gathers}"
        for parameter, value in found.items():
            assert torch.equal(value, expected[parameter]), f"{name}: {parameter}"


@FACTS
def whole_parameters_are_plain_and_what_is_written_to_them_is_read() -> None:
    model, plain = pair(MLP())
    x = rows(4, 16)
    model.blocks[0].unshard()
    weight = model.blocks[0].up.weight
    assert type(weight) is nn.Parameter and torch.equal(weight, plain.blocks[0].up.weight)
    assert isinstance(model.head.weight, DTensor), "not recursive, as in FSDP2"
    with torch.no_grad():
        weight.zero_()
        plain.blocks[0].up.weight.zero_()
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-7)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values()), "state_dict() reshards"
    assert whole(model.blocks[0].up.weight).abs().sum() > 0, "what is written is lost"


@FACTS
def a_block_of_unsharded_keeps_what_is_written() -> None:
    model, plain = pair(MLP(), mp_policy=torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    saved = {name: value.clone() for name, value in plain.state_dict().items()}
    with graph_fsdp.unsharded(model):
        found = model.state_dict()
        assert all(torch.equal(found[name], saved[name]) for name in saved), "in full precision"
        model.head.weight.data.mul_(2)
        model.blocks[0].up.bias.requires_grad_(False)
        assert model(rows(4, 16)).dtype is torch.bfloat16
        with pytest.raises(RuntimeError, match=r"in a block of graph_fsdp\.unsharded"):
            model.reshard()
    assert torch.equal(whole(model.head.weight), 2 * saved["head.weight"])
    assert torch.equal(whole(model.blocks[1].up.weight), saved["blocks.1.up.weight"])
    assert not model.blocks[0].up.bias.requires_grad
    with graph_fsdp.unsharded(model.blocks[0], writeback=False):
        model.blocks[0].up.weight.data.zero_()
        assert isinstance(model.head.weight, DTensor)
    assert torch.equal(whole(model.blocks[0].up.weight), saved["blocks.0.up.weight"])
    with pytest.raises(KeyError), graph_fsdp.unsharded(model):
        model.head.weight.data.zero_()
        raise KeyError
    assert torch.equal(whole(model.head.weight), 2 * saved["head.weight"]), "nothing is kept of a block that raises"


@FACTS
def a_whole_parameter_that_is_out_of_date_is_an_error() -> None:
    model, _ = pair(MLP())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_reshard_after_backward(False)
    model(rows(4, 16)).sum().backward()
    optimizer.step()
    with pytest.raises(graph_fsdp.ParameterChangedError, match=r"'blocks.0.up.weight' changed .* call reshard\(\)"):
        model(rows(4, 16))
    model.set_reshard_after_backward(True)
    for unit in units_of(model):
        unit.reshard()
    model(rows(4, 16)).sum().backward()


@FACTS
def resharding_between_forward_and_backward_changes_nothing() -> None:
    model, plain = pair(MLP())
    _unshard_all(model, 0, False)
    losses = [m(rows(4, 16)).square().mean() for m in (model, plain)]
    for unit in units_of(model):
        unit.reshard()
    for loss in losses:
        loss.backward()
    check_gradients(model, plain)


@pytest.fixture(scope="module")
def ranks() -> Failures:
    return FACTS.check_on(2)


@pytest.mark.parametrize("name", FACTS.names)
def test_on_two_ranks(ranks: Failures, name: str) -> None:
    check(ranks, name)


def test_whole_parameters_in_one_process() -> None:
    model, plain = pair(MLP())
    x = torch.randn(4, 16)
    for unit in units_of(model):
        unit.unshard()
        unit.set_reshard_after_forward(False)
    for m in (model, plain):
        m(x).square().mean().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    with graph_fsdp.unsharded(model):
        model.head.weight.data.zero_()
    assert not model.head.weight.any()
