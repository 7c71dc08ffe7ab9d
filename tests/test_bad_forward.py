"""What only a forward can know: graph breaks, parameters read outside of graphs, torch.compile off.

Each is one clear error, after which the model has its shards and can be used.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.nn
from models import MLP
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import graph_fsdp


def batch() -> Tensor:
    return torch.ones(4, 16)


class Faulty(MLP):
    """An MLP whose forward does what ``fault`` names."""

    fault: str | None = None

    @torch.compiler.disable
    def norm(self) -> Tensor:
        return self.blocks[0].up.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "break":
            torch._dynamo.graph_break()
        if self.fault == "branch on data" and x.sum() > 0:
            x = 2 * x
        if self.fault == "branch on an item" and x.sum().item() > 0:
            x = 2 * x
        if self.fault == "item as an index":
            x = x * [1.0, 2.0][int(torch.rand(1).item())]
        if self.fault == "touch":
            x = x / self.norm()
        return super().forward(x)


def line_of(text: str) -> str:
    """Where in this file a text stands, as an error message has it."""
    with open(__file__) as file:
        return f"{__file__}:{next(number for number, line in enumerate(file, 1) if text in line)}"


def fail_forward(model: Faulty, fault: str | None, error: type[Exception], *words: str, trains: bool = True) -> None:
    """A forward raises; the model has its shards afterwards, and trains as soon as the fault is gone."""
    shards = list(model.parameters())
    model.fault = fault
    with pytest.raises(error) as raised:
        model(batch())
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert all(after is shard for after, shard in zip(model.parameters(), shards, strict=True))
    assert all(isinstance(shard, DTensor) for shard in shards), "a placeholder is left"
    if not trains:
        return
    with torch.compiler.set_stance("default"):
        model.fault = None
        model(batch()).sum().backward()
    assert all(shard.grad is not None for shard in shards)


# Graph breaks

BREAKS = {
    "break": ("            torch._dynamo.graph_break()", "torch._dynamo.graph_break()"),
    "branch on data": ('if self.fault == "branch on data"', "Data-dependent"),
    "branch on an item": ('if self.fault == "branch on an item"', "data-dependent expression"),
    "item as an index": ("x = x * [1.0, 2.0]", "data-dependent expression"),
    "touch": ("x = x / self.norm()", "torch.compiler.disable"),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_a_graph_break_under_fullgraph(fake_group: None, fault: str) -> None:
    line, reason = BREAKS[fault]
    words = ("cannot be traced in one graph", line_of(line), "in forward", reason, "fullgraph=False")
    fail_forward(graph_fsdp.compile(Faulty(depth=1), backend="eager"), fault, graph_fsdp.GraphBreakError, *words)


class Shape(tuple):  # type: ignore[type-arg]
    """Has no length, as e3nn's Irreps: Dynamo fails with that where it makes a guard of one."""

    def __len__(self) -> int:
        raise NotImplementedError("a shape has no length")


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.shape = Shape((1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * sum(size for size in self.shape)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_error_within_dynamo_says_where_and_what_to_do(fake_group: None, fullgraph: bool) -> None:
    model = graph_fsdp.compile(nn.Sequential(Shaped(), nn.Linear(16, 16)), backend="eager", fullgraph=fullgraph)
    words = "(?s)Dynamo.*failed at .*, in __len__.*a shape has no length.*fullgraph=False.*torch.compiler.disable"
    with pytest.raises(graph_fsdp.GraphBreakError, match=words):
        model(batch())
    model[0].forward = torch.compiler.disable(model[0].forward)
    if not fullgraph:
        assert model(batch()).shape == batch().shape


class Raising(nn.Module):
    """Its forward raises what ``fault`` raises."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(self.layer(x))


def of_two_rows(x: Tensor) -> Tensor:
    if len(x) != 2:
        raise ValueError(f"{len(x)} rows, not 2")
    return x


def gathered(x: Tensor) -> Tensor:
    return torch.cat(torch.distributed.nn.all_gather(x))


class WrongWidth(Exception):
    """An exception of the model's author."""


def of_own_class(x: Tensor) -> Tensor:
    try:
        return {16: x}[x.shape[1] + 1]
    except KeyError as error:
        raise WrongWidth(x.shape[1], "is wrong") from error


def asserted(x: Tensor) -> Tensor:
    assert x.shape[1] == 17, "width 17"
    return x


def without_attribute(x: Tensor) -> Tensor:
    return nn.functional.no_such_attribute(x)  # type: ignore[attr-defined, no-any-return]


def in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(of_two_rows, x, use_reentrant=False)  # type: ignore[no-any-return]


def wrong_shapes(x: Tensor) -> Tensor:
    return x @ torch.ones(3, 3)


def of_no_tensor(x: Tensor) -> Tensor:
    return nn.functional.linear([1.0], x)  # type: ignore[arg-type]


def wrong_targets(x: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x, torch.zeros(3, dtype=torch.long))


RAISES: dict[Callable[[Tensor], Tensor], tuple[type[Exception], str]] = {
    of_two_rows: (ValueError, "^4 rows, not 2$"),
    in_a_checkpoint: (ValueError, "^4 rows, not 2$"),
    of_own_class: (WrongWidth, "16, 'is wrong'"),
    asserted: (AssertionError, "width 17"),
    without_attribute: (AttributeError, "no_such_attribute"),
    wrong_shapes: (RuntimeError, "^a and b must have same reduction dim"),
    of_no_tensor: (TypeError, "must be Tensor, not list"),
    wrong_targets: (ValueError, r"input batch_size \(4\) to match target batch_size \(3\)"),
}


class Scaled(nn.Module):
    """Computes with a parameter and a number, and of a buffer, before it is given what does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x @ (self.weight * 2).double().to(x.dtype)


def test_a_forward_that_raises_behind_arithmetic_on_a_parameter_without_memory(fake_group: None) -> None:
    model = graph_fsdp.compile(Scaled(), backend="eager")
    with pytest.raises(RuntimeError, match=r"^a and b must have same reduction dim"):
        model(torch.ones(4, 3))
    assert model.calls.item() == 0  # what is looked for the exception on has no values
    model(batch()).sum().backward()
    assert model.calls.item() == 1


@pytest.mark.parametrize("fault", RAISES, ids=lambda fault: fault.__name__)
def test_a_forward_raises_its_own_exception(fake_group: None, fault: Callable[[Tensor], Tensor]) -> None:
    if fault in (of_own_class, asserted, in_a_checkpoint) and torch.__version__ < (2, 13):
        pytest.skip("torch does not trace it before 2.13, or its checkpoint does not end")
    model = graph_fsdp.compile(Raising(fault), backend="eager")
    shards = list(model.parameters())
    kind, message = RAISES[fault]
    with pytest.raises(Exception, match=message) as raised:
        model(batch())
    assert type(raised.value) is kind
    assert isinstance(raised.value.__cause__, KeyError) is (fault is of_own_class)
    names = [frame.name for frame in traceback.extract_tb(raised.tb)]
    assert names.index("forward") < names.index("of_two_rows" if fault is in_a_checkpoint else fault.__name__)
    assert all(after is shard for after, shard in zip(model.parameters(), shards, strict=True))
    model.fault = torch.sum
    model(batch()).backward()
    assert all(shard.grad is not None for shard in shards)


def written_after_its_use(x: Tensor) -> Tensor:
    x = x.relu()
    y = x.square()
    x.add_(1)
    return y


def test_what_autograd_raises_of_a_forward_is_not_wrapped(fake_group: None) -> None:
    model = graph_fsdp.compile(Raising(written_after_its_use), backend="eager")
    with pytest.raises(RuntimeError, match=r"^one of the variables needed for gradient computation") as raised:
        model(batch())
    assert type(raised.value) is RuntimeError


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch 2.9 does not say where")
def test_a_line_of_the_users_is_named_where_torch_breaks_a_graph(fake_group: None) -> None:
    model = graph_fsdp.compile(Raising(gathered), backend="eager")
    with pytest.raises(graph_fsdp.GraphBreakError) as caught:
        model(batch())
    assert re.search(r"breaks at \S+\.py:\d+", str(caught.value))
    assert re.search(r"called at \S+test_bad_forward\.py:\d+, in gathered", str(caught.value))


def test_a_graph_break_without_fullgraph_is_no_error(fake_group: None) -> None:
    model = graph_fsdp.compile(Faulty(depth=1), backend="eager", fullgraph=False)
    model.fault = "break"
    model(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# Parameters without memory


TOUCHES = {
    "linear": lambda weight: nn.functional.linear(batch(), weight),
    "detach": lambda weight: weight.detach(),
    "data": lambda weight: weight.data,
    "tolist": lambda weight: weight.tolist(),
    "numpy": lambda weight: weight.detach().numpy(),
    "data_ptr": lambda weight: weight.data_ptr(),
    "index": lambda weight: weight[0],
    "list": lambda weight: torch.stack([weight]),
    "repr": lambda weight: repr(weight),
}


@pytest.mark.filterwarnings("ignore:code outside of graphs reads")
def test_every_way_to_read_a_parameter_outside_of_graphs_has_it_gathered(fake_group: None) -> None:
    model, ways = Faulty(depth=1), list(TOUCHES)

    @torch.compiler.disable
    def norm() -> float:
        TOUCHES[ways[0]](model.head.weight)
        return 1.0

    model.norm = norm  # type: ignore[method-assign]
    graph_fsdp.compile(model, backend="eager", fullgraph=False)
    model.fault = "touch"
    while ways:
        model(batch()).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), ways[0]
        model.zero_grad()
        del ways[0]
    assert "python" in [graph.cause.kind for graph in graph_fsdp.inspect(model).graphs]


def test_code_that_is_not_compiled_may_ask_for_shapes(fake_group: None) -> None:
    model = Faulty(depth=1)
    asked: list[Any] = []

    @torch.compiler.disable
    def norm() -> float:
        weight = model.head.weight
        asked.append((weight.shape, weight.dtype, weight.device.type, weight.requires_grad, len(weight)))
        return 1.0

    model.norm = norm  # type: ignore[method-assign]
    graph_fsdp.compile(model, backend="eager", fullgraph=False)
    model.fault = "touch"
    model(batch())
    assert asked == [((5, 16), torch.float32, "cpu", True, 5)]


@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_torch_compile_turned_off(fake_group: None, stance: str) -> None:
    model = graph_fsdp.compile(Faulty(depth=1), backend="eager")
    words = ("torch.compile is off", "set_stance('force_eager')", "turn it on", "fullgraph=False")
    with torch.compiler.set_stance(stance):
        fail_forward(model, None, graph_fsdp.EmptyPlaceholderError, *words)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_reference_from_before_compile(fake_group: None, fullgraph: bool) -> None:
    model = MLP(depth=1)
    weight = model.head.weight
    graph_fsdp.compile(model, backend="eager", fullgraph=fullgraph)
    for _ in range(2):
        kind = type(weight).__name__  # by itself: pytest prints what stands in a failing assertion
        assert kind != "Parameter", "an operator on it would read address zero"
        for read in (torch.sum, repr, torch.Tensor.tolist):
            with pytest.raises(graph_fsdp.EmptyPlaceholderError, match=r"'head.weight' .* before graph_fsdp\.compile"):
                read(weight)
        model(batch()).sum().backward()
