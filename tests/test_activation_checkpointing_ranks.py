"""Checkpointed activations do not change the numbers, and gather nothing twice: on two ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from facts import Facts
from models import GPT, MLP, VOCABULARY, GPTBlock
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import ActivationCheckpointing
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)

VALUES: dict[str, Any] = {
    "unit": "unit",
    "selective": "selective",
    "operators": [torch.ops.aten.bmm, torch.ops.aten.mm.default],
    "half the memory": 0.5,
    "no memory": 0,
    "offload": "offload",
    "offloaded inputs of units": ActivationCheckpointing("unit", offload=True),
}
_results: dict[str, tuple[list[Tensor], list[Tensor], Tensor]] = {}


def train(prepare: Callable[[nn.Module], nn.Module], **model_options: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Losses, parameters and the state of the random numbers after three steps with dropout."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = prepare(GPT(depth=1, dropout=0.1, **model_options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(500 + dist.get_rank())  # each rank draws its own masks
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        x = torch.randint(VOCABULARY, (4, 8), generator=generator)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    return losses, values, torch.get_rng_state()


def ours(value: Any = None, **options: Any) -> Callable[[nn.Module], nn.Module]:
    warnings.filterwarnings("ignore", "activation_checkpointing: activations are offloaded")
    options = {"backend": "eager", "auto_wrap_policy": {GPTBlock}, "reshard_after_forward": True, **options}
    return lambda model: graph_fsdp.compile(model, activation_checkpointing=value, **options)


def fsdp2(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def prepare(model: nn.Module) -> nn.Module:
        for index, block in enumerate(model.blocks):  # type: ignore[arg-type]
            model.blocks[index] = fully_shard(wrap(block))  # type: ignore[index,operator]
        return fully_shard(model)

    return prepare


def plain() -> tuple[list[Tensor], list[Tensor], Tensor]:
    """FSDP2's, which checkpoint nothing."""
    if "plain" not in _results:
        _results["plain"] = train(fsdp2(lambda block: block))
    return _results["plain"]


def assert_equal(found: tuple[list[Tensor], list[Tensor], Tensor]) -> None:
    losses, values, state = plain()
    assert all(torch.equal(a, b) for a, b in zip(found[0], losses, strict=True)), "losses"
    assert all(torch.equal(a, b) for a, b in zip(found[1], values, strict=True)), "parameters"
    assert torch.equal(found[2], state), "random numbers drawn afterwards"


SHORT = ("unit", "selective", "offloaded inputs of units")


@FACTS
def dropout_is_replayed() -> None:
    check_replay(SHORT)


@FACTS.long
def dropout_is_replayed_under_every_other_policy() -> None:
    check_replay([name for name in VALUES if name not in SHORT])


def check_replay(names: Iterable[str]) -> None:
    for name, value in ((name, VALUES[name]) for name in names):
        counters = []

        def prepare(model: nn.Module, value: Any = value, counters: list[Any] = counters) -> nn.Module:
            model = ours(value)(model)
            counters.append(engine_of(model).counter)  # type: ignore[union-attr]
            return model

        assert_equal(train(prepare))
        buckets = 3  # a block, what the root has before and after it
        gathers = counters[0].collectives["all_gather"]
        assert gathers == 3 * (buckets + buckets - 1), f"{name}: {gathers}"


@FACTS
def fsdp2_with_torchs_wrapper_is_the_same() -> None:
    assert_equal(train(fsdp2(checkpoint_wrapper)))


@FACTS
def the_users_own_checkpoint_works() -> None:
    assert_equal(train(ours("unit"), checkpointed=True))


@FACTS.long
def the_users_own_checkpoint_works_with_every_policy() -> None:
    for value in (None, 0.5):
        assert_equal(train(ours(value), checkpointed=True))


class Checkpointed(MLP):
    """Blocks of which some are checkpointed."""

    def __init__(self, places: set[int]) -> None:
        super().__init__(depth=3)
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        for place, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if place in self.places else block(x)
        return self.head(x)


@FACTS
def some_of_equal_units_are_checkpointed() -> None:
    found: list[list[Tensor]] = []
    for places in (set(), {0}, {1}, {0, 2}):
        torch.manual_seed(0)
        model = graph_fsdp.compile(Checkpointed(places), backend="eager", reshard_after_forward=True)
        torch.manual_seed(1 + dist.get_rank())
        model(torch.randn(4, 16)).square().mean().backward()
        found.append([p.grad.full_tensor() for p in model.parameters()])
        assert all(map(torch.equal, found[0], found[-1])), places


test_on_two_ranks = FACTS.on(2)
