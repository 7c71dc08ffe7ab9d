"""Units of several modules, and modules whose parameters are tied to others: numbers on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from facts import Facts
from test_calls_ranks import check_gradients, pair, rows, whole
from test_unshard_ranks import gathers_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import graph_fsdp

FACTS = Facts(__name__)


class Ends(nn.Module):
    """Layers between an embedding and a head, which are used at the two ends."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


class Hidden(Ends):
    forward = Ends.hidden


def tokens(seed: int = 0) -> Tensor:
    return (rows(4, 3, seed=seed).abs() * 10).long() % 8


def counted(model: nn.Module, x: Tensor) -> dict[str, int]:
    with CommDebugMode() as mode:
        model(x).square().mean().backward()
    return {str(name): number for name, number in mode.get_comm_counts().items()}


@FACTS
def a_unit_of_several_modules_is_fsdp2s() -> None:
    """Bit for bit, and gathered and reduced as often."""
    torch.manual_seed(0)
    plain: Any = Ends()
    model: Any = copy.deepcopy(plain)
    policy = [(model.embed, model.head), tuple(model.blocks)]
    model = graph_fsdp.compile(model, backend="eager", auto_wrap_policy=policy, reshard_after_forward=False)
    fully_shard([plain.embed, plain.head], reshard_after_forward=False)
    fully_shard(list(plain.blocks), reshard_after_forward=False)
    fully_shard(plain)
    for step in range(2):
        assert counted(model, tokens(step)) == counted(plain, tokens(step))
        for (name, p), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(whole(p.grad), whole(expected.grad)), name  # type: ignore[arg-type]
    model.zero_grad()
    model.head.unshard()
    assert not isinstance(model.embed.weight, DTensor), "of the one unit"
    model.embed.reshard()
    assert isinstance(model.head.weight, DTensor)
    assert model.head(rows(2, 4)).shape == (2, 8), "by itself"


def chunked_loss(model: Any, x: Tensor) -> Tensor:
    """A head that is called by itself, chunk by chunk, so that no more of the logits is there at once."""
    losses = [F.cross_entropy(model.head(part).flatten(0, 1), x[:2].flatten()) for part in model(x).split(2)]
    return torch.stack(losses).mean()


@FACTS
def a_tied_head_is_called_by_itself() -> None:
    torch.manual_seed(0)
    for policy in ({nn.Linear}, {nn.Embedding, nn.Linear}):
        torch._dynamo.reset()
        model, plain = pair(Hidden(tied=True), auto_wrap_policy=policy)
        assert isinstance(model.head, FSDPModule)
        for step in range(2):
            losses = [chunked_loss(m, tokens(step)) for m in (model, plain)]
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-7)
            for loss in losses:
                loss.backward()
            check_gradients(model, plain)
        before = gathers_of(model)
        model.head.unshard()  # type: ignore[operator]
        assert gathers_of(model) == before + 1
        assert type(model.embed.weight) is nn.Parameter, "of the unit that has it"
        model.head.reshard()  # type: ignore[operator]
        with graph_fsdp.unsharded(model.head):
            assert type(model.head.weight) is nn.Parameter
        assert isinstance(model.embed.weight, DTensor)


def backward_of_chunks(model: Any, hidden: Tensor, x: Tensor) -> float:
    """As torchtitan's ``ChunkedLossWrapper``: each chunk's backward runs at once, and gradients of the head are reduced
    with the last one's."""
    chunks, total = [part.detach().requires_grad_() for part in hidden.split(2)], 0.0
    for chunk in chunks:
        if isinstance(model.head, FSDPModule):
            model.head.set_requires_gradient_sync(chunk is chunks[-1], recurse=False)
        loss = F.cross_entropy(model.head(chunk).flatten(0, 1), x[:2].flatten())
        loss.backward()
        total += loss.item()
    hidden.backward(torch.cat([chunk.grad for chunk in chunks]))  # type: ignore[misc]
    return total


@FACTS
def a_head_is_called_chunk_by_chunk_with_a_backward_of_each() -> None:
    for tied, policy in ((False, {nn.Linear}), (True, {nn.Linear}), (False, None)):  # None: it is no unit
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, plain = pair(Hidden(tied=tied), auto_wrap_policy=policy)
        for step in range(2):
            losses = [backward_of_chunks(m, m(tokens(step)), tokens(step)) for m in (model, plain)]
            assert abs(losses[0] - losses[1]) < 1e-5
            check_gradients(model, plain)


test_on_two_ranks = FACTS.on(2)
