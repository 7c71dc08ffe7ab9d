"""Fake values: each distinct call is run once, and what a result depends on tells calls apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect, fake_values
from graph_fsdp.passes.ir.fake_values import FakeValues, kind

aten = torch.ops.aten


class Calls:
    """Calls on fake values, and how many of them were run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graph, self.values, self.run = fx.Graph(), FakeValues(), 0
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        evaluate = fake_values.evaluate

        def counting(node: fx.Node) -> Any:
            self.run += 1
            return evaluate(node)

        monkeypatch.setattr(fake_values, "evaluate", counting)

    def input(self, make: Callable[[], Tensor]) -> fx.Node:
        node = self.graph.placeholder("x")
        with self.mode:
            node.meta["val"] = make()
        return node

    def computed(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        return self.values.kind_of(self.graph.call_function(target, args, kwargs))

    def value(self, target: Any, *args: Any) -> Any:
        return self.values.of(self.graph.call_function(target, args))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def test_a_call_on_values_of_the_same_kind_is_run_once(calls: Calls) -> None:
    first, second = (calls.input(lambda: torch.empty(4, 8)) for _ in range(2))
    expected = kind(torch.empty(8, 4))
    assert [calls.computed(aten.view.default, x, [8, 4]) for x in (first, second)] == [expected, expected]
    assert calls.run == 1


FLOATS, INTEGERS = (lambda: torch.empty(4, 8)), (lambda: torch.empty(4, 8, dtype=torch.int64))


@pytest.mark.parametrize(
    ("before", "call", "make"),
    [
        ((FLOATS, aten.view.default, [8, 4]), (aten.view.default, [4, 8]), FLOATS),
        ((FLOATS, aten.neg.default), (aten.neg.default,), INTEGERS),
        ((FLOATS, aten.neg.default), (aten.neg.default,), lambda: torch.empty(8, 4)),
        ((INTEGERS, aten.mul.Tensor, 2), (aten.mul.Tensor, 2.0), INTEGERS),
        ((FLOATS, aten.sum.dim_IntList, [1], False), (aten.sum.dim_IntList, [1], True), FLOATS),
        ((FLOATS, aten.neg.default), (aten.neg.default,), lambda: torch.empty(4, 8, device="meta")),
    ],
    ids=["arguments", "dtype", "shape", "type of a number", "flag", "device"],
)
def test_other_calls_have_results_of_their_own(
    calls: Calls, before: tuple[Any, ...], call: tuple[Any, ...], make: Callable[[], Tensor]
) -> None:
    make_before, target, *args = before
    first = calls.computed(target, calls.input(make_before), *args)
    second = calls.computed(call[0], calls.input(make), *call[1:])
    assert second == kind(call[0](make(), *call[1:])) != first


def test_a_call_that_cannot_run_is_not_taken_for_one_that_can(calls: Calls) -> None:
    calls.computed(aten.view.default, calls.input(FLOATS), [32])
    transposed = calls.input(lambda: torch.empty(8, 4).t())
    for _ in range(2):
        with pytest.raises(ValueError, match="view"):
            calls.computed(aten.view.default, transposed, [32])


def test_symbolic_sizes_and_operators_that_write_are_run_each_time(calls: Calls) -> None:
    assert calls.mode.shape_env is not None
    size = calls.mode.shape_env.create_unbacked_symint()
    symbolic = calls.input(lambda: torch.empty(size, 4))
    plain = calls.input(FLOATS)
    for _ in range(2):
        assert calls.computed(aten.neg.default, symbolic) == kind(symbolic.meta["val"])
        calls.computed(aten.copy_.default, plain, plain)
    assert calls.run == 4


@pytest.mark.parametrize(
    ("target", "arguments", "view"),
    [
        (aten.slice.Tensor, (0, 1, 3), True),
        (aten.view.default, ([2, 16],), True),
        (aten.t.default, (), True),
        (aten.add.Tensor, (1,), False),
        (torch.ops.prims.convert_element_type.default, (torch.bfloat16,), False),
        (dialect.all_gather_wait, (), True),
    ],
    ids=str,
)
def test_a_value_made_from_an_equal_calls_is_what_the_operator_gives(
    calls: Calls, target: Any, arguments: tuple[Any, ...], view: bool
) -> None:
    inputs = [calls.input(lambda: torch.empty(48)[8:40].view(4, 8)) for _ in range(2)]
    ran, made = (calls.value(target, x, *arguments) for x in inputs)
    assert calls.run == 1
    facts = [
        (type(v), v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.requires_grad, v.fake_mode)
        for v in (ran, made)
    ]
    assert facts[0] == facts[1]
    assert ran.untyped_storage().nbytes() == made.untyped_storage().nbytes()
    memory = fake_values.compat.storage_id
    assert [memory(v) == memory(x.meta["val"]) for v, x in zip((ran, made), inputs, strict=True)] == [view, view]
    assert memory(ran) != memory(made), "equal calls on other memory have values in other memory"


def test_results_that_are_not_dense_or_several_or_none_are_made_likewise(calls: Calls) -> None:
    permuted, flat = (lambda: torch.empty(8, 4).t()), (lambda: torch.empty(2, 4, 8, 16))
    cases = (
        (permuted, lambda x: calls.value(aten.neg.default, x)),
        (permuted, lambda x: calls.value(aten.sort.default, x)),
        (flat, lambda x: calls.value(aten._scaled_dot_product_flash_attention_for_cpu.default, x, x, x)),
        (flat, lambda x: calls.value(dialect.free, x)),
    )
    for number, (make, call) in enumerate(cases, 1):
        ran, made = (call(calls.input(make)) for _ in range(2))
        assert calls.run == number
        assert type(ran) is type(made)
        tensors = [list(fake_values.iterate_tensors(value)) for value in (ran, made)]
        facts = [[(kind(t), t.stride(), t.untyped_storage().nbytes(), t.fake_mode) for t in each] for each in tensors]
        assert facts[0] == facts[1]
        memories = [fake_values.compat.storage_id(t) for each in tensors for t in each]
        assert len(set(memories)) == len(memories), "each lies in memory of its own"


def test_a_call_without_inputs_is_made_again_in_its_graph(calls: Calls) -> None:
    node = calls.graph.call_function(aten.full.default, ([4, 8], 1.0))
    with calls.mode:
        node.meta["val"] = calls.values.of(node)
    again = calls.values.again(node)
    assert again is not None
    value = again(node)
    assert (kind(value), value.fake_mode) == (kind(torch.empty(4, 8)), calls.mode)
    assert fake_values.compat.storage_id(value) != fake_values.compat.storage_id(node.meta["val"])


def test_reshape_gives_a_view_or_a_copy_whichever_strides_allow(calls: Calls) -> None:
    for make in (FLOATS, lambda: torch.empty(8, 4).t()):
        inputs = [calls.input(make) for _ in range(2)]
        values = [calls.value(aten.reshape.default, x, [32]) for x in inputs]
        memory = fake_values.compat.storage_id
        shares = [memory(v) == memory(x.meta["val"]) for v, x in zip(values, inputs, strict=True)]
        assert shares == [make is FLOATS] * 2


def test_sizes_that_depend_on_data_are_computed_each_time(calls: Calls) -> None:
    assert calls.mode.shape_env is not None
    x = calls.input(lambda: torch.empty(4, 8))
    for _ in range(2):
        calls.computed(aten.sum.default, x)
        calls.computed(aten.nonzero.default, x)
    assert calls.run == 3


def test_what_is_known_serves_other_graphs_and_is_bounded(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        calls.mode, calls.graph = FakeTensorMode(shape_env=ShapeEnv()), fx.Graph()
        value = calls.value(aten.neg.default, calls.input(FLOATS))
        assert value.fake_mode is calls.mode and calls.run == 1
    monkeypatch.setattr(FakeValues, "LIMIT", 2)
    x = calls.input(FLOATS)
    for size in (1, 2, 3):
        calls.value(aten.slice.Tensor, x, 0, 0, size)
    calls.value(aten.slice.Tensor, x, 0, 0, 3)
    assert calls.run == 4, "the third of them emptied the memory and was kept"


def test_operators_of_others_and_those_under_autocast_are_told_apart(calls: Calls) -> None:
    with torch.library._scoped_library("of_a_user", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: torch.cat([x, x]), "Meta")
        for _ in range(2):
            calls.computed(torch.ops.of_a_user.twice.default, calls.input(FLOATS))
    x = calls.input(lambda: torch.empty(4, 4))
    calls.computed(aten.mm.default, x, x)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert calls.computed(aten.mm.default, x, x)[1] is dtype
    assert calls.run == 5


def test_names_of_parameters_are_no_part_of_a_call(calls: Calls) -> None:
    shard = calls.input(lambda: torch.empty(2, 4))
    rest = ([4, 4], torch.float32, torch.float32)
    for name in ("first", "second"):
        assert kind(calls.value(dialect.gather_param, shard, *rest, name, "0")) == kind(torch.empty(4, 4))
    assert calls.run == 1


# Values that no operator makes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_values_are_those_that_torchs_constructor_makes(dtype: torch.dtype) -> None:
    mode, memory = FakeTensorMode(shape_env=ShapeEnv()), torch.empty(1024, dtype=torch.uint8, device="meta")
    device = torch.device("cpu")
    for shape, stride, offset in [((4, 3), (3, 1), 0), ((3, 4), (1, 3), 2), ((), (), 5), ((0,), (1,), 0)]:
        made = compat.fake_tensor(mode, shape, stride, dtype, device, memory, offset)
        meta = torch.empty(0, dtype=dtype, device="meta").set_(memory.untyped_storage(), offset, shape, stride)
        alone = compat.FakeTensor(mode, meta, device)
        assert type(made) is type(alone) and vars(made).keys() == vars(alone).keys()
        assert all(
            vars(made)[name] is vars(alone)[name] or vars(made)[name] == vars(alone)[name] for name in vars(made)
        )
        assert compat.storage_id(made) == compat.storage_id(alone) == compat.storage_id(memory)
        for value in (made, alone):
            layout = value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.requires_grad
            assert layout == (shape, stride, offset, dtype, device, False)
        with mode:
            assert (made + 1).shape == shape and (made + 1).device == device
