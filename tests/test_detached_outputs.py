"""Outputs that are detached from others: these have the gradients of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graph_fsdp


def beside_a_view(h: Tensor) -> tuple[Tensor, ...]:
    return h.view(-1), h.detach()


OUTPUTS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "beside a view": beside_a_view,
    "before a view": lambda h: (h.detach(), h[:, :2]),
    "twice": lambda h: (h.squeeze(0), h.detach(), h.detach()),
    "itself": lambda h: (h, h.detach()),
    "complex": lambda h: beside_a_view(torch.complex(h, h)),
    "in its shape": lambda h: (h.mT, h.detach().view_as(h)),
}


class Heads(nn.Module):
    def __init__(self, outputs: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.head, self.outputs = nn.Linear(4, 3), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.head(x))


@pytest.mark.parametrize("regions", ["cut", "whole"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_beside_detached_ones_have_gradients(name: str, regions: Any) -> None:
    plain = Heads(OUTPUTS[name])
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="inductor", regions=regions)
    x = torch.randn(2, 4)
    found, expected = model(x), plain(x)
    assert [value.requires_grad for value in found] == [value.requires_grad for value in expected]
    for outputs in (found, expected):
        torch.stack([value.abs().square().sum() for value in outputs if value.requires_grad]).sum().backward()
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
