"""Compute regions: which are equal, and how many are compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import GPT, MLP, VOCABULARY, llama
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.passes import Graph
from graph_fsdp.runtime.backends import BACKENDS, InductorBackend
from graph_fsdp.runtime.regions.regions import Compiled, Region, RegionCache, RegionKey, cut, region_key, run_as_graph

aten = torch.ops.aten

Build = Callable[["Computation"], None]


class Computation:
    """A graph that is one region, built node by node."""

    def __init__(self) -> None:
        self.module = fx.GraphModule(nn.Module(), fx.Graph())
        self.mode = FakeTensorMode()

    def input(self, value: Callable[[], Tensor]) -> fx.Node:
        node = self.module.graph.placeholder("x")
        with self.mode:
            node.meta["val"] = value()
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        return Graph(self.module, "forward").call(target, args)

    def returns(self, *nodes: fx.Node) -> None:
        self.module.graph.output(nodes)


def region_of(build: Build) -> Region:
    computation = Computation()
    build(computation)
    (region,) = cut(Graph(computation.module, "forward"))
    assert isinstance(region, Region)
    return region


def key_of(build: Build, kind: str = "forward") -> RegionKey:
    return region_key(region_of(build), kind)


def unary(value: Callable[[], Tensor] = lambda: torch.empty(4, 4), target: Any = aten.mul.Tensor, *args: Any) -> Build:
    def build(c: Computation) -> None:
        c.returns(c.call(target, c.input(value), *(args or (2,))))

    return build


# Which regions are equal


def test_regions_of_other_nodes_that_compute_the_same_are_equal() -> None:
    def preceded(c: Computation) -> None:
        c.input(lambda: torch.empty(3))  # not an input of the region
        unary()(c)

    assert key_of(unary()) == key_of(unary()) == key_of(preceded)
    assert key_of(unary()).digest == key_of(preceded).digest


def test_inputs_are_ordered_by_their_first_use() -> None:
    def product(swapped: bool, c: Computation) -> None:
        first, second = c.input(lambda: torch.empty(4)), c.input(lambda: torch.empty(4))
        c.returns(c.call(aten.sub.Tensor, *((second, first) if swapped else (first, second))))

    def square(c: Computation) -> None:
        x = c.input(lambda: torch.empty(4))
        c.returns(c.call(aten.sub.Tensor, x, x))

    assert key_of(partial(product, False)) == key_of(partial(product, True))
    assert key_of(square) != key_of(partial(product, False))


@pytest.mark.parametrize(
    "other",
    [
        unary(target=aten.add.Tensor),
        unary(lambda: torch.empty(4, 4), aten.mul.Tensor, 2.0),
        unary(lambda: torch.empty(4, 4), aten.mul.Tensor, True),
        unary(lambda: torch.empty(2, 8)),
        unary(lambda: torch.empty(4, 4).t()),
        unary(lambda: torch.empty(32)[16:].view(4, 4)),
        unary(lambda: torch.empty(4, 4, dtype=torch.bfloat16)),
    ],
    ids=["operator", "float", "bool", "shape", "strides", "offset", "dtype"],
)
def test_what_distinguishes_regions(other: Build) -> None:
    assert key_of(other) != key_of(unary())
    assert key_of(other).digest != key_of(unary()).digest


def filled(device: str, other: str) -> Build:
    """Of an input on one device, and a tensor that is made on another."""

    def build(c: Computation) -> None:
        x = c.input(lambda: torch.empty(4, 4, device=device))
        with c.mode:
            ones = c.module.graph.call_function(aten.full.default, ([4, 4], 1.0), {"device": torch.device(other)})
            ones.meta["val"] = torch.empty(4, 4, device=other)
        c.returns(c.call(aten.relu.default, x), c.call(aten.neg.default, ones))

    return build


def test_ranks_with_other_devices_have_one_digest_for_equal_regions() -> None:
    first, second = key_of(filled("cuda:0", "cuda:0")), key_of(filled("cuda:1", "cuda:1"))
    assert first.digest == second.digest and first != second, "one process runs it on the device that it is of"
    assert first.devices == (torch.device("cuda:0"),) and second.devices == (torch.device("cuda:1"),)
    others = [key_of(filled(*devices)) for devices in [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("xpu:0", "xpu:0")]]
    assert len({key.digest for key in (first, *others)}) == 4


def test_regions_of_forward_and_backward_are_not_equal() -> None:
    assert key_of(unary(), "forward") != key_of(unary(), "backward")


def two_inputs(shared: bool, written: bool, c: Computation) -> None:
    """A buffer and another input, of its memory or not. The other is read after the buffer was written, or not."""
    with c.mode:
        memory = torch.empty(8)
    buffer = c.input(lambda: memory[:4])
    other = c.input(lambda: memory[:4] if shared else torch.empty(4))
    total = c.call(aten.add.Tensor, buffer, other)
    if written:
        c.call(aten.copy_.default, buffer, total)
    c.returns(c.call(aten.exp.default, other), total)


def test_inputs_that_share_memory_are_told_apart_where_one_is_written() -> None:
    assert key_of(partial(two_inputs, True, True)) != key_of(partial(two_inputs, False, True))
    assert key_of(partial(two_inputs, True, False)) == key_of(partial(two_inputs, False, False))
    assert key_of(partial(two_inputs, False, True)) != key_of(partial(two_inputs, False, False))


def test_outputs_that_are_views_of_inputs_are_told_from_copies() -> None:
    view = unary(lambda: torch.empty(4, 4), aten.view.default, [16])
    copy = unary(lambda: torch.empty(4, 4), aten._unsafe_view.default, [16])
    assert key_of(view) != key_of(copy)


def returning(names: str, c: Computation) -> None:
    x = c.input(lambda: torch.empty(4))
    nodes = {"a": c.call(aten.sin.default, x)}
    nodes["b"] = c.call(aten.cos.default, nodes["a"])
    nodes["c"] = c.call(aten.exp.default, nodes["b"])
    c.returns(*(nodes[name] for name in names))


def test_what_is_returned_is_part_of_the_key() -> None:
    assert key_of(partial(returning, "ac")) != key_of(partial(returning, "c"))


# Which function serves which region


class NoKernels(InductorBackend):
    """The graphs that Inductor would be given, run as they are."""

    name = "no_kernels"

    def compile_region(self, region: Region, kind: str) -> Compiled:
        return run_as_graph(region.module)


def chain(*returned: str) -> Graph:
    """A graph of regions with a collective's wait between them; each is that of ``returning``."""
    c = Computation()
    results = []
    for names in returned:
        x = c.input(lambda: torch.empty(4))
        full = c.call(torch.ops.graph_fsdp.all_gather_wait.default, x)
        nodes = {"a": c.call(aten.sin.default, full)}
        nodes["b"] = c.call(aten.cos.default, nodes["a"])
        nodes["c"] = c.call(aten.exp.default, nodes["b"])
        results += [nodes[name] for name in names]
    c.returns(*results)
    return Graph(c.module, "forward")


def compiled_for(*returned: str) -> tuple[int, list[list[Tensor]]]:
    """How many functions are made for the regions of ``chain``, and what each region returns for its own input."""
    cache, graph = RegionCache(NoKernels()), chain(*returned)
    cache.prepare([graph])
    regions = [step for step in cut(graph) if isinstance(step, Region)]
    results = [list(cache.compile(region, "forward")([torch.ones(4)])) for region in regions]
    assert cache.regions == len(returned)
    return cache.compiled, results


def test_a_region_that_returns_less_uses_the_function_of_one_that_runs_as_often() -> None:
    a, c = torch.ones(4).sin(), torch.ones(4).sin().cos().exp()
    compiled, results = compiled_for("ac", "ac", "c")
    assert compiled == 1
    for found, expected in zip(results, ([a, c], [a, c], [c]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_region_that_runs_more_often_is_compiled_for_what_it_returns() -> None:
    assert compiled_for("ac", "c", "c")[0] == 2
    assert compiled_for("ac", "bc")[0] == 2, "neither returns all that the other does"
    assert compiled_for("abc", "ac", "c")[0] == 1


def test_a_prepared_graph_is_cut_once_and_another_one_or_a_copy_anew() -> None:
    cache, graph, other = RegionCache(NoKernels()), chain("ac", "c"), chain("b")

    def nodes(steps: list[Any]) -> list[Any]:
        return [(step.nodes, step.outputs) if isinstance(step, Region) else step for step in steps]

    cache.prepare([graph])
    steps = cache.cut(graph)
    assert nodes(steps) == nodes(cut(graph))
    again = cache.cut(graph)
    assert again[1] is not steps[1] and nodes(again) == nodes(steps), "it may have changed once its program is written"
    cache.prepare([graph])
    assert nodes(cache.cut(other)) == nodes(cut(other))
    graph.fx_graph.erase_node(graph.output)
    graph.fx_graph.output(())
    assert nodes(cache.cut(graph)) == nodes(cut(graph)) != nodes(steps)


@pytest.mark.parametrize("kept", [False, True], ids=["gathered", "kept for backward"])
def test_no_kernel_is_given_a_buffer_that_32_bits_do_not_index(kept: bool) -> None:
    """Two parameters of a bucket of 2^31 elements, whose memory is fake; the second is used twice, in two regions."""
    c = Computation()
    x, full = c.input(lambda: torch.empty(4)), c.input(lambda: torch.empty(2**31))
    bucket = full if kept else c.call(torch.ops.graph_fsdp.all_gather_wait.default, full)
    first = c.call(aten.sin.default, c.call(aten.slice.Tensor, bucket, 0, 0, 4))
    weight = c.call(aten.view.default, c.call(aten.slice.Tensor, bucket, 0, 2**31 - 4, 2**31), [4])
    second = c.call(aten.add.Tensor, first, weight)
    other = c.call(torch.ops.graph_fsdp.all_gather_wait.default, x)
    third = c.call(aten.add.Tensor, c.call(aten.mul.Tensor, second, other), weight)
    c.returns(third)
    regions = [step for step in cut(Graph(c.module, "forward")) if isinstance(step, Region)]
    sizes = {region: [node.meta["val"].numel() for node in region.inputs] for region in regions}
    assert [(region.is_view_only, max(given)) for region, given in sizes.items()] == [
        (True, 2**31),
        (False, 4),
        (False, 4),
    ]
    assert [node.target for node in regions[0].nodes] == [aten.slice.Tensor] * 2


def compiled_regions(model: nn.Module, *batch: Tensor, **named: Tensor) -> tuple[int, int]:
    graph_fsdp.compile(model, backend="no_kernels")
    output = model(*batch, **named)
    (output.loss if named else output.sum()).backward()
    report = graph_fsdp.inspect(model)
    return report.regions, report.compiled_regions


def mlp_regions(depth: int) -> tuple[int, int]:
    return compiled_regions(MLP(depth), torch.ones(2, 16))


def gpt_regions(depth: int) -> tuple[int, int]:
    return compiled_regions(GPT(depth=depth), torch.arange(8).expand(2, 8))


def llama_regions(depth: int) -> tuple[int, int]:
    tokens = torch.arange(8).expand(2, 8) % VOCABULARY
    return compiled_regions(llama(depth), input_ids=tokens, labels=tokens)


@pytest.mark.parametrize(
    ("regions_of", "distinct"),
    [
        pytest.param(mlp_regions, 7, id="mlp"),
        pytest.param(gpt_regions, 11, id="gpt", marks=pytest.mark.long),
        pytest.param(llama_regions, 13, id="llama", marks=pytest.mark.long),
    ],
)
def test_the_number_of_compiled_regions_does_not_grow_with_depth(
    fake_group: None, monkeypatch: pytest.MonkeyPatch, regions_of: Callable[[int], tuple[int, int]], distinct: int
) -> None:
    monkeypatch.setitem(BACKENDS, "no_kernels", NoKernels)
    shallow, deep = regions_of(3), regions_of(5)
    assert deep[0] >= shallow[0] + 6
    assert (shallow[1], deep[1]) == (distinct, distinct)


class TransposedSoftplus(nn.Module):
    """The kernel of softplus's gradient lays it out as no fake kernel says: a view of it is not possible."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 2), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.softplus(self.up(x)).transpose(1, 2))


def test_what_was_traced_as_a_view_is_copied_where_none_is_possible() -> None:
    torch.manual_seed(0)
    plain = TransposedSoftplus()
    model = graph_fsdp.compile(copy.deepcopy(plain), backend="eager")
    x = torch.randn(2, 3, 4)
    for made in (model, plain):
        made(x).square().sum().backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


# Calls


def views(computation: Computation) -> None:
    flat = computation.input(lambda: torch.empty(12))
    first = computation.call(aten.view.default, computation.call(aten.slice.Tensor, flat, 0, 2, 8), [2, 3])
    computation.returns(first, computation.call(aten.slice.Tensor, flat, 0, 8, 10))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("buffer", "is_flat"), [(torch.arange(12.0), True), (torch.arange(24.0)[::2], False)])
def test_views_of_a_flat_buffer_are_made_without_operators(buffer: Tensor, is_flat: bool) -> None:
    compiled = RegionCache(BACKENDS["eager"]()).compile(region_of(views), "backward")
    whole = torch.cat([torch.zeros(5), buffer])[5:] if is_flat else buffer  # which begins behind its storage
    given = [whole]
    with Operators() as operators:
        first, second = compiled(given)
    assert not given and bool(operators.ran) != is_flat
    assert torch.equal(first, buffer[2:8].view(2, 3)) and torch.equal(second, buffer[8:10])
    first.zero_()
    assert not whole[2:8].any(), "it is the buffer's memory"


def of_another_buffer(computation: Computation) -> None:
    """The values were traced of a buffer that lay elsewhere, as those of a shard that is fetched now."""
    views(computation)
    with computation.mode:
        next(iter(computation.module.graph.nodes)).meta["val"] = torch.empty(20)[8:]


def at_an_absolute_place(computation: Computation) -> None:
    flat = computation.input(lambda: torch.empty(12))
    computation.returns(computation.call(aten.as_strided.default, flat, [2], [1], 3))


def read_as_another_type(computation: Computation) -> None:
    computation.returns(computation.call(aten.view.dtype, computation.input(lambda: torch.empty(12)), torch.int32))


@pytest.mark.parametrize("build", [of_another_buffer, at_an_absolute_place, read_as_another_type])
@pytest.mark.parametrize("begin", [0, 5])
def test_views_are_where_their_operators_put_them(build: Build, begin: int) -> None:
    region = region_of(build)
    expected = region.module(torch.arange(20.0)[begin : begin + 12])
    found = RegionCache(BACKENDS["eager"]()).compile(region, "backward")([torch.arange(20.0)[begin : begin + 12]])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.dtype is other.dtype


def test_views_that_forward_returns_are_made_by_operators_which_autograd_sees() -> None:
    compiled = RegionCache(BACKENDS["eager"]()).compile(region_of(views), "forward")
    with Operators() as operators:
        compiled([torch.arange(12.0)])
    assert operators.ran


def test_what_inductor_wrote_is_called_and_nothing_around_it() -> None:
    region = region_of(views)
    with tracing(TracingContext(region.inputs[0].meta["val"].fake_mode)):
        called: Any = compat.inductor_compile(region.module, "forward")
    assert called.func is called.compiled.current_callable
    first, second = called([torch.arange(12.0)])
    assert first.tolist() == [[2, 3, 4], [5, 6, 7]] and second.tolist() == [8, 9]
