"""``graph_fsdp.distribute_optimizer``: the bits of the optimizer without it, in steps over few tensors."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim.optimizer import Optimizer

import graph_fsdp

WORLD_SIZE, STEPS = 8, 3
Make = Callable[[Any], Optimizer]


class Net(nn.Module):
    """Small and large parameters, padded ones, one that is not divided, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(33, 64), nn.LayerNorm(64)
        self.large, self.last = nn.Linear(64, 4096), nn.Linear(4096, 13)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.large(self.norm(self.first(x)))) * self.scale


@pytest.fixture
def make_model(fake_group: None) -> Callable[..., nn.Module]:
    def make(**options: Any) -> nn.Module:
        torch.manual_seed(0)
        return graph_fsdp.compile(Net(), init_device_mesh("cpu", (WORLD_SIZE,)), backend="eager", **options)

    return make


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def give_gradients(model: nn.Module, seed: int, without: tuple[str, ...] = ()) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        gradient = torch.randn(local(p).shape, generator=generator)
        assert isinstance(p, DTensor)
        whole = DTensor.from_local(gradient, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        p.grad = None if name in without else whole


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(STEPS), frozen: tuple[str, ...] = ()) -> None:
    """Step with gradients that a number gives; in the second step, ``frozen`` have none."""
    for step in steps:
        give_gradients(model, step, frozen if step == 1 else ())
        optimizer.step()
        optimizer.zero_grad()


def assert_same(found: Any, expected: Any) -> None:
    found, expected = local(found), local(expected)
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def assert_same_training(model: nn.Module, optimizer: Optimizer, expected: nn.Module, other: Optimizer) -> None:
    assert_same(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert_same(optimizer.state_dict(), other.state_dict())


class Lion(Optimizer):
    """Lion (Chen et al., 2023, algorithm 2), whose groups count their steps."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] = len(group["params"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                average = state.setdefault("exp_avg", torch.zeros_like(p))
                state["steps"] = state.get("steps", 0) + 1
                p.add_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                average.lerp_(p.grad, 0.01)


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, foreach, amsgrad": lambda p: optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "AdamW, fused": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.01),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01),
}


@pytest.mark.parametrize("frozen", [(), ("norm.weight",)], ids=["all", "one has no gradient for a step"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_have_the_bits_of_the_optimizer_alone(
    make_model: Callable[..., nn.Module], make: Make, frozen: tuple[str, ...]
) -> None:
    model, expected = make_model(), make_model()
    optimizer, other = graph_fsdp.distribute_optimizer(make(model.parameters())), make(expected.parameters())
    train(model, optimizer, frozen=frozen)
    train(expected, other, frozen=frozen)
    assert_same_training(model, optimizer, expected, other)


def test_what_the_optimizer_is_stays(make_model: Callable[..., nn.Module]) -> None:
    optimizer = optim.AdamW(make_model().parameters())
    assert graph_fsdp.distribute_optimizer(optimizer) is optimizer
    assert isinstance(optimizer, optim.AdamW)
    assert type(optimizer).__name__ == "AdamW" and repr(optimizer).startswith("AdamW (")


def test_small_neighbours_are_stepped_as_one(make_model: Callable[..., nn.Module]) -> None:
    """Lion, which is declared element-wise, counts what it finds: the small parameters before ``large.weight``, which
    has 64 KiB and more on each rank, what follows it, and the scalar."""
    model, expected = make_model(auto_wrap_policy={nn.Linear}), make_model(auto_wrap_policy={nn.Linear})
    optimizer = graph_fsdp.distribute_optimizer(Lion(model.parameters()), element_wise=True)
    other = Lion(expected.parameters())
    train(model, optimizer)
    train(expected, other)
    assert (optimizer.param_groups[0]["seen"], other.param_groups[0]["seen"]) == (3, 9)
    optimizer.param_groups[0]["seen"] = 9
    assert_same_training(model, optimizer, expected, other)


def test_states_are_views_of_one_tensor(make_model: Callable[..., nn.Module]) -> None:
    """Neighbours' states lie as the neighbours do; what is saved of each has its own bytes only."""
    model: Any = make_model()
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()))
    train(model, optimizer)
    weight, bias = (local(optimizer.state[p]["exp_avg"]) for p in (model.norm.weight, model.norm.bias))
    apart = local(model.norm.bias).data_ptr() - local(model.norm.weight).data_ptr()
    assert bias.data_ptr() - weight.data_ptr() == apart
    assert weight.untyped_storage().nbytes() == weight.nbytes
    file = io.BytesIO()
    torch.save(optimizer.state_dict()["state"][2], file)
    assert len(file.getvalue()) < 6000


def test_a_state_is_loaded_and_goes_on(make_model: Callable[..., nn.Module]) -> None:
    """Into a distributed optimizer from one that is not, and back."""
    first, second, expected = make_model(), make_model(), make_model()
    plain, reference = optim.AdamW(first.parameters()), optim.AdamW(expected.parameters())
    train(first, plain, range(2))
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(second.parameters()))
    train(second, optimizer, range(5, 6))  # has a state of its own
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    second.load_state_dict(first.state_dict())
    train(second, optimizer, range(2, 4))
    train(expected, reference, range(4))
    assert_same_training(second, optimizer, expected, reference)

    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first.load_state_dict(second.state_dict())
    train(first, plain, range(4, 6))
    train(expected, reference, range(4, 6))
    assert_same_training(first, plain, expected, reference)


def test_an_optimizer_that_has_stepped_can_be_distributed(make_model: Callable[..., nn.Module]) -> None:
    model, expected = make_model(), make_model()
    optimizer, other = (optim.AdamW(m.parameters(), lr=0.01) for m in (model, expected))
    train(model, optimizer, range(2))
    graph_fsdp.distribute_optimizer(optimizer)
    train(model, optimizer, range(2, 4))
    train(expected, other, range(4))
    assert_same_training(model, optimizer, expected, other)


def test_groups_settings_and_parameters_that_come_later(make_model: Callable[..., nn.Module]) -> None:
    def trained(distribute: bool) -> tuple[nn.Module, Optimizer]:
        model: Any = make_model()
        other = nn.Parameter(torch.ones(3))
        groups = [{"params": [model.norm.weight, other], "lr": 0.1}, {"params": [*model.large.parameters()]}]
        optimizer = optim.AdamW(groups, lr=0.01)
        if distribute:
            graph_fsdp.distribute_optimizer(optimizer)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": [model.norm.bias, model.first.bias], "lr": 0.3})
            other.grad = torch.full((3,), 0.5)
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        return model, optimizer

    assert_same_training(*trained(True), *trained(False))


@pytest.mark.parametrize("given", [(0, 1, 2, 3), (2,)], ids=["always", "once"])
def test_a_group_with_another_dtensor_is_stepped_as_before(
    make_model: Callable[..., nn.Module], given: tuple[int, ...]
) -> None:
    """In steps in which a DTensor that no compiled model has is ``given`` a gradient. What runs shared, is counted for
    each parameter then."""

    def trained(distribute: bool) -> tuple[nn.Module, Optimizer]:
        model: Any = make_model()
        mesh = model.norm.weight.device_mesh
        other = nn.Parameter(distribute_tensor(torch.ones(8), mesh, [Replicate()]))
        groups = [{"params": [*model.norm.parameters(), other], "foreach": True}, {"params": [model.last.bias]}]
        optimizer = optim.AdamW(groups, lr=0.01)
        if distribute:
            graph_fsdp.distribute_optimizer(optimizer)
        for step in range(4):
            other.grad = distribute_tensor(torch.full((8,), 0.5), mesh, [Replicate()]) if step in given else None
            train(model, optimizer, range(step, step + 1))
        return model, optimizer

    assert_same_training(*trained(True), *trained(False))


def test_parameters_that_load_state_dict_has_assigned_are_stepped(make_model: Callable[..., nn.Module]) -> None:
    model, expected = make_model(), make_model()
    model.load_state_dict(copy.deepcopy(expected.state_dict()), assign=True)  # and no forward since
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), lr=0.01))
    other = optim.AdamW(expected.parameters(), lr=0.01)
    train(model, optimizer)
    train(expected, other)
    assert_same_training(model, optimizer, expected, other)


def test_hooks_run_once_and_see_parameters(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()))
    seen: list[Any] = []

    def note(given: Any, *_: Any) -> None:
        seen.append([given is optimizer, len(given.param_groups[0]["params"])])

    optimizer.register_step_pre_hook(note)
    optimizer.register_step_post_hook(note)
    train(model, optimizer, range(1))
    assert seen == [[True, 9]] * 2


def test_a_closure_gives_the_loss(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(2, 33)

    def closure() -> float:
        loss = model(x).square().mean()
        loss.backward()
        return float(loss)

    assert isinstance(optimizer.step(closure), float)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_copies_are_plain_and_share_nothing(make_model: Callable[..., nn.Module], how: str) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()))
    train(model, optimizer)
    if how == "deepcopy":
        copied = copy.deepcopy(optimizer)
    else:
        file = io.BytesIO()
        torch.save(optimizer, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert type(copied) is optim.AdamW
    assert_same(copied.state_dict(), optimizer.state_dict())
    counts = [state["step"] for state in copied.state.values()]
    assert len({value.data_ptr() for value in counts}) == len(counts)


def test_a_step_is_seen_as_a_write_to_parameters(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    give_gradients(model, 0)
    squares = [(p * p).sum() for p in model.parameters()]
    optimizer.step()
    for square in squares:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.backward()


def test_a_step_that_fails_leaves_everything_in_place(make_model: Callable[..., nn.Module]) -> None:
    model, expected = make_model(), make_model()
    optimizer, other = (graph_fsdp.distribute_optimizer(optim.AdamW(m.parameters())) for m in (model, expected))
    train(model, optimizer, range(1))
    give_gradients(model, 1)
    betas = optimizer.param_groups[0]["betas"]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = betas
    train(model, optimizer, range(1, 3))
    train(expected, other)
    assert_same_training(model, optimizer, expected, other)


def test_offloaded_shards_are_stepped_where_they_are(make_model: Callable[..., nn.Module]) -> None:
    model, expected = (make_model(offload_policy=CPUOffloadPolicy(pin_memory=False)) for _ in range(2))
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()))
    other = optim.AdamW(expected.parameters())
    train(model, optimizer)
    train(expected, other)
    assert_same_training(model, optimizer, expected, other)


@pytest.mark.parametrize("before", ["", "the model is cast", "data is assigned"])
def test_a_model_on_one_process(before: str) -> None:
    dtype = torch.float64 if before == "the model is cast" else torch.float32

    def trained(distribute: bool) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = graph_fsdp.compile(Net(), backend="eager").to(dtype)
        optimizer: Optimizer = optim.AdamW(model.parameters(), lr=0.01)
        if distribute:
            graph_fsdp.distribute_optimizer(optimizer)
        for step in range(STEPS):
            x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step), dtype=dtype)
            model(x).square().mean().backward()
            for p in model.parameters() if before == "data is assigned" else ():
                p.data = p.data * 0.9
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    assert not dist.is_initialized()
    assert_same_training(*trained(True), *trained(False))


def test_it_does_not_keep_a_model(make_model: Callable[..., nn.Module]) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters()))
    train(model, optimizer)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class NotElementWise(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Rprop(p, lr=0.01),
        lambda p: optim.SGD(p, lr=0.1, fused=True),
        lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    ],
    ids=["Rprop", "SGD, fused", "Adagrad, fused"],
)
def test_what_fails_on_dtensors_has_the_bits_of_plain_shards(make_model: Callable[..., nn.Module], make: Make) -> None:
    model = make_model()
    optimizer = graph_fsdp.distribute_optimizer(make(model.parameters()))
    shards = [nn.Parameter(local(p).clone()) for p in model.parameters()]
    plain = make(shards)
    for step in range(STEPS):
        give_gradients(model, step)
        for shard, p in zip(shards, model.parameters(), strict=True):
            shard.grad = local(p.grad).clone()
        optimizer.step()
        plain.step()
    for p, shard in zip(model.parameters(), shards, strict=True):
        assert torch.equal(local(p), shard)
