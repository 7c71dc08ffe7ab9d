"""The same training twice: sharded, on the rank that calls, and on one process without any sharding.

[Note: what one process must imitate]
Gradients are the mean over ranks of each rank's own. With ``global_batch`` the reference makes one pass over
the rows of all ranks, which is the definition of data parallelism for a mean loss. Where rows of a batch are
not independent of each other (BatchNorm's statistics) or of the random state (dropout), the definition is per
rank: the reference then runs each rank's rows by themselves with that rank's random state and buffers, and
averages.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES, Batch, loss_of, predict
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

import graph_fsdp

RANK_SEED = 500  # plus the rank: ranks draw different dropout masks

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-3, foreach=True),
}


def fsdp2(model: Any, **options: Any) -> nn.Module:
    """The model as users of FSDP2 shard it: each of its blocks, then the rest."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@dataclass(frozen=True)
class Step:
    """One step of a training: ``rows`` per rank; an evaluation runs under ``no_grad`` in ``eval`` mode."""

    rows: int = 4
    evaluate: bool = False


@dataclass
class Outcome:
    """What a rank has seen; parameters and gradients are whole, as every rank must agree on them."""

    losses: list[Tensor] = field(default_factory=list)  # of training steps, this rank's rows
    predictions: list[Tensor] = field(default_factory=list)  # of evaluations, this rank's rows
    parameters: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the last training step
    buffers: dict[str, Tensor] = field(default_factory=dict)


def rows_of(batch: Batch, rank: int, rows: int) -> Batch:
    return {name: tensor[rank * rows : (rank + 1) * rows] for name, tensor in batch.items()}


def whole(tensor: Tensor) -> Tensor:
    """A copy of all of a tensor, gathered from the ranks if they hold parts of it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else whole(parameter.grad) for name, parameter in model.named_parameters()
    }


def train_sharded(
    name: str,
    steps: Sequence[Step],
    optimizer: str = "sgd",
    shard: Callable[..., nn.Module] = graph_fsdp.compile,
    **options: Any,
) -> Outcome:
    """Train a case on this rank of the default process group; ``options`` go to ``shard``."""
    case, rank, world_size = CASES[name], dist.get_rank(), dist.get_world_size()
    model = case.model()
    compiled = shard(model, **options)
    assert compiled is model, "the same module comes back"
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    step_optimizer = OPTIMIZERS[optimizer](model.parameters())
    torch.manual_seed(RANK_SEED + rank)

    outcome = Outcome()
    for index, step in enumerate(steps):
        batch = rows_of(case.batch(world_size * step.rows, index), rank, step.rows)
        if step.evaluate:
            outcome.predictions.append(_evaluate(model, batch))
            continue
        loss = loss_of(model, batch)
        loss.backward()
        outcome.losses.append(loss.detach().clone())
        outcome.gradients = gradients_of(model)
        step_optimizer.step()
        step_optimizer.zero_grad()
    outcome.parameters = parameters_of(model)
    outcome.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return outcome


Outcomes = list[dict[str, Outcome | str]]  # per rank, per case; a traceback where the case failed


def train_all(
    names: Sequence[str], steps: Sequence[Step], optimizer: str, options: dict[str, Any]
) -> dict[str, Outcome | str]:
    """On a rank: train several cases one after the other. One that raises does so on all ranks, or the launch
    runs into its timeout; the others go on."""
    outcomes: dict[str, Outcome | str] = {}
    for name in names:
        torch._dynamo.reset()
        try:
            outcomes[name] = train_sharded(name, steps, optimizer, **options)
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


def outcomes_of(ranks: Outcomes, name: str) -> list[Outcome]:
    """A case's outcome on each rank; fails the test with the traceback if there is none."""
    outcomes = []
    for rank, outcome in enumerate(ranks):
        result = outcome[name]
        if isinstance(result, str):
            pytest.fail(f"rank {rank} raised:\n{result}", pytrace=False)
        outcomes.append(result)
    return outcomes


def train_reference(
    name: str, steps: Sequence[Step], optimizer: str = "sgd", *, world_size: int, global_batch: bool = False
) -> list[Outcome]:
    """What each rank of ``train_sharded`` must see, computed on this process alone (see the note above).

    With ``global_batch`` there is one outcome, of all rows.
    """
    case = CASES[name]
    model = case.model()
    step_optimizer = OPTIMIZERS[optimizer](model.parameters())
    parts = 1 if global_batch else world_size
    ranks = [_ImitatedRank(model, rank) for rank in range(parts)]
    for index, step in enumerate(steps):
        batch = case.batch(world_size * step.rows, index)
        for rank in ranks:
            rank.run(model, rows_of(batch, rank.rank, world_size * step.rows // parts), step.evaluate)
        if step.evaluate:
            continue
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= parts
        gradients = gradients_of(model)
        step_optimizer.step()
        step_optimizer.zero_grad()
    for rank in ranks:
        rank.outcome.parameters, rank.outcome.gradients = parameters_of(model), gradients
    return [rank.outcome for rank in ranks]


class _ImitatedRank:
    """A rank's own state: its random numbers and its buffers. Parameters are common."""

    def __init__(self, model: nn.Module, rank: int) -> None:
        self.rank = rank
        self.outcome = Outcome(buffers={name: buffer.clone() for name, buffer in model.named_buffers()})
        self.random_state = torch.Generator().manual_seed(RANK_SEED + rank).get_state()

    def run(self, model: nn.Module, batch: Batch, evaluate: bool) -> None:
        """One microbatch; a training step adds its gradients to those of the ranks before."""
        torch.set_rng_state(self.random_state)
        buffers = dict(model.named_buffers())
        for name, value in self.outcome.buffers.items():
            buffers[name].copy_(value)
        if evaluate:
            self.outcome.predictions.append(_evaluate(model, batch))
        else:
            loss = loss_of(model, batch)
            loss.backward()
            self.outcome.losses.append(loss.detach().clone())
        self.outcome.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.random_state = torch.get_rng_state()


def _evaluate(model: nn.Module, batch: Batch) -> Tensor:
    model.eval()
    with torch.no_grad():
        prediction = predict(model, batch)
    model.train()
    assert not prediction.requires_grad
    return prediction.clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors over the largest value of the expected one."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if expected.numel() == 0:
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max().clamp_min(1e-30)).item()


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Of the same names, bit for bit."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def check_close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float, what: str) -> None:
    """Each tensor to ``bound`` by ``relative_error``; the message has the worst."""
    assert list(actual) == list(expected), f"{what}: other names"
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= bound}
    worst = sorted(wrong.items(), key=lambda item: -item[1])[:5]
    assert not wrong, f"{what}: {len(wrong)} of {len(errors)} differ by more than {bound:g}, worst: {worst}"


def check_outcome(actual: Outcome, expected: Outcome, bound: float) -> None:
    """Everything a rank has seen against what it should have."""
    for what in ("losses", "predictions"):
        pairs = [dict(enumerate(getattr(outcome, what))) for outcome in (actual, expected)]
        check_close(*pairs, bound, what)
    missing = [name for name, gradient in expected.gradients.items() if gradient is None]
    assert missing == [name for name, gradient in actual.gradients.items() if gradient is None]
    gradients = [{n: g for n, g in o.gradients.items() if g is not None} for o in (actual, expected)]
    check_close(*gradients, bound, "gradients")
    check_close(actual.parameters, expected.parameters, bound, "parameters")
    check_close(actual.buffers, expected.buffers, bound, "buffers")
