"""The executor: what is gathered when and for how long, what is compiled, and how memory is held.

On a fake process group of 8 ranks; ``test_runtime_ranks.py`` has what needs real collectives.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from marks import mostly_long
from models import MLP, VOCABULARY, WIDTH, MLPBlock
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graph_fsdp
from graph_fsdp import ParameterChangedError
from graph_fsdp.compat import without_torch_function
from graph_fsdp.passes import default_pipeline
from graph_fsdp.passes.ir import dialect
from graph_fsdp.report.report import GraphReport, GraphView, engine_of
from graph_fsdp.runtime import GatheredBytes
from graph_fsdp.runtime.backends import BACKENDS, EagerBackend
from graph_fsdp.runtime.regions.regions import Compiled, Region

WORLD_SIZE = 8
FLOAT = 4  # bytes
BLOCK = WORLD_SIZE * (4 * 16 + 16 + 2 * 32 + 16) * FLOAT  # of an MLP, gathered; each chunk padded to 64 bytes
HEAD = WORLD_SIZE * (16 + 16) * FLOAT


def batch() -> Tensor:
    return torch.ones(4, 16)


def tokens() -> Tensor:
    return torch.arange(8).expand(2, 8)


def compiled(model: nn.Module, prefetch: int = 1, **options: object) -> nn.Module:
    return graph_fsdp.compile(model, backend="eager", passes=default_pipeline(prefetch=prefetch), **options)


def counter_of(model: nn.Module) -> GatheredBytes:
    return engine_of(model).counter


# What is gathered


@pytest.mark.parametrize("prefetch", [0, 2])
def test_at_most_the_unit_that_runs_and_those_prefetched_are_gathered(fake_group: None, prefetch: int) -> None:
    model = compiled(MLP(depth=3), prefetch)
    output = model(batch())
    assert counter_of(model).peak == (prefetch + 1) * BLOCK
    assert counter_of(model).current == HEAD, "the unit used last is kept for backward"
    counter_of(model).reset()
    output.sum().backward()
    assert counter_of(model).peak == (prefetch + 1) * BLOCK
    assert counter_of(model).current == 0


def test_zero3_holds_nothing_between_forward_and_backward(fake_group: None) -> None:
    prefetch = 1
    model = compiled(MLP(depth=3), prefetch, reshard_after_forward=True)
    output = model(batch())
    assert (counter_of(model).peak, counter_of(model).current) == ((prefetch + 1) * BLOCK, 0)
    output.sum().backward()
    assert (counter_of(model).peak, counter_of(model).current) == ((prefetch + 1) * BLOCK, 0)
    assert counter_of(model).collectives == {"all_gather": 2 * 4, "reduce": 4}


def test_zero2_gathers_once(fake_group: None) -> None:
    model = compiled(MLP(depth=2), reshard_after_forward=False)
    output = model(batch())
    assert (counter_of(model).peak, counter_of(model).current) == (2 * BLOCK + HEAD, 2 * BLOCK + HEAD)
    output.sum().backward()
    assert counter_of(model).current == 0
    assert counter_of(model).collectives == {"all_gather": 3, "reduce": 3}


def test_the_report_predicts_the_bytes_that_are_counted(fake_group: None) -> None:
    model = compiled(MLP(depth=4), prefetch=2, reshard_after_forward=True)
    output = model(batch())
    counted = [(counter_of(model).peak, counter_of(model).current)]
    counter_of(model).reset()
    output.sum().backward()
    counted.append((counter_of(model).peak, counter_of(model).current))
    assert counted == list(predicted_bytes(graph_fsdp.inspect(model)))


def predicted_bytes(report: GraphReport) -> Iterator[tuple[int, int]]:
    """The most bytes gathered in each graph, and those left at its end, by the report's rows."""
    held = 0
    for view in (report.forward, report.backward):
        peak = held
        for change in changes(view):
            held += change
            peak = max(peak, held)
        yield peak, held


def changes(view: GraphView) -> list[int]:
    gathered = [(row.start, row.nbytes) for row in view.buckets if row.kind == "gather"]
    freed = [(row.free, -row.nbytes) for row in view.buckets if row.free is not None]
    return [change for _, change in sorted(gathered + freed)]


@pytest.mark.parametrize("how", ["unshard", "set_reshard_after_backward", "unsharded"])
def test_units_that_are_whole_before_forward_count_as_gathered(fake_group: None, how: str) -> None:
    model: Any = compiled(MLP(depth=3))
    units, everything = [*model.blocks, model], 3 * BLOCK + HEAD
    if how == "unsharded":
        with graph_fsdp.unsharded(model):
            assert counter_of(model).current == everything
    elif how == "unshard":
        for unit in units:
            unit.unshard()
        assert counter_of(model).current == everything
    else:
        model.set_reshard_after_backward(False)
    model(batch()).sum().backward()
    assert counter_of(model).current == (everything if how == "set_reshard_after_backward" else 0)
    assert graph_fsdp.inspect(model).peak_gathered_bytes == everything
    for unit in units:
        unit.reshard()
    assert counter_of(model).current == 0


# Nothing is left gathered


def test_a_forward_without_backward_is_dropped_with_its_outputs(fake_group: None) -> None:
    model = compiled(MLP(), reshard_after_forward=False)
    output = model(batch())
    assert counter_of(model).current == 2 * BLOCK + HEAD
    del output
    gc.collect()  # a cycle of torch 2.9 holds it
    assert counter_of(model).current == 0


def test_evaluation_keeps_nothing(fake_group: None) -> None:
    model = compiled(MLP(), reshard_after_forward=False)
    with torch.no_grad():
        output = model(batch())
    assert counter_of(model).current == 0
    assert not output.requires_grad


def test_an_input_that_a_region_cannot_take(fake_group: None) -> None:
    model = compiled(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), MLPBlock()), reshard_after_forward=False)
    with pytest.raises(IndexError, match="out of range"):
        model(tokens() + VOCABULARY)
    check_usable(model, tokens())


pressed: set[str] = set()  # while which operators run the user presses Ctrl-C


@torch.library.custom_op("graph_fsdp_tests::interruptible", mutates_args=())
def interruptible(x: Tensor, when: str) -> Tensor:
    if when in pressed:
        pressed.clear()
        raise KeyboardInterrupt
    return x.clone()


@interruptible.register_fake
def _(x: Tensor, when: str) -> Tensor:
    return torch.empty_like(x)


interruptible.register_autograd(lambda _, gradient: (interruptible(gradient, "backward"), None))


class Interruptible(MLP):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.head(self.blocks[1](interruptible(x, "forward")))


@pytest.mark.parametrize(
    ("when", "reshard"),
    mostly_long(
        [(when, reshard) for when in ("forward", "backward") for reshard in (True, False)],
        [("forward", True), ("backward", False)],
    ),
)
def test_an_interrupt_in_the_middle_of_a_run(fake_group: None, when: str, reshard: bool) -> None:
    model = compiled(Interruptible(), reshard_after_forward=reshard)
    pressed.add(when)
    with pytest.raises(KeyboardInterrupt):
        model(batch()).sum().backward()
    assert not pressed
    check_usable(model, batch())


def check_usable(model: nn.Module, x: Tensor) -> None:
    """After a run that raised: nothing gathered, shards registered, and the next step trains."""
    assert (counter_of(model).current, counter_of(model).landing.current) == (0, 0)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    model.zero_grad()
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert counter_of(model).current == 0


# What is compiled


class Counting(EagerBackend):
    name = "counting"
    given: list[Region]

    def compile_region(self, region: Region, kind: str) -> Compiled:
        type(self).given.append(region)
        return super().compile_region(region, kind)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Region]:
    """The regions that a backend is asked to compile."""
    monkeypatch.setitem(BACKENDS, "counting", Counting)
    Counting.given = []
    return Counting.given


def test_equal_layers_are_compiled_once(fake_group: None, given: list[Region]) -> None:
    counts = []
    for depth in (3, 5):
        given.clear()
        model = graph_fsdp.compile(MLP(depth=depth), backend="counting")
        model(batch()).sum().backward()
        report = graph_fsdp.inspect(model)
        assert report.regions >= 2 * depth
        counts.append((report.compiled_regions, len(given)))
    assert counts[0] == counts[1]


def test_a_second_shape_is_compiled_by_itself(fake_group: None, given: list[Region]) -> None:
    model = graph_fsdp.compile(MLP(), backend="counting")
    model(torch.ones(4, 16)).sum().backward()
    first = len(given)
    model(torch.ones(4, 16)).sum().backward()
    assert len(given) == first
    model(torch.ones(6, 16)).sum().backward()
    assert len(given) == 2 * first


def test_sizes_that_one_model_has_seen_are_not_dynamic_in_another(fake_group: None) -> None:
    compiled(MLP())(torch.ones(4, 16))
    other = compiled(MLP())
    other(torch.ones(6, 16))
    stage = graph_fsdp.inspect(other).forward.stages["partition"]
    values = [node.meta["val"] for node in stage.graph.nodes if node.op == "placeholder"]
    assert [value for value in values if isinstance(value, torch.SymInt)] == []


def test_regions_of_views_alone_are_not_compiled(fake_group: None, given: list[Region]) -> None:
    model = graph_fsdp.compile(MLP(), backend="counting")
    model(batch()).sum().backward()
    assert not any(region.is_view_only for region in given)
    report = graph_fsdp.inspect(model)
    assert len(given) < report.compiled_regions, "there are some, and the cache counts them"


# How memory is held


def test_shards_lie_in_one_buffer_per_dtype(fake_group: None) -> None:
    model = MLP()
    model.blocks[1].to(torch.float64)
    graph_fsdp.compile(model, backend="eager")
    buffers = {buffer.dtype: buffer for buffer in engine_of(model).storage.buffers}
    assert len(buffers) == len(engine_of(model).storage.buffers)
    for p in model.parameters():
        offset = p.to_local().data_ptr() - buffers[p.dtype].data_ptr()
        assert 0 <= offset <= buffers[p.dtype].nbytes - p.to_local().nbytes
    sizes = {dtype: buffer.nbytes for dtype, buffer in buffers.items()}
    assert sizes == {torch.float32: (BLOCK + HEAD) // WORLD_SIZE, torch.float64: (4 * 16 + 8 + 2 * 32 + 8) * 8}


def test_placeholders_have_no_memory(fake_group: None) -> None:
    model = compiled(MLP())
    model(batch()).sum().backward()
    parameters = engine_of(model).storage.parameters.values()
    with without_torch_function():  # it refuses to be read
        assert {p.placeholder.untyped_storage().nbytes() for p in parameters} == {0}


# What users do to parameters between steps


def test_a_state_dict_that_is_assigned_is_adopted(fake_group: None) -> None:
    model = compiled(MLP())
    memory = model.head.weight.to_local().data_ptr()
    state = {name: value.clone() + 1 for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    assert model.head.weight.to_local().data_ptr() != memory
    model(batch()).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.to_local(), state[name].to_local()) and parameter.grad is not None
    assert model.head.weight.to_local().data_ptr() == memory, "the storage has taken the values"


def test_memory_that_replaces_a_parameters_is_adopted_on_one_process() -> None:
    model = compiled(MLP())
    memory, value = model.head.weight.data_ptr(), torch.full((5, 16), 2.0)
    model.head.weight.data = value
    model.head.bias.data = torch.zeros(5)
    output = model(batch())
    hidden = model.blocks[1](model.blocks[0](batch()))
    torch.testing.assert_close(output, hidden @ value.T)
    assert model.head.weight.data_ptr() == memory
    output.sum().backward()
    assert model.head.weight.grad is not None


def test_another_dtype_is_an_error_that_names_the_parameter(fake_group: None) -> None:
    model = compiled(MLP())
    model(batch()).sum().backward()
    model.head.to(torch.bfloat16)
    with pytest.raises(ParameterChangedError, match=r"'head.weight' was float32\[1, 16\].*bfloat16.*mp_policy"):
        model(batch())
    model.head.to(torch.float32)
    model(batch()).sum().backward()


def test_a_plain_tensor_in_a_shards_place_is_an_error(fake_group: None) -> None:
    model = compiled(MLP())
    shard = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(5, 16))
    with pytest.raises(ParameterChangedError, match=r"'head.weight' was replaced by Parameter"):
        model(batch())
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model.head.weight = nn.Parameter(distribute_tensor(torch.ones(7, 16), mesh, [Shard(0)]))
    with pytest.raises(ParameterChangedError, match=r"'head.weight' was replaced by .*\(5, 16\)"):
        model(batch())
    model.head.weight = shard
    model(batch()).sum().backward()


def test_a_parameter_that_is_removed_while_whole_is_named_and_stands_there_again(fake_group: None) -> None:
    """As ``prune.remove`` does; the end of the block shards the model again all the same."""
    model = compiled(MLP())
    shard = model.head.weight
    with (
        pytest.raises(ParameterChangedError, match=r"'head.weight' was replaced by NoneType while it was unsharded"),
        graph_fsdp.unsharded(model),
    ):
        del model.head.weight
    assert model.head.weight is shard
    model(batch()).sum().backward()


def test_requires_grad_is_followed_from_step_to_step(fake_group: None) -> None:
    model = compiled(MLP())
    for frozen in (False, True, False, True):
        model.blocks[0].requires_grad_(not frozen)
        model.zero_grad()
        counter_of(model).reset()
        model(batch()).sum().backward()
        without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
        assert without == [name for name, _ in model.named_parameters() if frozen and "blocks.0" in name]
        assert counter_of(model).collectives["reduce"] == (2 if frozen else 3)
    assert len(graph_fsdp.inspect(model).graphs) == 2, "a graph for each, captured once"


def test_copies_of_activations_called_one_by_one() -> None:
    value = torch.arange(4.0)
    host = dialect.activation_offloaded(dialect.offload_activation(value), value)
    back = dialect.activation_reloaded(dialect.reload_activation(host, value.device), host)
    assert torch.equal(back, value) and len({value.data_ptr(), host.data_ptr(), back.data_ptr()}) == 3
