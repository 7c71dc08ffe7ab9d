"""The numbers: sharded training equals training on one process, and one step equals FSDP2's bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from marks import mostly_long, selected
from models import CASES, loss_of
from reference import (
    OPTIMIZERS,
    RANK_SEED,
    Outcomes,
    Step,
    check_close,
    gradients_of,
    outcomes_of,
    parameters_of,
    rows_of,
    train_all,
    train_reference,
)
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graph_fsdp
from graph_fsdp.units import find_units

STEPS = [Step(rows=4)] * 20


# Against one process, which sees the rows of all ranks as one batch


def check_training(ranks: Outcomes, name: str, optimizer: str, bound: float) -> None:
    outcomes = outcomes_of(ranks, name)
    (expected,) = train_reference(name, STEPS, optimizer, world_size=len(ranks), global_batch=True)
    for outcome in outcomes[1:]:
        for key, value in outcomes[0].parameters.items():
            assert torch.equal(outcome.parameters[key], value), f"ranks hold different values of {key}"
    mean_losses = torch.stack([torch.stack(outcome.losses) for outcome in outcomes]).mean(0)
    assert expected.losses[-1] < expected.losses[0], "a reference that does not learn proves little"
    check_close(dict(enumerate(mean_losses)), dict(enumerate(expected.losses)), bound, "losses")
    check_close(outcomes[0].parameters, expected.parameters, bound, "parameters")


TRAINED = ["mlp", "gpt_tied", "uneven"]


@pytest.fixture(scope="module")
def eager_outcomes() -> Outcomes:
    return run_ranks(train_all, 2, selected(TRAINED, __name__, "name"), STEPS, "adamw", {"backend": "eager"})


@pytest.mark.parametrize("name", mostly_long(TRAINED, ["uneven"]))
def test_twenty_steps_on_two_ranks_equal_one_process(eager_outcomes: Outcomes, name: str) -> None:
    check_training(eager_outcomes, name, "adamw", bound=1e-5)


@pytest.mark.long
def test_twenty_steps_with_inductor_equal_one_process() -> None:
    # Inductor fuses kernels and reorders their float32 sums, which Adam's division amplifies: hence 1e-4.
    ranks = run_ranks(train_all, 2, ["gpt_of_one_block"], STEPS, "adamw", {"backend": "inductor"})
    check_training(ranks, "gpt_of_one_block", "adamw", bound=1e-4)


# Against FSDP2, on the same two ranks with the same units


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    for unit in find_units(model):
        if unit.modules[unit.name] is not model:
            fully_shard(unit.modules[unit.name], **options)
    return fully_shard(model, **options)


def ours(model: nn.Module, **options: Any) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", **options)


def steps_with(
    shard: Callable[..., nn.Module],
    name: str,
    optimizer: str,
    microbatches: int,
    steps: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Losses and gradients of the last step, and parameters after it."""
    case, rank, world_size, rows = CASES[name], dist.get_rank(), dist.get_world_size(), 4
    model = shard(case.model(), **options)
    stepper = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(RANK_SEED + rank)
    for step in range(steps):
        stepper.zero_grad()
        losses = []
        for microbatch in range(microbatches):
            batch = case.batch(world_size * rows, step * microbatches + microbatch)
            loss = loss_of(model, rows_of(batch, rank, rows))
            loss.backward()
            losses.append(loss.detach())
        gradients = gradients_of(model)
        stepper.step()
    return {"losses": losses, "gradients": gradients, "parameters": parameters_of(model)}


def compare_with_fsdp2(settings: dict[str, tuple[Any, ...]]) -> dict[str, list[dict[str, Any]]]:
    """On a rank: the results of both for each setting."""
    results = {}
    for key, setting in settings.items():
        torch._dynamo.reset()
        results[key] = [steps_with(shard, *setting) for shard in (fsdp2, ours)]
    return results


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# name, optimizer, microbatches per step, steps, options
SETTINGS: dict[str, tuple[str, str, int, int, dict[str, Any]]] = {
    "gpt, AdamW, three steps": ("gpt", "adamw", 1, 3, {}),
    "mlp, SGD, accumulated gradients": ("mlp", "sgd", 3, 1, {}),
    "mlp, kept for backward": ("mlp", "adamw", 1, 1, {"reshard_after_forward": False}),
    "mlp, bfloat16": ("mlp", "adamw", 1, 1, {"mp_policy": BF16}),
    "tied weights, checkpointing and dropout": ("gpt_tied_checkpoint_dropout", "adamw", 1, 1, {}),
    "BatchNorm": ("cnn_batchnorm", "adamw", 1, 1, {}),
    "frozen parameters": ("frozen", "adamw", 1, 1, {}),
}


@pytest.fixture(scope="module")
def both() -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(compare_with_fsdp2, 2, {key: SETTINGS[key] for key in selected(SETTINGS, __name__, "setting")})


# Of what is long, attention is in those with tied weights, and the rest in test_models.py and test_option_numbers.py.
SHORT = [
    *("mlp, SGD, accumulated gradients", "mlp, bfloat16", "tied weights, checkpointing and dropout"),
    "frozen parameters",
]


@pytest.mark.parametrize("setting", mostly_long(SETTINGS, SHORT))
def test_a_step_equals_fsdp2_bit_for_bit(both: list[dict[str, list[dict[str, Any]]]], setting: str) -> None:
    check_equal(both, setting)


def check_equal(both: list[dict[str, list[dict[str, Any]]]], setting: str) -> None:
    for rank, results in enumerate(both):
        theirs, own = results[setting]
        check_same(own, theirs, f"rank {rank}")
    assert any(gradient is not None and gradient.any() for gradient in own["gradients"].values())


def check_same(own: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    assert [loss.item() for loss in own["losses"]] == [loss.item() for loss in theirs["losses"]], what
    for kind in ("gradients", "parameters"):
        assert list(own[kind]) == list(theirs[kind]), what
        different = [name for name in theirs[kind] if not equal(own[kind][name], theirs[kind][name])]
        assert not different, f"{what}: {kind} of {different}"


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)
