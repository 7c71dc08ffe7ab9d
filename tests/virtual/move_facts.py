"""A model that is moved to the CPU, as where an accelerator is lent to a model that generates, and back."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_devices import Training, local, on_cpu, on_virtual, ours
from models import MLP, WIDTH
from reference import fsdp2
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from virtual.machine import Machine

import graph_fsdp

mlp = functools.partial(MLP, depth=2)
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "offloaded": {"offload_policy": torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)},
}


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def memory() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    return torch.accelerator.memory_allocated()


def move(training: Training, device: str) -> None:
    """As trainers of reinforcement learning do."""
    training.model.to(device)
    for state in training.optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.to(device)


def train(
    options: dict[str, Any], away: Callable[[Training], Any], distribute: dict[str, Any] | None = None
) -> list[Tensor]:
    def run(device: str) -> list[Tensor]:
        training = Training(lambda model: ours(model, **options), mlp, batch, device)
        if distribute is not None:
            graph_fsdp.distribute_optimizer(training.optimizer, **distribute)
        losses = training.values(2)
        away(training)
        return losses + training.values(3)

    return on_virtual(Machine(), run)


def there_and_back(training: Training) -> None:
    move(training, "cpu")
    assert memory() < 1024, "what is left on the device: the generator of random numbers and the like"
    with pytest.raises(graph_fsdp.ParameterChangedError, match=r"moved to cpu and runs on virtual.*model.to\('virtual"):
        training.model(torch.zeros(4, WIDTH, device="virtual"))
    assert all(p.device.type == "cpu" for p in training.model.state_dict().values())
    move(training, "virtual")


def step_there(training: Training) -> None:
    training.loss().backward()
    move(training, "cpu")
    training.optimizer.step()
    training.optimizer.zero_grad()
    move(training, "virtual")


OPTIMIZERS: list[dict[str, Any] | None] = [None, {}, {"gather_ahead": 1}]  # what ``distribute_optimizer`` is given


class Stepped(TorchDispatchMode):
    """Counts the tensors that a step of AdamW updates."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_foreach_addcdiv_" in str(func):
            self.count += len(args[0])
        return func(*args, **(kwargs or {}))


def stayed(between: Callable[[Training], Any] = lambda _: None) -> list[Tensor]:
    """What ``train`` gives for a model that is not moved: FSDP2's numbers on the CPU, for which nothing is compiled."""

    def run(device: str) -> list[Tensor]:
        training = Training(fsdp2, mlp, batch, device)
        losses = training.values(2)
        between(training)
        return losses + training.values(3)

    found: list[Tensor] = on_cpu(run)
    return found


def check_moved(options: str, distribute: dict[str, Any] | None) -> None:
    found = train(OPTIONS[options], there_and_back, distribute)
    assert all(torch.equal(*pair) for pair in zip(stayed(), found, strict=True))


def a_model_that_is_moved_away_takes_no_memory_and_trains_on_when_it_is_back() -> None:
    check_moved("default", {})


def so_does_a_model_with_other_options_and_optimizers() -> None:
    for options, distribute in itertools.product(("default", "kept"), OPTIMIZERS):
        check_moved(options, distribute)


def a_copy_trains_on_as_the_model_which_takes_no_memory_when_it_is_gone() -> None:
    def exchange(training: Training) -> None:
        before = memory()
        copied = copy.deepcopy((training.model, training.optimizer))
        held.append(memory() / before)
        training.model, training.optimizer = copied
        assert memory() == before

    held: list[float] = []
    for options in OPTIONS.values():
        found = train(options, exchange)
        assert all(torch.equal(*pair) for pair in zip(stayed(), found, strict=True))
    assert held[0] == held[1] > 1.2 and held[2] == 1, f"what is offloaded is not on the device: {held}"


def an_optimizer_steps_where_the_model_is_and_slices_again_when_it_is_back() -> None:
    def stepped(training: Training) -> None:
        step_there(training)
        training.loss().backward()
        with Stepped() as seen:
            training.optimizer.step()
        training.optimizer.zero_grad()
        assert 0 < seen.count < len(list(training.model.parameters()))

    expected = stayed(lambda training: (training.step(), training.step()))
    torch.testing.assert_close(train({}, stepped, {}), expected)


def other_optimizers_step_where_the_model_is() -> None:
    for distribute in (None, {"gather_ahead": 1}):
        expected = stayed(lambda training: training.step())
        torch.testing.assert_close(train({}, step_there, distribute), expected)


def shards_that_live_on_the_host_stay_there() -> None:
    found = train(OPTIONS["offloaded"], lambda training: training.model.to("cpu"))
    assert all(torch.equal(*pair) for pair in zip(stayed(), found, strict=True))


def rows_of(training: Training) -> dict[str, Any]:
    return {name: value.detach() + 1 for name, value in training.model.state_dict().items()}


def whole(training: Training) -> dict[str, Any]:
    torch.manual_seed(1)
    return mlp().to(training.device).state_dict()


def assign(training: Training, state: dict[str, Any]) -> None:
    training.model.load_state_dict(state, assign=True)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-2)


def gradients(training: Training) -> None:
    training.loss().backward()
    training.seen += [local(p.grad) for p in training.model.parameters() if p.grad is not None]


def assigned_at_home(make: Callable[[Training], dict[str, Any]], training: Training) -> None:
    assign(training, make(training))
    gradients(training)


def assigned_while_away(make: Callable[[Training], dict[str, Any]], training: Training) -> None:
    state = make(training)
    training.model.to("cpu")
    assign(training, state)
    gradients(training)


def assigned_there_and_moved_back(make: Callable[[Training], dict[str, Any]], training: Training) -> None:
    state = make(training)
    assign(training, state)
    training.model.to("cpu")
    there = {name: value.cpu() for name, value in state.items()}
    del state
    assert memory() < 1024
    assign(training, there)
    with pytest.raises(graph_fsdp.ParameterChangedError, match="moved to cpu and runs on virtual"):
        training.model(torch.zeros(4, WIDTH, device="virtual"))
    training.model.to("virtual")
    gradients(training)


def values_assigned_on_the_device_bring_a_model_back() -> None:
    for make in (rows_of, whole):
        runs = (assigned_at_home, assigned_while_away, assigned_there_and_moved_back)
        expected, *found = (train({}, functools.partial(run, make)) for run in runs)
        assert all(torch.equal(*pair) for values in found for pair in zip(expected, values, strict=True))


def values_assigned_to_a_part_bring_a_model_back_in_part() -> None:
    def run(training: Training) -> None:
        name, value = next(iter(rows_of(training).items()))
        training.model.to("cpu")
        training.model.load_state_dict({name: value}, strict=False, assign=True)
        with pytest.raises(graph_fsdp.ParameterChangedError, match=r"moved to cpu, virtual:0 and runs on virtual"):
            training.model(torch.zeros(4, WIDTH, device="virtual"))
        training.model.to("virtual")

    train({}, run)


class Weighted(MLP):
    """Finds all tensors that it is given on its own device, and the sizes of a packed sequence on the host."""

    def forward(self, given: dict[str, Tensor], *, packed: PackedSequence) -> Tensor:  # type: ignore[override]
        where = self.head.weight.device
        assert given["x"].device == given["weight"].device == packed.data.device == where
        assert packed.batch_sizes.device.type == "cpu"
        return super().forward(given["x"]) * given["weight"] * packed.data[0]


class FromTheHost(Training):
    def loss(self) -> Tensor:
        packed = pack_sequence([torch.full((2,), 2.0), torch.ones(1)])
        given = {"x": self.make_batch(self.generator), "weight": torch.tensor(0.5)}
        return self.model(given, packed=packed).square().mean()


def inputs_on_the_host_are_copied_to_the_device() -> None:
    def run(shard: Callable[..., nn.Module], device: str) -> list[Tensor]:
        return FromTheHost(shard, Weighted, batch, device).values(2)

    for shard in (ours, fsdp2):
        found, expected = (on(functools.partial(run, shard)) for on in (lambda f: on_virtual(Machine(), f), on_cpu))
        assert all(map(torch.equal, found, expected))


FOUND = (
    inputs_on_the_host_are_copied_to_the_device,
    a_model_that_is_moved_away_takes_no_memory_and_trains_on_when_it_is_back,
    an_optimizer_steps_where_the_model_is_and_slices_again_when_it_is_back,
    values_assigned_on_the_device_bring_a_model_back,
)
LONG = (
    values_assigned_to_a_part_bring_a_model_back_in_part,
    so_does_a_model_with_other_options_and_optimizers,
    a_copy_trains_on_as_the_model_which_takes_no_memory_when_it_is_gone,
    other_optimizers_step_where_the_model_is,
    shards_that_live_on_the_host_stay_there,
)
