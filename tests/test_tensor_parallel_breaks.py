"""Tensor-parallel models whose forward breaks: code between the graphs reads DTensors, with FSDP2's bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from facts import Facts
from launch import run_ranks
from reference import fsdp2
from tensor_parallel import Transformer, batch, ours, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.report.report import engine_of

FACTS = Facts(__name__)
READ = "ignore:code outside of graphs reads"


def divided(model: Any, tp: DeviceMesh, *, sequences: bool) -> Any:
    """By matrices, or all of it, with activations that are DTensors between the graphs."""
    if not sequences:
        for block in model.blocks:
            parallelize_module(block, tp, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
        return model
    ends = {
        "tokens": ColwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, ends)
    plan = {"norm2": SequenceParallel(), "mlp.up": ColwiseParallel(input_layouts=Shard(1))}
    for block in model.blocks:
        parallelize_module(block, tp, plan | {"mlp.down": RowwiseParallel(output_layouts=Shard(1))})
    return model


def two_blocks() -> Any:
    """Half of the layers' linear and norm modules are left to Python."""
    model: Any = Transformer(attention=False)
    torch.manual_seed(1)
    model.blocks.append(type(model.blocks[0])(attention=False))
    block = model.blocks[1]
    for module in (block.norm2, block.mlp.up, block.mlp.down):
        module.forward = torch.compiler.disable(module.forward)
    return model


class Broken(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)


class Checkpointed(Broken):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


def check(sequences: bool, around: type[nn.Module] | None = None, bound: float = 0.0, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for shard in (fsdp2, ours):
        model = divided(two_blocks(), mesh["tp"], sequences=sequences)
        if around is not None:
            model.blocks[0] = around(model.blocks[0])
        model = shard(model, mesh=mesh["dp"], **(options if shard is ours else {}))
        found.append(train(model, "adamw", 2, mesh["dp"].get_local_rank(), 2))
    torch._dynamo.reset()
    expected, own = found
    for kind in ("gradients", "parameters"):
        different = {name: (own[kind][name] - value).abs().max().item() for name, value in expected[kind].items()}
        assert max(different.values()) <= bound, (kind, different)
    return model


@FACTS
def python_reads_dtensors_of_matrices() -> None:
    model = check(sequences=False, fullgraph=False)
    assert len(graph_fsdp.inspect(model).graphs) > 4
    assert {compat.local_part(p.placeholder).untyped_storage().nbytes() for p in divided_parameters(model)} == {0}


def divided_parameters(model: nn.Module) -> Any:
    return [p for p in engine_of(model).storage.parameters.values() if isinstance(p.placeholder, DTensor)]


@FACTS
def graphs_pass_dtensors_on() -> None:
    check(sequences=True, around=Broken, fullgraph=False, reshard_after_forward=True)


@FACTS
def a_checkpoint_computes_again_what_python_reads() -> None:
    check(sequences=True, around=Checkpointed, fullgraph=False, reshard_after_forward=False)


READS: dict[str, Callable[[Any], Tensor]] = {
    "full_tensor": lambda weight: weight.full_tensor().sum(),
    "to_local": lambda weight: weight.to_local().sum(),
    "redistribute": lambda weight: weight.redistribute(placements=[Replicate()]).to_local().sum(),
    "repr": lambda weight: weight.sum().full_tensor() * ("DTensor" in repr(weight)),
}


class Reads(Broken):
    """The first code that reads the unit calls a method of DTensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.read: Callable[[Any], Tensor] = torch.compiler.disable(READS[self.method])

    method = ""

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x + self.read(self.inner.mlp.down.weight))
        return found


@FACTS
def methods_of_a_dtensor_read_it() -> None:
    """Twice is a weight used, once in Python: sums of its gradients have another order than in FSDP2."""
    for method in READS:
        around = type("Reads", (Reads,), {"method": method})
        check(sequences=False, around=around, bound=1e-5, fullgraph=False)


test_on_four_ranks = pytest.mark.filterwarnings(READ)(FACTS.on(4))


def by_inductor() -> None:
    """The second model of a process: its gradients' meshes are parts of meshes that come into the graphs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = []
    for backend in ("eager", "inductor"):
        torch._dynamo.reset()
        model = divided(two_blocks(), mesh["tp"], sequences=True)
        ours(model, mesh=mesh["dp"], fullgraph=False, backend=backend)
        found.append(train(model, "sgd", 2, mesh["dp"].get_local_rank(), 2)["parameters"])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings(READ)
def test_with_inductor_on_four_ranks() -> None:
    run_ranks(by_inductor, 4)


# On a fake process group


def without_breaks(model: Any) -> Any:
    for module in model.modules():
        vars(module).pop("forward", None)
    return model


@pytest.mark.parametrize(("make", "read"), [(lambda model: model, True), (without_breaks, False)])
def test_units_that_python_reads_are_gathered_by_themselves(
    fake_group: None, make: Callable[[Any], Any], read: bool
) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = divided(make(two_blocks()), mesh["tp"], sequences=False)
    ours(model, mesh["dp"], fullgraph=False)
    with pytest.warns(UserWarning, match="reads parameter 'blocks.1") if read else nullcontext():
        model(batch(0, 0)[:, :-1]).sum().backward()
    causes = [graph.cause for graph in graph_fsdp.inspect(model).graphs]
    assert read == any("outside of graphs" in str(cause) for cause in causes)


class TwoWidths(nn.Module):
    """Rank 0 has 16 columns of both. Python runs what comes behind the loop, and the same code gathers the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Broken(nn.Linear(16, 16))])
        self.wide, self.narrow = nn.Linear(16, 32), nn.Linear(16, 31)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return self.wide(x), self.narrow(x)


@pytest.mark.parametrize("grad", [True, False])
def test_dtensors_that_dynamo_takes_for_one_another_are_refused(fake_group: None, grad: bool) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = TwoWidths()
    for name in ("wide", "narrow"):
        parallelize_module(model, mesh["tp"], {name: ColwiseParallel(output_layouts=Replicate())})
    ours(model, mesh["dp"], fullgraph=False)
    try:
        with torch.set_grad_enabled(grad):
            wide, narrow = model(torch.randn(4, 16))
    except UnsupportedError as error:
        assert "of shape [4, 31] goes from one graph to the next" in str(error)
        assert "of shape [4, 32], whose part on this rank is as large; let sizes divide" in str(error)
    else:
        assert (wide.shape, narrow.shape) == ((4, 32), (4, 31))
