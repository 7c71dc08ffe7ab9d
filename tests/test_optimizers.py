"""Optimizers, averages and loss scaling on sharded parameters: three steps on two ranks equal one process on both
batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from facts import Facts
from models import MLP
from torch import Tensor, nn, optim
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import swa_utils

import graph_fsdp

WORLD_SIZE, STEPS = 2, 3
FACTS = Facts(__name__)
Train = Callable[[nn.Module, Iterator[Tensor]], dict[str, Tensor]]


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p) for name, p in model.named_parameters()}


def build_mlp(sharded: bool) -> nn.Module:
    torch.manual_seed(0)
    return MLP()


def agree_with_one_process(
    train: Train, tolerance: float = 1e-6, build: Callable[[bool], nn.Module] = build_mlp, **options: object
) -> None:
    """``train`` a model alone on whole batches, and sharded on this rank's parts of them. ``build``: whether it will be
    sharded → the model."""

    def batches(sharded: bool) -> Iterator[Tensor]:
        for step in range(STEPS):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            yield batch.chunk(WORLD_SIZE)[dist.get_rank()] if sharded else batch

    expected = train(build(False), batches(sharded=False))
    model = graph_fsdp.compile(build(True), backend="eager", **options)  # type: ignore[arg-type]
    found = train(model, batches(sharded=True))
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=tolerance, atol=tolerance)


def steps_with(make: Callable[[nn.Module], optim.Optimizer]) -> Train:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        optimizer = make(model)
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    return train


@FACTS
def sgd_with_momentum() -> None:
    agree_with_one_process(steps_with(lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9)))


@FACTS
def adamw() -> None:
    agree_with_one_process(steps_with(lambda m: optim.AdamW(m.parameters(), lr=0.01)))


@FACTS
def adamw_foreach() -> None:
    agree_with_one_process(steps_with(lambda m: optim.AdamW(m.parameters(), lr=0.01, foreach=True)))


@FACTS
def adamw_fused() -> None:
    agree_with_one_process(steps_with(lambda m: optim.AdamW(m.parameters(), lr=0.01, fused=True)))


@FACTS
def adamw_over_slices_of_the_storage() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        return graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), lr=0.01, foreach=True))

    def alone_or_sharded(model: nn.Module) -> optim.Optimizer:
        plain = not isinstance(next(model.parameters()), DTensor)
        return optim.AdamW(model.parameters(), lr=0.01, foreach=True) if plain else make(model)

    agree_with_one_process(steps_with(alone_or_sharded))


@FACTS
def adadelta() -> None:
    agree_with_one_process(steps_with(lambda m: optim.Adadelta(m.parameters(), lr=0.1)))


@FACTS
def groups_with_settings_of_their_own() -> None:
    def make(model: nn.Module) -> optim.Optimizer:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in model.named_parameters() if not name.endswith("bias")]
        return optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}], lr=0.01)

    agree_with_one_process(steps_with(make))


@FACTS
def steps_in_hooks_after_each_gradient() -> None:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        optimizers = {p: optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(p: Tensor) -> None:
            optimizers[p].step()  # type: ignore[index]
            optimizers[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for batch in batches:
            model(batch).square().mean().backward()
        assert all(p.grad is None for p in model.parameters())
        return parameters(model)

    agree_with_one_process(train)


@FACTS
def an_average_of_the_parameters() -> None:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        average = {name: p.detach().clone() for name, p in model.named_parameters()}
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                average[name].lerp_(p.detach(), 0.1)
        return {name: full(value) for name, value in average.items()}

    agree_with_one_process(train)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, by Newton and Schulz: it takes the whole matrix."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.mT if (tall := x.shape[0] > x.shape[1]) else x
    for _ in range(5):
        product = x @ x.mT
        x = 1.5 * x - 0.5 * product @ x
    return x.mT if tall else x


@FACTS
def a_model_of_averages_that_is_compiled_too() -> None:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        averages = made.pop()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            averages.update_parameters(model)
        with torch.no_grad():
            return {**parameters(averages.module), "evaluated": averages(torch.ones(2, 16))}

    def build(sharded: bool) -> nn.Module:
        torch.manual_seed(0)
        model = MLP()
        made.append(swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)))
        if sharded:
            graph_fsdp.compile(made[-1].module, backend="eager")
        return model

    made: list[swa_utils.AveragedModel] = []
    agree_with_one_process(train, build=build)


@FACTS
def an_optimizer_that_needs_whole_matrices() -> None:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        for batch in batches:
            model(batch).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.dim() == 2:
                        update = orthogonal(full(p.grad))  # type: ignore[arg-type]
                        if isinstance(p, DTensor):
                            update = distribute_tensor(update, p.device_mesh, p.placements)
                        p.sub_(0.02 * update)
                    p.grad = None
        return parameters(model)

    agree_with_one_process(train, tolerance=1e-5)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1)


def fused_over_slices(model: nn.Module) -> optim.Optimizer:
    return graph_fsdp.distribute_optimizer(optim.AdamW(model.parameters(), lr=0.1, fused=True))


def scaled_steps(
    model: nn.Module,
    batches: Iterator[Tensor],
    poisoned: int | None = None,
    make: Callable[[nn.Module], optim.Optimizer] = sgd,
) -> list[float]:
    """Steps with loss scaling and clipping; the scale after each. The last rank's batch of step ``poisoned`` overflows
    float16."""
    optimizer = make(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, batch in enumerate(batches):
        if step == poisoned and dist.get_rank() == WORLD_SIZE - 1:
            batch = batch * 1e6
        scaler.scale(model(batch).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


HALF = MixedPrecisionPolicy(param_dtype=torch.float16)


@FACTS
def float16_with_loss_scaling() -> None:
    def train(model: nn.Module, batches: Iterator[Tensor]) -> dict[str, Tensor]:
        assert scaled_steps(model, batches) == [1024.0] * STEPS
        return parameters(model)

    agree_with_one_process(train, tolerance=1e-3, mp_policy=HALF)


@FACTS
def an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    for make in (sgd, fused_over_slices):  # the fused kernel is told of the overflow, and skips by itself
        model = graph_fsdp.compile(MLP(), backend="eager", mp_policy=HALF)
        before = parameters(model)
        (scale,) = scaled_steps(model, iter([torch.randn(4, 16)]), poisoned=0, make=make)
        assert scale == 512.0
        after = parameters(model)
        assert all(torch.equal(before[name], after[name]) for name in before)


test_on_two_ranks = FACTS.on(WORLD_SIZE)
