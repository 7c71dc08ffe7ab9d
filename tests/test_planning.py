"""Planning: the graphs of a model on any number of ranks, from one process without devices or weights."""

from __future__ import annotations

import functools
import resource
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import CASES
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp.passes import Role
from graph_fsdp.planning import Traced, trace
from graph_fsdp.report.report import engine_of


class Net(nn.Module):
    def __init__(self, width: int = 24, layers: int = 2, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
        self.head = nn.Linear(width, 1)
        self.also = [self.head.bias]  # as nn.LSTM keeps its parameters
        self.register_buffer("scale", torch.ones(width))
        self.shift = torch.zeros(width)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return self.head(x * self.scale + self.shift) + self.also[0]


@functools.cache
def plain() -> Traced:
    """Net without options, on 8 ranks."""
    return trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")


def mean_square(output: Tensor) -> Tensor:
    return (output * output).mean()


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize(
    "name",
    [
        *("cnn_batchnorm", "frozen"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt_tied", "gpt_checkpoint", "uneven")),
        pytest.param("hf_llama", marks=pytest.mark.long),
    ],
)
def test_the_graphs_are_those_of_the_compiled_model(fake_group: dist.ProcessGroup, name: str) -> None:
    case = CASES[name]
    batch = case.batch(4, 0)
    inputs = (batch["x"],) if "x" in batch else batch
    options = {"backend": "eager", "mp_policy": BF16} if name in ("gpt_tied", "frozen") else {"backend": "eager"}
    model = graph_fsdp.compile(case.model(), **options)
    model(*inputs) if "x" in batch else model(**batch)
    compiled, traced = graph_fsdp.inspect(model), trace(case.model, inputs, world_size=8, **options)
    assert traced.forward.collectives and traced.backward.collectives
    for phase in ("joint", "forward", "backward"):
        expected, found = getattr(compiled, phase), getattr(traced.report, phase)
        assert {name: stage.body for name, stage in found.stages.items()} == {
            name: stage.body for name, stage in expected.stages.items()
        }
    assert traced.report.forward.buckets == compiled.forward.buckets


def test_shards_shrink_with_the_number_of_ranks() -> None:
    x = torch.randn(4, 64)
    small, large = (trace(lambda: Net(64), (x,), world_size=w, backend="eager") for w in (8, 64))
    assert small.forward.collectives == large.forward.collectives
    assert small.backward.collectives == large.backward.collectives
    for traced, rows in ((small, 8), (large, 1)):
        starts = [n for n in traced.forward.with_role(Role.GATHER_START) if n.meta["fsdp"].bucket == "blocks.0"]
        assert [tuple(shard.meta["val"].shape) for shard in starts[0].args[0]] == [(rows, 64), (rows,)]


def test_a_model_of_ten_billion_parameters_takes_next_to_no_memory() -> None:
    width, layers = 70_000, 2  # 19.6 GB per parameter
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    x = torch.empty(512, width, device="meta")
    traced = trace(lambda: Net(width, layers), (x,), world_size=8, loss=mean_square, backend="eager")
    assert sum(p.shard_numel * 8 for p in traced.context.model.parameters.values()) > 9.8e9
    assert sum(role == "reduce_start" for role, _ in traced.backward.collectives) == 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20  # KiB: a ninth of one parameter


def test_the_loss_becomes_part_of_the_graph() -> None:
    without = plain()
    with_loss = trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager", loss=mean_square)
    assert without.backward.with_role(Role.TANGENT)[0].meta["val"].shape == (4, 1)
    assert with_loss.backward.with_role(Role.TANGENT)[0].meta["val"].shape == ()
    assert torch.ops.aten.mean.default in {n.target for n in with_loss.forward.nodes}
    assert set(with_loss.context.model.parameters) == set(dict(Net().named_parameters()))


def test_inputs_may_be_given_by_name() -> None:
    by_name = trace(Net, {"x": torch.randn(4, 24)}, world_size=8, backend="eager")
    assert by_name.report.forward.stages["free"].body == plain().report.forward.stages["free"].body


def test_without_gradients_there_is_one_inference_graph() -> None:
    with torch.no_grad():
        traced = trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")
    assert traced.forward.phase == "inference"
    with pytest.raises(LookupError, match="without gradients"):
        _ = traced.backward


def test_the_users_checkpointing_is_traced() -> None:
    x = torch.randn(4, 24)
    recomputed = trace(lambda: Net(recompute=True), (x,), world_size=8, backend="eager")
    count = lambda t: sum(n.target is torch.ops.aten.addmm.default for n in t.backward.nodes)  # noqa: E731
    assert count(plain()) == 0 and count(recomputed) > 0


def test_options_that_give_a_model_its_values_change_nothing() -> None:
    def never(module: nn.Module) -> None:
        raise AssertionError("nothing is initialised")

    x = torch.randn(4, 24)
    options: list[dict[str, Any]] = [{"param_init_fn": never}, {"sync_module_states": True}]
    texts = [trace(Net, (x,), world_size=8, backend="eager", **o).report.forward.stages["free"].body for o in options]
    assert texts == [plain().report.forward.stages["free"].body] * 2


def test_one_rank_communicates_nothing() -> None:
    traced = trace(Net, (torch.randn(4, 24),), world_size=1, backend="eager")
    assert traced.forward.collectives == traced.backward.collectives == []


def test_regions_are_planned_with_inductors_decompositions() -> None:
    x = torch.randn(4, 24)
    inductor = trace(Net, (x,), world_size=8, backend="inductor")
    assert inductor.forward.collectives == plain().forward.collectives
    assert torch.ops.aten.gelu.default not in {n.target for n in inductor.forward.nodes}


def test_no_process_group_is_left_behind() -> None:
    assert not dist.is_initialized()
    trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager", loss=lambda y: 1 / 0)
    assert not dist.is_initialized()


def test_a_process_group_of_the_same_size_is_used_and_one_of_another_refused(fake_group: dist.ProcessGroup) -> None:
    trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")
    with pytest.raises(graph_fsdp.MeshError, match="the mesh has 64 ranks and the default process group has 8 ranks"):
        trace(Net, (torch.randn(4, 24),), world_size=64, backend="eager")
    assert dist.group.WORLD is fake_group


def test_a_plan_of_one_rank_does_not_change_what_ranks_agree_on(fake_group: dist.ProcessGroup) -> None:
    trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")
    assert engine_of(graph_fsdp.compile(Net(), backend="eager")).schedules.index == "0"


def test_the_planned_model_does_not_limit_the_recompilations_of_others() -> None:
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for _ in range(3):
            trace(Net, (torch.randn(4, 24),), world_size=8, backend="eager")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_an_error() -> None:
    with pytest.raises(graph_fsdp.UnsupportedError, match="device 'cuda': torch finds none here"):
        trace(Net, (torch.randn(4, 24),), world_size=8, device="cuda")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size must be a number of ranks, 1 or more, got 0"),
        ({"model_fn": lambda: 3}, TypeError, "model_fn must return an nn.Module, it returned int"),
        (
            {"model_fn": Net()},
            TypeError,
            "model_fn must be a function that builds the model, got Net; pass the model's",
        ),
        ({"model_fn": nn.Linear}, TypeError, r"called without arguments: .*missing 2 .*such as lambda: Model\("),
        ({"model_fn": nn.Identity}, graph_fsdp.UnsupportedError, "forward returns nothing that it computes"),
        ({"loss": lambda outputs: None}, graph_fsdp.UnsupportedError, "forward returns nothing that it computes"),
        ({"example_inputs": torch.ones(2)}, TypeError, "example_inputs must be a tuple of .*, got Tensor"),
        ({"fullgraph": False}, graph_fsdp.UnsupportedError, "only a model of one graph can be traced"),
        ({"backend": "none"}, ValueError, "backend 'none' does not exist"),
    ],
)
def test_bad_input(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    good: dict[str, object] = {"model_fn": Net, "example_inputs": (torch.randn(4, 24),), "world_size": 8}
    with pytest.raises(error, match=message):
        trace(**(good | arguments))  # type: ignore[arg-type]
    assert not dist.is_initialized()
