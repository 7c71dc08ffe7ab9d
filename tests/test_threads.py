"""Forwards in several threads run one after the other, or are an error where ranks could disagree."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graph_fsdp


class Waiting(nn.Module):
    """Waits outside of graphs until it is told to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.waits, self.runs, self.may_go_on = False, threading.Event(), threading.Event()

    @torch.compiler.disable
    def wait(self, x: Tensor) -> Tensor:
        if self.waits:
            self.runs.set()
            assert self.may_go_on.wait(60)
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wait(self.first(x)))


def models() -> tuple[Any, Any, Tensor, Tensor]:
    """A model that waits, another, an input, and what the first makes of it."""
    torch.manual_seed(0)
    model, x = Waiting(), torch.randn(2, 4)
    expected = model(x)
    graph_fsdp.compile(model, backend="eager", fullgraph=False)
    return model, graph_fsdp.compile(nn.Linear(4, 4), backend="eager"), x, expected


@pytest.mark.parametrize("warm", [False, True])
def test_forwards_of_one_process_wait_for_each_other(warm: bool) -> None:
    model, other, x, expected = models()
    if warm:
        assert torch.equal(model(x), expected) and other(x).shape == x.shape
    model.waits = True
    with ThreadPoolExecutor() as threads:
        first = threads.submit(model, x)
        try:
            assert model.runs.wait(60)
            later = [threads.submit(called, x) for called in (model, other, model)]
            assert not any(call.done() for call in later)
        finally:
            model.may_go_on.set()
        outputs = [call.result() for call in (first, *later)]
    assert torch.equal(outputs[2], other(x))
    for output in (outputs[0], outputs[1], outputs[3]):
        assert torch.equal(output, expected)
        output.sum().backward()
    assert torch.equal(model.last.bias.grad, torch.full((4,), 6.0))


def test_of_several_ranks_the_second_forward_is_an_error(fake_group: None) -> None:
    model, other, x, _ = models()
    model.waits = True
    with ThreadPoolExecutor() as threads:
        first = threads.submit(model, x)
        try:
            assert model.runs.wait(60)
            for called in (model, other):
                with pytest.raises(RuntimeError, match="was called in one thread while another thread runs one"):
                    called(x)
        finally:
            model.may_go_on.set()
        assert first.result().shape == x.shape
    assert model(x).shape == other(x).shape == x.shape
