"""``model.to(dtype)`` after ``compile``: the model computes in its new dtypes, and steps are those without shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import fake_process_group
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP
from printed import stage_text
from test_calls_ranks import pair, rows, whole
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import graph_fsdp
from graph_fsdp.errors import ParameterChangedError

FACTS = Facts(__name__)


class Tied(nn.Module):
    """A tied head, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(7, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head, self.scale = nn.Linear(8, 7, bias=False), nn.Parameter(torch.tensor(0.5))
        self.head.weight = self.embedding.weight
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.embedding.weight + self.shift
        for layer in self.layers:
            x = x + self.scale * torch.relu(layer(x))
        return self.head(x)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """All ranks have the same rows, so that plain PyTorch on one has the gradients of all."""
    loss = model(torch.ones(3, 7, dtype=next(model.parameters()).dtype)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trains_as_plain(distributed: bool = False, **options: Any) -> None:
    torch.manual_seed(0)
    ours, plain = pair(Tied(), **options)
    found = []
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if distributed and model is ours:
            graph_fsdp.distribute_optimizer(optimizer)
        model.double()
        losses = [step(model, optimizer)]
        for p in model.parameters():
            p.grad = torch.ones_like(p)  # which is cast, and added to
        model.float()
        losses += [step(model, optimizer), step(model, optimizer)]
        found.append([*losses, *map(whole, model.parameters())])
    torch.testing.assert_close(*found)


@FACTS
def a_cast_model_trains_as_plain() -> None:
    trains_as_plain()
    trains_as_plain(distributed=True)


@FACTS
def with_other_options_too() -> None:
    trains_as_plain(offload_policy=CPUOffloadPolicy(pin_memory=False))
    trains_as_plain(reshard_after_forward=False)
    trains_as_plain(fullgraph=False)


@FACTS
def a_model_that_is_cast_before_its_first_forward_has_fsdp2s_bits() -> None:
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)):
        torch.manual_seed(0)
        ours, theirs = pair(MLP(), mp_policy=policy)
        for block in theirs.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(theirs, mp_policy=policy)
        for model in (ours, theirs):
            model.to(torch.float64)
            model(rows(6, 16).double()).square().mean().backward()
        for p, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert p.dtype is p.grad.dtype is torch.float64
            assert torch.equal(p.grad.full_tensor(), expected.grad.full_tensor())


test_on_two_ranks = FACTS.on(2)


def test_graphs_buckets_and_the_report_have_the_new_dtypes() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(depth=1), backend="eager")
        model(torch.ones(4, 16))
        before = stage_text(graph_fsdp.inspect(model).latest("forward"))
        model.to(torch.float64)
        model(torch.ones(4, 16, dtype=torch.float64))
        report = graph_fsdp.inspect(model)
    assert report.graphs[-1].cause.text == "the model was cast to float64"
    assert "blocks.0.up.weight: float64[32, 16]" in str(report.find("blocks.0.up.weight"))
    after = stage_text(report.latest("forward"))
    assert after == before.replace("float32", "float64") != before
    assert_expected_inline(
        after,
        """\
gather_root = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}, head.{weight, bias}],
    float64, world_size=8)
full_root = all_gather_wait(gather_root)
    addmm(blocks.0.up.{bias, weight}), ..., addmm(blocks.0.down.{bias, weight}), ..., addmm(head.{bias, weight})
return ..., full_root, ..., blocks.0.down.weight, head.weight, ...""",
    )


def test_a_model_whose_first_call_after_a_cast_is_an_inference_is_trained() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(depth=1), backend="eager").double()
        with torch.inference_mode():
            model(torch.ones(4, 16, dtype=torch.float64))
        model(torch.ones(4, 16, dtype=torch.float64)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def test_a_part_of_a_model_cannot_be_cast() -> None:
    with fake_process_group():
        model = graph_fsdp.compile(MLP(), backend="eager")
        model.head.double()
        with pytest.raises(ParameterChangedError, match=r"'head.weight' was float32.* and is float64.*cast all of the"):
            model(torch.ones(4, 16))
        model.float()
        assert model(torch.ones(4, 16)).dtype is torch.float32
