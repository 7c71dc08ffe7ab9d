"""``fullgraph=False``: whatever Python does between and around graphs, a model computes what it computes without us."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp.report.report import engine_of

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def assert_as_plain(
    build: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]], calls: int = 3, **options: Any
) -> nn.Module:
    """Outputs, and the gradients of all parameters, are the plain model's, call after call."""
    torch.manual_seed(0)
    plain = build().double()  # differences of rounding are none then
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", **{"fullgraph": False, **options})
    for _ in range(calls):
        torch.manual_seed(1)
        values = inputs()
        found, expected = model(*values), plain(*values)
        torch.testing.assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)
        model.zero_grad()
        plain.zero_grad()
    return model


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (found.grad is None) == (expected.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")


class Loop(nn.Module):
    """A branch on data in each turn: Dynamo leaves the loop to Python, and traces a layer for all layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            scale = 2 if bool((mask == mask).all()) else 1
            x = x + scale * torch.relu(layer(x))
        return x


def test_a_break_in_a_loop_runs_each_layer_with_its_own_parameters() -> None:
    model = assert_as_plain(lambda: Loop(12), lambda: (torch.randn(2, WIDTH).double(), torch.ones(3)))
    causes = [graph.cause for graph in graph_fsdp.inspect(model).graphs]
    assert [cause.kind for cause in causes].count("parameters") == 10
    assert "runs with 'layers.11.up.weight', 'layers.11.up.bias'" in causes[-1].text


class Kinds(nn.Module):
    """More classes of modules, each called by Python, than the graphs that torch makes of one function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(type(f"Block{i}", (Block,), {"forward": scaled(i)})() for i in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if bool((x == x).all()) else x
        return x


def scaled(by: int) -> Callable[[Any, Tensor], Tensor]:
    text = f"lambda self, x: {by + 1} * torch.relu(self.up(x))"
    forward: Callable[[Any, Tensor], Tensor] = eval(text)
    return forward


def test_modules_of_many_classes_that_python_calls_are_graphs() -> None:
    for policy in ({Block}, {Kinds}):  # units, and modules that are in none
        model = assert_as_plain(Kinds, lambda: (torch.randn(2, WIDTH).double(),), auto_wrap_policy=policy)
        assert len(graph_fsdp.inspect(model).graphs) == 10


class ByName(nn.Module):
    """A loop over layers that Dynamo leaves to Python, and whose names are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"layer-0": nn.Linear(WIDTH, WIDTH), "layer 1": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        for name in self.layers:
            x = self.layers[name](x)
            torch._dynamo.graph_break()
        return x


def test_modules_whose_names_are_no_identifiers_are_read_by_python() -> None:
    units = functools.partial(nn.Sequential, ByName(), ByName())  # no frame of a module in a unit is a graph
    with pytest.warns(UserWarning, match="reads parameter '0.layers.layer-0.weight'"):
        assert_as_plain(units, lambda: (torch.randn(2, WIDTH).double(),))


class Exchanging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.active = self.experts[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.active(x)


def test_a_module_that_is_exchanged_for_one_of_its_kind_runs_with_its_own_parameters() -> None:
    plain = Exchanging()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    x = torch.randn(2, WIDTH)
    for which in (0, 1, 2, 0, 1):
        model.active, plain.active = model.experts[which], plain.experts[which]
        found, expected = model(x), plain(x)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
        expected.sum().backward()
        assert_same_gradients(model, plain)


class ChunkedProduct(torch.autograd.Function):
    """As libraries write losses over a large vocabulary: chunks, products into a buffer, a backward of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(len(x), len(weight))
        for row in range(len(x)):
            torch.mm(x[row : row + 1], weight.t(), out=out[row : row + 1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class Chunked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.body(x))

    @torch.compiler.disable
    def logits(self, x: Tensor) -> Tensor:
        return ChunkedProduct.apply(x, self.head.weight)


def vectors() -> tuple[Tensor]:
    return (torch.randn(2, WIDTH).double(),)


def test_a_function_of_autograd_outside_of_graphs_gets_the_whole_parameter() -> None:
    with pytest.warns(UserWarning, match=r"reads parameter 'head\.weight': its unit .* is gathered"):
        model = assert_as_plain(Chunked, vectors)
    causes = [graph.cause for graph in graph_fsdp.inspect(model).graphs]
    assert [cause.kind for cause in causes].count("python") == 1


class Positions(nn.Module):
    """The first piece takes no input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(WIDTH, dtype=torch.float64) + 1
        torch._dynamo.graph_break()
        return self.block(x * positions)


def test_a_piece_without_inputs() -> None:
    assert_as_plain(Positions, vectors)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
@pytest.mark.parametrize("kind", ["encoder", "transformer"])
def test_transformers_of_torch_with_a_mask(kind: str) -> None:
    mask = torch.triu(torch.full((5, 5), float("-inf"), dtype=torch.float64), 1)
    sequences = functools.partial(torch.randn, 2, 5, 8, dtype=torch.float64)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True}
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
        assert_as_plain(lambda: nn.TransformerEncoder(layer, 2), lambda: (sequences(), mask), calls=2)
    else:
        inputs = lambda: (sequences(), sequences(), None, mask)  # noqa: E731
        assert_as_plain(lambda: nn.Transformer(8, 2, 1, 1, 16, **options), inputs, calls=2)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_a_model_that_dynamo_gives_up_on_trains_unit_by_unit() -> None:
    with torch._dynamo.config.patch(recompile_limit=1):
        scales = itertools.count(1)
        model = assert_as_plain(Scaled, lambda: (*vectors(), f"{next(scales)}"), auto_wrap_policy={Block})
    found = [graph.cause for graph in graph_fsdp.inspect(model).graphs if graph.cause.kind == "python"]
    assert {re.search(r"its unit '(.*?)'", cause.text)[1] for cause in found} == {"blocks.0", "blocks.1"}
    assert all("bytes, with no compute beside the gather" in cause.text for cause in found)


class Scaled(nn.Module):
    """Each text is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, scale: str) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(nn.functional.linear(x, block.up.weight)) * int(scale)
        return x


class PassedOn(nn.Module):
    """A function of autograd gets a parameter that nothing reads in forward; another part is not used at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.outside(self.first(x))

    @torch.compiler.disable
    def outside(self, x: Tensor) -> Tensor:
        return WithoutWeight.apply(self.second(x), self.first.bias)


class WithoutWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].sum(0)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_only_what_has_a_gradient_without_us_has_one() -> None:
    assert_as_plain(PassedOn, vectors)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_units_are_whole_until_backward_has_ended_and_are_gathered_again_for_another_one() -> None:
    torch.manual_seed(0)
    plain = Chunked()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", fullgraph=False)
    placeholder = engine_of(model).storage.parameters["head.weight"].placeholder
    outputs = []
    for made in (model, plain):
        first, second = made(torch.ones(1, WIDTH)), made(-torch.ones(1, WIDTH))
        (first.sum() + second.sum()).backward(retain_graph=True)
        second.sum().backward()
        outputs.append(first)
    assert_same_gradients(model, plain)
    with torch._C.DisableTorchFunctionSubclass():
        assert placeholder.untyped_storage().nbytes() == 0
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    with torch._C.DisableTorchFunctionSubclass():
        assert placeholder.untyped_storage().nbytes() == 0


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_what_code_outside_of_graphs_writes_to_a_parameter_is_refused() -> None:
    class Writing(Chunked):
        @torch.compiler.disable
        def logits(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.clamp_(-1, 1)
            return self.head(x)

    model = graph_fsdp.compile(Writing(), backend="eager", fullgraph=False)
    with pytest.raises(graph_fsdp.UnsupportedError, match=r"'head\.weight' was written by code outside of graphs"):
        model(torch.ones(1, WIDTH))


class Adapted(nn.Module):
    """A parametrization for as long as a forward takes, as peft has it for LoRA's ``target_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        assert self.base.bias.isfinite().all()  # the unit is whole from here on
        parametrize.register_parametrization(self.base, "weight", nn.Tanh())
        yield
        parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)

    def forward(self, x: Tensor) -> Tensor:
        with self.changed():
            return self.base(x)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_a_parametrization_that_comes_and_goes_in_a_forward_writes_nothing() -> None:
    assert_as_plain(lambda: nn.Sequential(Adapted(), Adapted()), lambda: (torch.randn(3, WIDTH, dtype=torch.float64),))


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_after_a_backward_that_raised_gradients_are_those_of_the_next_one() -> None:
    torch.manual_seed(0)
    plain = Chunked()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager", fullgraph=False)
    for raises in (True, False):
        for made in (model, plain):
            made.zero_grad()
            x = torch.ones(1, WIDTH, requires_grad=True)
            if raises:
                x.register_hook(_stop)
                with pytest.raises(InterruptedError):
                    made(x).sum().backward()
            else:
                made(x).sum().backward()
    assert_same_gradients(model, plain)


class Checkpointed(nn.Module):
    """What it computes again in backward breaks graphs, so that Dynamo leaves the checkpoints to Python."""

    def __init__(self, reentrant: bool, of_a_method: bool) -> None:
        super().__init__()
        self.layers, self.reentrant, self.of_a_method = Loop(3), reentrant, of_a_method
        self.head = nn.Linear(WIDTH, WIDTH)

    def scores(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layers(x, x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.of_a_method:
            return checkpoint(self.scores, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.layers, x, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize(
    ("units", "reentrant", "of_a_method"),
    [(None, False, True), (None, True, False), ({Block}, False, False), ({Loop}, True, True)],
)
@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_checkpoints_that_python_computes_again(units: Any, reentrant: bool, of_a_method: bool) -> None:
    def inputs() -> tuple[Tensor]:
        return (torch.randn(2, WIDTH).double().requires_grad_(),)

    assert_as_plain(lambda: Checkpointed(reentrant, of_a_method), inputs, auto_wrap_policy=units)


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_an_error_in_what_is_computed_again_leaves_the_model_its_shards() -> None:
    model = graph_fsdp.compile(Checkpointed(False, False), backend="eager", fullgraph=False)
    shards = list(model.parameters())
    loss = model(torch.ones(1, WIDTH)).sum()
    hook = model.layers.layers[1].register_forward_pre_hook(lambda *_: _stop(loss))
    with pytest.raises(InterruptedError):
        loss.backward()
    assert all(now is shard for now, shard in zip(model.parameters(), shards, strict=True))
    hook.remove()
    model(torch.ones(1, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in shards)


def _stop(_: Tensor) -> None:
    raise InterruptedError
