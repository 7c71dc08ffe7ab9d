"""Random forwards that break into graphs, with Python between them, train as plain PyTorch trains them: outputs, and a
gradient of each parameter that has one there. A test's number is its seed."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
from marks import mostly_long
from random_programs import random_program
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graph_fsdp

CASES = int(os.environ.get("GRAPH_FSDP_EXAMPLES", "0")) or 18  # of test_random_pieces.py, too, half as many
FIRST = 10_000 * int(os.environ.get("GRAPH_FSDP_SEED", "0"))
TURNS = 3


@pytest.mark.parametrize("seed", mostly_long(range(FIRST, FIRST + CASES), range(FIRST + 1, FIRST + 4)))
def test_a_model_with_graph_breaks_trains_as_without_us(seed: int) -> None:
    source, cls = random_program(seed)
    torch._dynamo.reset()
    torch.manual_seed(seed)
    plain = cls().double()
    model = copy.deepcopy(plain)
    policy = {type(plain.get_submodule("layers.0"))} if seed % 2 else None
    graph_fsdp.compile(model, backend="eager", fullgraph=False, auto_wrap_policy=policy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="code outside of graphs reads")
        for turn in range(TURNS):
            x = torch.randn(3, 4, dtype=torch.float64)
            differences = evaluate(model, plain, x, turn) if seed % 3 == 0 else []  # a capture more of every graph
            differences += compare(model, plain, x, turn)
            assert not differences, f"turn {turn}: {differences}\n{source}"


def evaluate(model: nn.Module, plain: nn.Module, x: Tensor, turn: int) -> list[str]:
    with torch.no_grad():
        return [] if torch.allclose(model(x, turn), plain(x, turn)) else ["evaluation"]


def compare(model: nn.Module, plain: nn.Module, x: Tensor, turn: int) -> list[str]:
    """Train a step on ``x``; what is different."""
    found, expected = model(x, turn), plain(x, turn)
    wrong = [] if torch.allclose(found, expected) else ["outputs"]
    if expected.requires_grad:
        found.square().sum().backward()
        expected.square().sum().backward()
    for (name, p), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if (p.grad is None) != (other.grad is None):
            wrong.append(f"gradient of {name} is {'none' if p.grad is None else 'there'}")
        elif other.grad is not None and not torch.allclose(whole(p.grad), other.grad):
            wrong.append(f"gradient of {name}")
    for parameters in (model.parameters(), plain.parameters()):
        torch.optim.SGD(parameters, lr=0.01).step()
    model.zero_grad()
    plain.zero_grad()
    return wrong


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
