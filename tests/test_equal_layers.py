"""Dynamo traces one of equal layers: its graph is a whole trace's, and is stale when any of the layers changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import compat

DEPTH = 5
INPUTS = (torch.ones(2, 8, 16),)


class Layer(nn.Module):
    """Convolution, batch statistics, dropout, a buffer, two results, one of them a view, and an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.statistics = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.0)
        self.factor = 2
        self.register_buffer("scale", torch.full((8, 1), 0.5))

    def forward(self, x: Tensor, skip: Tensor | None = None, *, shifted: bool = False) -> tuple[Tensor, Tensor | None]:
        y = self.dropout(F.relu(self.statistics(self.convolution(x)))) * self.scale * self.factor
        if shifted:
            y = y + 1
        return y.transpose(1, 2), None if skip is None else skip + y


class Model(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        skip: Tensor = x * 2
        for layer in self.layers:
            y, skip = layer(x, skip, shifted=True)
            x = y.transpose(1, 2).sin()
        return x + skip


class WritesToItsInput(Layer):
    def forward(self, x: Tensor, skip: Tensor | None = None, *, shifted: bool = False) -> tuple[Tensor, Tensor | None]:
        y, skip = super().forward(x.mul_(2), skip, shifted=shifted)
        return y.relu_(), skip


class KeepsWhatItSaw(Layer):
    def forward(self, x: Tensor, skip: Tensor | None = None, *, shifted: bool = False) -> tuple[Tensor, Tensor | None]:
        self.seen = x.shape[0]
        return super().forward(x, skip, shifted=shifted)


class ToldItsPlace(Model):
    """Writes to a list, and to an attribute of each layer that the layer reads."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            layer.factor = index
        return super().forward(x)


class UnderContexts(Model):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=index > 2):
                y, _ = layer(x)
            x = y.transpose(1, 2).float()
        return x


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y, _ = checkpoint(layer, x, use_reentrant=False)
            x = y.transpose(1, 2)
        return x


class CheckpointsItself(Layer):
    def forward(self, x: Tensor, skip: Tensor | None = None, *, shifted: bool = False) -> tuple[Tensor, Tensor | None]:
        return checkpoint(super().forward, x, skip, shifted=shifted, use_reentrant=False)


class CollectsResults(Model):
    def forward(self, x: Tensor) -> Tensor:
        results = []
        for layer in self.layers:
            results.append(x)
            x = layer(x)[0].transpose(1, 2)
        return torch.stack(results).sum(0)


class ReturnsItsList(Layer):
    def forward(self, x: Tensor, results: list[Tensor]) -> Any:
        return self.convolution(x), results


class KeepsAList(Model):
    """A list that a layer returns is the one that it was given."""

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self.layers:
            kept = [x]
            x, returned = layer(x, kept)
            returned.append(x)
            results += kept
        return torch.stack(results).sum(0)


def changed(change: Callable[[Any], None]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = Model()
        change(model)
        return model

    return made


def with_another_dropout(model: Any) -> None:
    model.layers[2].dropout.p = 0.5


def with_a_tied_weight(model: Any) -> None:
    model.layers[3].convolution.weight = model.layers[1].convolution.weight


def with_memory_of_another_layer(model: Any) -> None:
    for index in (2, 3):
        model.layers[index].scale = torch.empty(0).set_(model.layers[1].scale.untyped_storage(), 0, (8, 1), (1, 1))


def with_views_of_one_tensor(model: Any) -> None:
    for layer, scale in zip(model.layers, torch.full((DEPTH, 8, 1), 0.5), strict=True):
        layer.scale = scale


def with_gradients(model: Any) -> None:
    for p in model.parameters():
        p.grad = torch.zeros_like(p)


def with_a_tied_layer(model: Any) -> None:
    model.layers[3] = model.layers[1]


def with_a_frozen_layer(model: Any) -> None:
    model.layers[3].requires_grad_(False)


def with_a_hook(model: Any) -> None:
    model.layers[3].convolution.register_forward_hook(lambda module, inputs, output: output * 2)


def with_another_forward(model: Any) -> None:
    model.layers[3].statistics.forward = lambda x: x


def with_an_evaluated_layer(model: Any) -> None:
    model.layers[3].eval()


# The model, and how many of its layers are copies: none of the first one, whose input needs no gradient.
CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "equal": (Model, 3),
    "writes to its input": (lambda: Model(WritesToItsInput), 3),
    "keeps what it saw": (lambda: Model(KeepsWhatItSaw), 0),
    "told its place": (ToldItsPlace, 0),
    "under contexts": (UnderContexts, 0),
    "checkpointed": (Checkpointed, 3),
    "checkpoints itself": (lambda: Model(CheckpointsItself), 3),
    "collects results": (CollectsResults, 3),
    "returns its list": (lambda: KeepsAList(ReturnsItsList), 0),
    "another dropout": (changed(with_another_dropout), 2),
    "tied weight": (changed(with_a_tied_weight), 3),
    "memory of another layer": (changed(with_memory_of_another_layer), 3),
    "views of one tensor": (changed(with_views_of_one_tensor), 0),
    "gradients": (changed(with_gradients), 3),
    "tied layer": (changed(with_a_tied_layer), 3),
    "frozen layer": (changed(with_a_frozen_layer), 2),
    "hook": (changed(with_a_hook), 2),
    "another forward": (changed(with_another_forward), 2),
    "evaluated layer": (changed(with_an_evaluated_layer), 2),
}


def compiled(model: nn.Module, graphs: list[fx.GraphModule], classes: set[type[nn.Module]]) -> Callable[..., Any]:
    """The model compiled by Dynamo, with one of the layers of ``classes`` traced. It has the ``EqualLayers``."""

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    layers = compat.EqualLayers(frozenset(classes))
    function = torch.compile(model, backend=backend, fullgraph=True)

    def run(*args: Any, **kwargs: Any) -> Any:
        with layers.active() if classes else contextlib.nullcontext():
            return function(*args, **kwargs)

    run.layers = layers  # type: ignore[attr-defined]
    return run


def text_of(graph: fx.GraphModule) -> list[str]:
    """All that Dynamo says of a graph: names, arguments, values, lines and modules."""
    numbers: dict[str, int] = {}
    lines = []
    for node in _nodes(graph):
        modules = []
        for key, (path, kind) in node.meta.get("nn_module_stack", {}).items():
            module, _, call = key.partition("@")
            modules.append((numbers.setdefault(module, len(numbers)), call, path, kind.__name__))
        argument = node.meta.get("grapharg")
        source = argument.source.name if argument is not None else ""
        value = described(node.meta.get("example_value"))
        if node.op == "placeholder" and isinstance(node.meta["example_value"], Tensor):
            value += known_of_input(node.meta["example_value"], numbers)
        where = node.meta.get("stack_trace"), node.meta.get("source_fn_stack"), sorted(node.meta)
        lines.append(
            f"{node.name} = {node.op} {node.target} {node.args} {node.kwargs} {value} {source} {modules} {where}"
        )
    return lines


def known_of_input(value: Tensor, memory: dict[str, int]) -> Any:
    """What an input is beside its sizes, and which others are in its memory."""
    storage = str(compat.storage_id(value))
    grad = described(value.grad) if value.is_leaf and value.grad is not None else None
    return type(value), sorted(vars(value)), value.device, grad, memory.setdefault(storage, len(memory))


def _nodes(graph: fx.GraphModule) -> Iterator[fx.Node]:
    """Those of a graph and of the graphs in it."""
    for node in graph.graph.nodes:
        yield node
        if node.op == "get_attr":
            yield from _nodes(getattr(graph, str(node.target)))


def described(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = tuple(map(str, (*value.shape, *value.stride(), value.storage_offset())))
        return sizes, value.dtype, value.requires_grad, value.is_leaf
    return tuple(map(described, value)) if isinstance(value, (tuple, list)) else str(value)


def check_equal(
    make: Callable[[], nn.Module], classes: set[type[nn.Module]], *calls: tuple[Any, ...], **kwargs: Any
) -> tuple[int, int]:
    """Compare graphs and results with those of whole traces; return the numbers of graphs and of layers copied."""
    found = []
    for chosen in (classes, set()):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = make(), []
        run = compiled(model, graphs, chosen)
        outputs = [run(*(value.clone() for value in args), **kwargs) for args in calls]
        found.append((list(map(text_of, graphs)), outputs, run.layers.copied))  # type: ignore[attr-defined]
    (texts, outputs, copied), (whole, of_whole, _) = found
    assert texts == whole
    torch.testing.assert_close(outputs, of_whole, rtol=0, atol=0)
    return len(texts), copied


pytestmark = pytest.mark.skipif(not compat.EQUAL_LAYERS, reason="this torch has no values of Dynamo's sources")


@pytest.mark.parametrize("case", CASES)
def test_graph_is_that_of_a_whole_trace(case: str) -> None:
    make, copied = CASES[case]
    classes = {Layer, KeepsWhatItSaw, WritesToItsInput, CheckpointsItself, ReturnsItsList}
    assert check_equal(make, classes, INPUTS) == (1, copied)


def test_symbolic_sizes_are_copied() -> None:
    calls = [(torch.ones(2, 8, length),) for length in (16, 24, 32)]
    assert check_equal(Model, {Layer}, *calls) == (2, 6)


def test_evaluation_and_training_have_traces_of_their_own() -> None:
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    model = Model()
    run = compiled(model, graphs, {Layer})
    for training in (True, False, True):
        model.train(training)
        torch.testing.assert_close(run(*INPUTS), model(*INPUTS))
    assert len(graphs) == 2


def another_submodule(layer: Any) -> None:
    layer.statistics = nn.Identity()


def another_attribute(layer: Any) -> None:
    layer.factor = 3


def another_flag(layer: Any) -> None:
    layer.dropout.p = 1.0


def another_function(layer: Any) -> None:
    layer.convolution.forward = torch.neg


def another_dtype(layer: Any) -> None:
    layer.scale = layer.scale.double()


def another_shape(layer: Any) -> None:
    layer.scale = layer.scale[:1]


CHANGES = [another_submodule, another_attribute, another_flag, another_function, another_dtype, another_shape]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("index", [0, 1, 3])
def test_change_of_any_layer_is_noticed(change: Callable[[Any], None], index: int) -> None:
    torch._dynamo.reset()
    graphs: list[fx.GraphModule] = []
    model = Model().double()
    inputs = INPUTS[0].double()
    run = compiled(model, graphs, {Layer})
    run(inputs)
    run(inputs)
    assert len(graphs) == 1
    change(model.layers[index])
    torch.testing.assert_close(run(inputs), model(inputs), check_dtype=True)
    assert len(graphs) == 2 or change is another_dtype


def test_reason_why_a_layer_is_not_copied_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "graph_fsdp"):
        check_equal(changed(with_another_dropout), {Layer}, INPUTS)
    assert any("dropout'].p is not what" in message for message in caplog.messages)


def small(kind: str, **sizes: int) -> nn.Module:
    """A model of transformers' with four equal layers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64} | sizes
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model: nn.Module = transformers.AutoModel.from_config(config)
    return model.train()


SMALL = {
    "llama": {"intermediate_size": 64},
    "gpt2": {},
    "bert": {"intermediate_size": 64, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "qwen3": {"intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2},
    "mistral": {"intermediate_size": 64, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", SMALL)
def test_models_of_transformers(kind: str) -> None:
    model = small(kind, **SMALL[kind])
    classes = {type(layer) for layers in model.modules() if isinstance(layers, nn.ModuleList) for layer in layers}
    tokens = torch.arange(16).reshape(2, 8)
    options = {} if kind == "bert" else {"use_cache": False}

    def make() -> nn.Module:
        return small(kind, **SMALL[kind])

    graphs, copied = check_equal(make, classes, (tokens,), **options)
    assert graphs == 1 and copied >= 2


def test_compiled_model_has_one_layer_traced() -> None:
    torch._dynamo.reset()
    model = graph_fsdp.compile(GPT(depth=DEPTH), backend="eager")
    outputs = model(torch.zeros(2, 8, dtype=torch.long))
    assert model.__dict__["_graph_fsdp"].equal_layers.copied == DEPTH - 1
    outputs.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
