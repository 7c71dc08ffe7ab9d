"""Recurrent layers are one operator each in a graph, with the numbers of eager PyTorch, dropout between them too."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import start
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import pack_padded_sequence

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes.analysis.kernels import node_flops
from graph_fsdp.passes.ir.recurrent import recurrent_layer, recurrent_layer_backward

FEATURES, BATCH = 6, 3


class Tagger(nn.Module):
    """Tags each element of a sequence."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, recurrent.input_size)
        self.recurrent = recurrent
        width = getattr(recurrent, "proj_size", 0) or recurrent.hidden_size
        self.outer = nn.Linear(width * (2 if recurrent.bidirectional else 1), 2)

    def forward(self, x: Any) -> tuple[Tensor, Any]:
        found, state = self.recurrent(self.inner(x) if isinstance(x, Tensor) else x)
        return self.outer(found if isinstance(found, Tensor) else found.data), state


def pair(recurrent: nn.RNNBase, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Tagger(recurrent)
    return graph_fsdp.compile(copy.deepcopy(plain), **{"backend": "eager", **options}), plain


def step(model: nn.Module, x: Any) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    found, state = model(x)
    values = (found, *(state if isinstance(state, tuple) else (state,)))
    torch.stack([value.float().square().mean() for value in values]).sum().backward()
    return values


def check_step(model: nn.Module, plain: nn.Module, x: Any, **close: float) -> None:
    found, expected = step(model, x), step(plain, x)
    torch.testing.assert_close(found, expected, **(close or {"rtol": 0, "atol": 0}))
    gradients = [[p.grad for p in each.parameters()] for each in (model, plain)]
    gradients[0] = [g.full_tensor() if isinstance(g, compat.DTensor) else g for g in gradients[0]]
    torch.testing.assert_close(*gradients, **(close or {"rtol": 0, "atol": 0}))


def sequences(length: int, *, batch_first: bool = False) -> Tensor:
    x = torch.randn(length, BATCH, FEATURES, generator=torch.Generator().manual_seed(length))
    return x.transpose(0, 1).contiguous() if batch_first else x


def calls(model: nn.Module, phase: str, target: Any = recurrent_layer) -> int:
    """Count those of the newest graph."""
    graph = graph_fsdp.inspect(model).graphs[-1].views[phase].graph
    assert graph is not None
    return sum(node.target is target for node in graph.nodes)


class OfOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(FEATURES, 16, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "lstm with dropout": (nn.LSTM, {"num_layers": 3, "dropout": 0.5, "batch_first": True}),
    "lstm in both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "bias": False}),
    "lstm with projections": (nn.LSTM, {"proj_size": 4, "num_layers": 2, "dropout": 0.25}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True, "dropout": 0.5}),
    "tanh": (nn.RNN, {}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_training_has_the_bits_of_eager_pytorch_at_every_length(name: str) -> None:
    kind, options = LAYERS[name]
    model, plain = pair(kind(8, 12, **options))
    for length in (5, 7, 4):
        check_step(model, plain, sequences(length, batch_first=options.get("batch_first", False)))
    assert len(graph_fsdp.inspect(model).graphs) == 2  # of the first length, and of any
    assert calls(model, "forward") == options.get("num_layers", 1)
    assert calls(model, "backward", recurrent_layer_backward) == options.get("num_layers", 1)
    model.eval()
    plain.eval()
    with torch.no_grad():
        x = sequences(5, batch_first=options.get("batch_first", False))
        torch.testing.assert_close(model(x), plain(x))


def test_dropout_between_layers_drops() -> None:
    model, _ = pair(nn.LSTM(8, 12, num_layers=2, dropout=0.5))
    x = sequences(5)
    first, second = model(x)[0], model(x)[0]
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: type[nn.RNNBase]) -> None:
    model, plain = pair(kind(FEATURES, 12, num_layers=2, bidirectional=True), fullgraph=kind is nn.LSTM)
    for lengths in ((5, 3, 2), (6, 2, 1), (7, 7, 3)):
        packed = pack_padded_sequence(sequences(max(lengths)), torch.tensor(lengths), enforce_sorted=False)
        check_step(model, plain, packed)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_autocast(kind: type[nn.RNNBase]) -> None:
    model, plain = pair(kind(8, 12, num_layers=2))
    for x in (sequences(5), sequences(4)):
        with torch.autocast("cpu", torch.bfloat16):
            check_step(model, plain, x, rtol=0.05, atol=0.01)


def test_frozen_layers_have_no_gradients() -> None:
    model, plain = pair(nn.GRU(8, 12, num_layers=2).requires_grad_(False))
    check = dict(model.named_parameters())
    step(model, sequences(5))
    step(plain, sequences(5))
    assert all((p.grad is None) == name.startswith("recurrent") for name, p in check.items())
    torch.testing.assert_close(check["inner.weight"].grad, plain.inner.weight.grad, rtol=0, atol=0)


@pytest.mark.parametrize(("recompute", "again"), [("unit", 1), ("selective", 0)])
def test_selective_checkpointing_saves_them(recompute: str, again: int) -> None:
    model, plain = pair(
        nn.LSTM(8, 12, num_layers=2, dropout=0.5), activation_checkpointing=recompute, auto_wrap_policy={nn.LSTM}
    )
    check_step(model, plain, sequences(5))
    assert calls(model, "backward") == again


def test_what_a_layer_computes_is_counted() -> None:
    model, _ = pair(nn.LSTM(8, 12, bidirectional=True))
    step(model, sequences(5))
    views = graph_fsdp.inspect(model).graphs[0].views
    nodes = itertools.chain(*(views[phase].graph.nodes for phase in ("forward", "backward")))
    found = {n.target: node_flops(n) for n in nodes if n.target in (recurrent_layer, recurrent_layer_backward)}
    forward = 2 * 5 * BATCH * 2 * 4 * 12 * (8 + 12)
    assert found == {recurrent_layer: forward, recurrent_layer_backward: 3 * forward}


@pytest.mark.usefixtures("fake_group")
def test_a_second_start_finds_their_program_and_its_stages(tmp_path: Path) -> None:
    x = torch.randn(5, BATCH, FEATURES)
    made = [start(tmp_path / "programs", OfOutputs, x) for _ in range(2)]
    assert [started.found for started in made] == [False, True]
    assert torch.equal(made[0].outputs, made[1].outputs)
    first, second = (
        {view.phase: [stage.body for stage in view.stages.values()] for view in started.report.graphs[0].views.values()}
        for started in made
    )
    assert first == second and "recurrent_layer" in str(first)


def test_torch_writes_them_out_elsewhere() -> None:
    pair(nn.LSTM(8, 12))[0](sequences(5))
    layer = nn.GRU(FEATURES, 4)
    graph = make_fx(lambda x: layer(x)[0], tracing_mode="fake", _allow_non_fake_inputs=True)(sequences(5)).graph
    assert all(node.target is not recurrent_layer for node in graph.nodes)
    kernels = torch.ops.aten.gru.input.py_kernels.values()  # which decomposition tables are made of
    assert kernels and all(kernel.__module__.startswith("torch.") for kernel in kernels)


def test_through_inductor() -> None:
    model, plain = pair(nn.LSTM(8, 12, num_layers=2, dropout=0.5), backend="inductor")
    plain.recurrent.dropout = model.recurrent.dropout = 0.0
    for length in (5, 7, 4):
        check_step(model, plain, sequences(length), rtol=1e-5, atol=1e-6)
    assert len(graph_fsdp.inspect(model).graphs) == 2
