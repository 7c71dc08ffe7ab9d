"""A warning of attention that torch computes wrongly, on GPUs that are not here."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import graph_fsdp
from graph_fsdp.engine import aot, kept
from graph_fsdp.engine.attention import warn_of_attention
from graph_fsdp.passes import Graph


def attended(keys: int, mask: bool) -> Graph:
    """A graph of attention by cuDNN over so many keys, with fake values."""
    graph = fx.Graph()
    with FakeTensorMode():
        value = torch.empty(1, 2, keys, 32, dtype=torch.bfloat16, device="cuda")
        masked = torch.empty(1, 1, keys, keys, dtype=torch.bfloat16, device="cuda")
    query, bias = graph.placeholder("query"), graph.placeholder("bias")
    query.meta["val"], bias.meta["val"] = value, masked
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    graph.output((graph.call_function(operator, (query, query, query, bias if mask else None, True)),))
    return Graph(fx.GraphModule({}, graph), "joint")


def told(graph: Graph) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_attention(graph)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize(
    ("keys", "mask", "version", "capability", "warned"),
    [
        (704, True, 92000, (9, 0), True),
        (704, False, 92000, (9, 0), False),
        (640, True, 92000, (9, 0), False),
        (704, True, 92600, (9, 0), False),
        (704, True, None, (9, 0), False),
        (704, True, 92000, (10, 0), False),
    ],
)
def test_it_is_told_where_its_gradients_can_be_nan(
    keys: int,
    mask: bool,
    version: int | None,
    capability: tuple[int, int],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    said = told(attended(keys, mask))
    assert bool(said) == warned
    if warned:
        assert "attention over 704 keys has a mask" in said[0] and "enable_cudnn_sdp(False)" in said[0]


class Attention(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_warm_start_is_told_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []

    def see(graph: Graph) -> None:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        seen.append((graph.phase, bool(graph.fx_graph.find_nodes(op="call_function", target=operator))))

    for module in (aot, kept):
        monkeypatch.setattr(module, "warn_of_attention", see)
    for _ in range(2):
        torch._dynamo.reset()
        model = graph_fsdp.compile(Attention(16, 16), backend="eager", programs=tmp_path)
        model(torch.randn(2, 4, 16)).sum().backward()
    assert seen == [("joint", True), ("forward", True)]
