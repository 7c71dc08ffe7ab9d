"""Equal layers are traced once, and nobody can see it in the graphs or in the numbers."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from launch import run_ranks
from marks import mostly_long
from models import (
    CLASSES,
    GPT,
    HUGGING_FACE_CASES,
    MLP,
    SEQUENCE,
    WIDTH,
    MLPBlock,
    Selective,
    SelectiveAnew,
    UnevenBlock,
    llama,
)
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp.passes import Graph
from graph_fsdp.passes.pipeline import PassesHaveRun

DEPTH = 4


def graphs_of(make: Callable[[], nn.Module], inputs: dict[str, Any], *, repeat: bool, **options: Any) -> list[Graph]:
    """A model's graphs after all passes, on rank 0 of 8."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = graph_fsdp.compile(make(), **options)
    engine: Any = model.__dict__["_graph_fsdp"]
    engine.repeat_traces, engine.run_passes_only = repeat, True
    with pytest.raises(PassesHaveRun) as end:
        model(**inputs)
    return end.value.graphs


def text_of(graph: fx.Graph) -> str:
    """A graph's code and the metadata of its values, with nodes called by the order they come in."""
    nodes = list(graph.nodes)
    names = {node: f"v{index}" for index, node in enumerate(nodes)}
    memories: dict[int, int] = {}
    lines = []
    for node in nodes:
        if node.op == "get_attr":
            lines.append(f"{names[node]} = {getattr(graph.owning_module, str(node.target)).tolist()}")
            continue
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Named(names[n]))
        modules = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
        value = [_described(tensor, memories) for tensor in _tensors(node.meta.get("val"))]
        what = node.op if node.op == "placeholder" else node.target
        lines.append(f"{names[node]} = {what} {arguments} {value} {node.meta.get('fsdp')} {modules}")
    return "\n".join(lines)


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, Tensor)]


def _described(value: Tensor, memories: dict[int, int]) -> str:
    memory = memories.setdefault(value.untyped_storage()._cdata, len(memories))
    shape = re.sub(r"\bs\d+", "s", str(tuple(value.shape)))  # of a state of the generator
    return f"{value.dtype}{shape}{value.stride()}+{value.storage_offset()}@{memory}"


def trace_once(make: Callable[[], nn.Module], inputs: dict[str, Any], **options: Any) -> None:
    graphs_of(make, inputs, repeat=True, **options)


def check_equal(make: Callable[[], nn.Module], inputs: dict[str, Any], **options: Any) -> None:
    once, whole = (graphs_of(make, inputs, repeat=repeat, **options) for repeat in (True, False))
    assert [graph.phase for graph in once] == [graph.phase for graph in whole]
    for a, b in zip(once, whole, strict=True):
        assert text_of(a.fx_graph) == text_of(b.fx_graph)


# Models


class Rotated(nn.Module):
    """Every layer is passed a mask and rotary tables, by name."""

    def __init__(self, *, learnt: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RotatedBlock() for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=learnt)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[:, None] * torch.arange(WIDTH, device=x.device)
        cos, sin = ((positions.cos() * self.scale).to(x.dtype), positions.sin().to(x.dtype))
        for layer in self.layers:
            x = layer(x, mask=mask, tables=(cos, sin))
        return self.head(x)


class RotatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (y * tables[0] + y.flip(-1) * tables[1] for y in (q, k))
        return x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Dropped(nn.Module):
    """Every layer draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Checkpointed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(2 * DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.blocks[:DEPTH].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(DEPTH))
        self.stem, self.head = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 1, 1)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class Shared(nn.Module):
    """One block, run several times, between three that are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock() for _ in range(3))
        self.again = nn.ModuleList([self.blocks[0]] * 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.again):
            x = block(x)
        return x


class Collected(MLP):
    """Returns what every layer returns."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = [x := block(x) for block in self.blocks]
        return self.head(x), *found


class FromTheStart(MLP):
    """Every layer reads the first one's input too."""

    def forward(self, x: Tensor) -> Tensor:
        first = y = self.head(x)[:, :1].expand(-1, WIDTH).contiguous()
        for block in self.blocks:
            y = block(y + first) * first
        return y


class Watched(MLP):
    """What layers return beside their result is looked at, and not differentiated."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = []
        for block in self.blocks:
            y = F.gelu(block.up(x))
            seen.append(y)
            x = x + block.down(y)
        return self.head(x), torch.stack(seen).detach().mean()


class Written(MLP):
    """A layer's result is changed in place behind it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x += self.head.bias.sum()
        return self.head(x)


class Averaged(MLP):
    """The gradient of the last layer's result is one number that all elements share."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head.bias.sum() + x.sum()


class Constants(nn.Module):
    """Blocks of two kinds, each with tensors that are written out in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Constant(kind) for kind in [nn.Linear] * 4 + [nn.Bilinear] * 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Constant(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.bilinear = kind is nn.Bilinear
        self.layer = nn.Bilinear(4, 4, 4) if self.bilinear else nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.bilinear:
            return self.layer(x, x) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return self.layer(x) * torch.tensor([5.0, 6.0, 7.0, 8.0])


def hugging_face_bert() -> nn.Module:
    model = HUGGING_FACE_CASES["hf_bert"].model()
    layers = model.bert.encoder.layer
    layers.extend(type(layers[0])(model.config, layer_idx) for layer_idx in range(len(layers), DEPTH))
    return model


VECTORS = {"x": torch.ones(3, WIDTH)}
TOKENS = {"x": torch.ones(2, SEQUENCE, dtype=torch.int64)}
TEXT = {"input_ids": torch.ones(2, SEQUENCE, dtype=torch.int64), "labels": torch.ones(2, SEQUENCE, dtype=torch.int64)}
ROTATED = {"x": torch.ones(2, SEQUENCE, WIDTH), "mask": torch.ones(SEQUENCE, SEQUENCE).tril() > 0}
IMAGES = {"x": torch.ones(2, 3, 8, 8)}

# What is traced once: how many layers take how many traces.
ONCE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "mlp": (lambda: MLP(DEPTH), VECTORS, "3 layers have 1 traces"),  # the first one's input needs no gradient
    "uneven": (lambda: MLP(DEPTH, block=UnevenBlock), VECTORS, "3 layers have 1 traces"),
    "dropout": (Dropped, VECTORS, "3 layers have 1 traces"),
    "gpt_dropout": (lambda: GPT(depth=3, dropout=0.2), TOKENS, "3 layers have 1 traces"),
    "gpt_tied": (lambda: GPT(depth=DEPTH, tied=True), TOKENS, "4 layers have 1 traces"),
    "frozen": (Frozen, VECTORS, "7 layers have 2 traces"),
    "rotated": (Rotated, ROTATED, "3 layers have 1 traces"),
    "constants": (Constants, {"x": torch.ones(3, 4)}, "7 layers have 2 traces"),
    "averaged": (lambda: Averaged(DEPTH), VECTORS, "3 layers have 1 traces"),
    "checkpoint": (lambda: Checkpointed(DEPTH), VECTORS, "3 layers have 1 traces"),
    "gpt_checkpoint": (lambda: GPT(depth=DEPTH, checkpointed=True), TOKENS, "4 layers have 1 traces"),
    "selective": (lambda: Selective(DEPTH), VECTORS, "3 layers have 1 traces"),
    "selective_anew": (lambda: SelectiveAnew(DEPTH), VECTORS, "3 layers have 1 traces"),
    "checkpoint_dropout": (lambda: GPT(depth=3, dropout=0.2, checkpointed=True), TOKENS, "3 layers have 1 traces"),
    "llama": (lambda: llama(DEPTH), TEXT, "3 layers have 1 traces"),
    "hf_bert": (hugging_face_bert, TEXT, "4 layers have 1 traces"),
}
# What is not, and why.
WHOLE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "two_layers": (lambda: MLP(2), VECTORS, "no 3 of 2 layers are equal"),
    "batch_norm": (Convolutions, IMAGES, "3 layers like it are traced by themselves: copy_ writes to its input"),
    "shared": (Shared, VECTORS, "no 3 of 3 layers are equal"),
    "collected": (lambda: Collected(DEPTH), VECTORS, "which is read again behind it"),
    "from_the_start": (lambda: FromTheStart(DEPTH), VECTORS, "which is read again behind it"),
    "learnt_tables": (lambda: Rotated(learnt=True), ROTATED, "which is read again behind it"),
    "other_policies": (lambda: SelectiveAnew(DEPTH, different=True), VECTORS, "no 3 of 4 layers are equal"),
    "watched": (lambda: Watched(DEPTH), VECTORS, "an output of it has no gradient"),
    "written": (lambda: Written(DEPTH), VECTORS, "an input or output of it is written to behind it"),
}

SHORT = ("mlp", "checkpoint", "selective", "selective_anew", "gpt_dropout", "frozen", "constants", "averaged")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", mostly_long(ONCE, SHORT))
def test_equal_layers_have_the_graphs_of_a_whole_trace(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, inputs, expected = ONCE[name]
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(make, inputs, backend="eager")
    assert expected in caplog.messages
    assert ["has no trace of others" in message for message in caplog.messages].count(True) == (name == "averaged")


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", mostly_long(WHOLE, [name for name in WHOLE if name != "from_the_start"]))
def test_other_layers_are_traced_whole_and_the_log_says_why(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, inputs, reason = WHOLE[name]
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        (check_equal if name in ("watched", "written") else trace_once)(make, inputs, backend="eager")
    assert reason in "\n".join(caplog.messages)


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", mostly_long(["rotated", "llama"], ["rotated"]))
def test_layers_whose_casts_change_nothing_are_traced_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each layer casts the rotary tables that the one before it was given, which are in the dtype already."""
    make, inputs, expected = ONCE[name]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(make, inputs, backend="eager", mp_policy=policy)
    assert expected in caplog.messages


@pytest.mark.usefixtures("fake_group")
def test_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    make, inputs, _ = ONCE["dropout"]
    with torch.no_grad(), caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(make, inputs, backend="eager")
    assert "4 layers have 1 traces" in caplog.messages, "the first one is as the others where nothing needs a gradient"


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("name", mostly_long(["dropout", "llama"], ["dropout"]))
def test_as_inductor_prepares_them(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, inputs, expected = ONCE[name]
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        check_equal(make, inputs, backend="inductor")
    assert expected in caplog.messages


@pytest.mark.usefixtures("fake_group")
def test_sizes_that_change_are_traced_whole(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "graph_fsdp"):
        trace_once(lambda: MLP(DEPTH), VECTORS, backend="eager", dynamic=True)
    assert "of symbolic size" in "\n".join(caplog.messages)


# Numbers, and ranks that trace differently


def train(repeat: bool) -> list[Tensor]:
    """On a rank: the losses and the shards of two steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = graph_fsdp.compile(Dropped(), backend="eager")
    model.__dict__["_graph_fsdp"].repeat_traces = repeat
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        loss = model(torch.randn(2, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(parameter.to_local().detach().clone() for parameter in model.parameters())]  # type: ignore[attr-defined]


def train_alike_and_not() -> list[list[Tensor]]:
    return [train(repeat=False), train(repeat=torch.distributed.get_rank() == 0)]


def test_ranks_need_not_trace_alike() -> None:
    for whole, mixed in run_ranks(train_alike_and_not, 2):
        assert all(torch.equal(a, b) for a, b in zip(whole, mixed, strict=True))
