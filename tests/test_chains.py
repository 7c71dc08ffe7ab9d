"""Equal layers that follow each other are one call while the model around them is traced."""

from __future__ import annotations

import logging

import pytest
import torch
from marks import mostly_long
from models import CLASSES, WIDTH, MLPBlock
from test_repeat import ONCE, WHOLE, check_equal, trace_once
from torch import Tensor, nn

from graph_fsdp.passes.repeat.repeat import Repeats

# How many layers each call stands for.
CHAINS = {
    "mlp": [3],
    "frozen": [4, 3],  # the last frozen layer's result needs no gradient, the next one's does
    "constants": [7],  # of two traces
    "rotated": [3],
    "llama": [3],
    "watched": [1, 1, 1],  # something else reads what each of them computes
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", mostly_long(CHAINS, ("mlp", "frozen", "constants", "watched")))
def test_layers_that_follow_each_other_are_one_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[int]] = []
    registered = Repeats.registered

    def seen(repeats: Repeats) -> object:
        calls = [node for node in repeats.contracted.graph.nodes if node.op == "call_function" and node.users]
        assert sum(getattr(node.target, "__name__", "") == "call" for node in calls) == len(repeats.chains)
        found.append([len(chain.layers) for chain in repeats.chains])
        return registered(repeats)

    monkeypatch.setattr(Repeats, "registered", seen)
    make, inputs, _ = {**ONCE, **WHOLE}[name]
    trace_once(make, inputs, backend="eager")
    assert found[0] == CHAINS[name]


class Tabled(nn.Module):
    """Every layer has a table of its own. That of one in the middle is written to in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(6))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        tables = [table + index for index in range(len(self.blocks))]
        x = self.stem(x)
        for block, own in zip(self.blocks, tables, strict=True):
            x = block(x) + own
        tables[2].add_(1)
        return self.head(x) + tables[2].sum()


@pytest.mark.usefixtures("fake_group")
def test_what_is_written_to_is_the_input_of_one_layer_of_a_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(Tabled, {"x": torch.ones(3, WIDTH), "table": torch.ones(WIDTH)}, backend="eager")
    said = [message for message in caplog.messages if "has no trace of others" in message]
    assert said == ["blocks.2 has no trace of others: an input or output of it is written to behind it"]
    counts = [message for message in caplog.messages if message.endswith("layers have 1 traces")]
    assert counts == ["5 layers have 1 traces", "4 layers have 1 traces"]
