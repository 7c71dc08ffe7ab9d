"""torchtitan's options in ``graph_fsdp.integrations.torchtitan``, and its trainer where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from printed import calls
from test_parameter_meshes import meshes
from third_party import library_programs
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage as TorchStage
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graph_fsdp
from graph_fsdp import UnsupportedError
from graph_fsdp.integrations.pipelining import PipelineStage
from graph_fsdp.integrations.torchtitan import parallelize, pipelined

EXPERTS, WIDTH = 4, 8


class Mixture(nn.Module):
    """Has experts where torchtitan's layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.routed_experts = nn.Module()
        self.routed_experts.inner_experts = nn.Module()
        self.routed_experts.inner_experts.w = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w = self.routed_experts.inner_experts.w
        return x + torch.bmm(x.expand(2, -1, -1), w.to_local() if isinstance(w, DTensor) else w[:2]).sum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.moe = Mixture()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.linear(x).relu())


class Decoder(nn.Module):
    def __init__(self, *, enable_weight_tying: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleDict({"0": Layer(), "1": Layer()})
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WIDTH)
        self.enable_weight_tying, self.skips_head = enable_weight_tying, False
        if enable_weight_tying:
            self.lm_head.weight = self.tok_embeddings.weight

    def parallelize(self, parallel_dims: Any) -> None:
        mesh = parallel_dims.get_mesh("ep")
        for layer in self.layers.values():
            experts = layer.moe.routed_experts.inner_experts
            experts.w = nn.Parameter(distribute_tensor(experts.w.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tok_embeddings(x) if self.tok_embeddings else x
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm else x
        return x if self.skips_head or not self.lm_head else self.lm_head(x)


class Dims:
    """torchtitan's ``ParallelDims`` on a fake group of 8 ranks."""

    tp_enabled = cp_enabled = pp_enabled = dp_replicate_enabled = False

    def __init__(self, *, ep: bool = False) -> None:
        self.ep_enabled = ep
        self.fsdp, self.mesh = meshes(4, 2)

    def get_mesh(self, names: Any) -> Any:
        return self.fsdp if names == ["fsdp"] else self.mesh["ep" if names == "ep" else tuple(names)]

    get_optional_mesh = get_mesh


def parallelized(
    dims: Dims, ac_config: Any = None, *, tied: bool = False, without: Sequence[str] = (), **parallelism: Any
) -> Any:
    training = SimpleNamespace(
        mixed_precision_param="bfloat16", mixed_precision_reduce="float32", enable_cpu_offload=False
    )
    given = {"spmd_backend": "partial_dtensor", "fsdp_reshard_after_forward": "default", "enable_fsdp_symm_mem": False}
    with torch.device("meta"):
        model = Decoder(enable_weight_tying=tied)
    for name in without:
        setattr(model, name, None)
    return parallelize(
        model,
        parallel_dims=dims,
        training=training,
        parallelism=SimpleNamespace(**given | parallelism),
        compile_config=SimpleNamespace(enable=True, components=["model"], backend="eager"),
        ac_config=ac_config,
        dump_folder="",
    )


def filled(model: Any) -> Any:
    model.to_empty(device="cpu")  # as the trainer, which initialises afterwards
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.1)
    return model


def trained(model: Any) -> Any:
    filled(model)(torch.randn(4, WIDTH, dtype=torch.bfloat16)).float().sum().backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())
    return graph_fsdp.inspect(model)


def test_experts_are_sharded_over_their_own_mesh(fake_group: None) -> None:
    model = parallelized(Dims(ep=True))
    assert isinstance(model.layers["0"], FSDPModule)
    report = trained(model)
    starts = calls(report.forward, "all_gather_start")
    assert starts.count("world_size=8") == 4 and starts.count("world_size=4") == 2
    assert starts.count("bfloat16") == 6
    reductions = calls(report.backward, "reduce_scatter_start")
    assert reductions.count("factor=1.0") == 6 and reductions.count("float32") == 6, "sums, in reduce_dtype"


@pytest.mark.parametrize(("policy", "gathered_again"), [("default", 2), ("always", 3), ("never", 0)])
def test_policies_of_resharding(fake_group: None, policy: str, gathered_again: int) -> None:
    report = trained(parallelized(Dims(), fsdp_reshard_after_forward=policy))
    assert calls(report.backward, "all_gather_start").count("world_size") == gathered_again


def chunked(model: Any, x: Tensor) -> Tensor:
    """What torchtitan's ``ChunkedLossWrapper`` does, the loss of its configurations: the loss's gradient by the
    hidden states is that of each chunk's, whose backward runs at once."""
    hidden = model(x)
    chunks = [chunk.detach().requires_grad_() for chunk in hidden.split(2)]
    head = model.lm_head
    assert isinstance(head, FSDPModule)
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False, recurse=False)
    head.unshard()
    for chunk in chunks:
        if chunk is chunks[-1]:
            head.set_requires_gradient_sync(True, recurse=False)
        head(chunk).float().square().sum().backward()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(True, recurse=False)
    head.reshard()
    return (hidden * torch.cat([chunk.grad for chunk in chunks])).sum()


@pytest.mark.parametrize("tied", [False, True])
def test_a_chunked_loss_calls_the_head_by_itself(fake_group: None, tied: bool) -> None:
    model = filled(parallelized(Dims(), tied=tied))
    model.skips_head = True
    chunked(model, torch.randn(4, WIDTH, dtype=torch.bfloat16)).backward()
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


@pytest.mark.parametrize("without", [("norm", "lm_head"), ("tok_embeddings",), ("tok_embeddings", "norm", "lm_head")])
def test_a_stage_of_a_pipeline_is_gathered_once(fake_group: None, without: tuple[str, ...]) -> None:
    dims = Dims()
    dims.pp_enabled = True
    report = trained(parallelized(dims, without=without))
    units = 2 + ("tok_embeddings" not in without) + ("norm" not in without)
    assert calls(report.forward, "all_gather_start").count("world_size") == units
    assert calls(report.backward, "all_gather_start") == ""
    assert calls(report.backward, "reduce_scatter_start").count("world_size") == units


@pytest.mark.parametrize("attribute", ["_stage", "_stages"])
def test_stages_of_a_pipeline_are_ours(fake_group: None, attribute: str) -> None:
    dims = Dims()
    dims.pp_enabled = True
    given: dict[str, Any] = {}

    def pipelining_fn(model: nn.Module, **arguments: Any) -> Any:
        given.update(arguments)
        stage = TorchStage(model, 0, 8, torch.device("cpu"), group=dims.fsdp.get_group())
        stage.submod = parallelized(dims)
        return SimpleNamespace(**{attribute: [stage] if attribute == "_stages" else stage}), [stage.submod], True, True

    schedule, parts, *ends = pipelined(pipelining_fn)(nn.Linear(1, 1), loss_fn=abs)
    made = getattr(schedule, attribute)
    stage = made[0] if attribute == "_stages" else made
    assert type(stage) is PipelineStage and stage.submod is parts[0]
    assert given == {"loss_fn": abs} and ends == [True, True]


def test_activation_checkpointing(fake_group: None) -> None:
    class Selective:
        def build(self, dump_folder: str) -> Any:
            return SimpleNamespace(get_save_ops=lambda: {torch.ops.aten.relu.default})

    def recomputed(ac_config: Any) -> set[Any]:
        backward = trained(parallelized(Dims(), ac_config)).backward
        targets = [node.target for node in backward.graph.fx_graph.nodes]
        return {t for t in (torch.ops.aten.relu.default, torch.ops.aten.bmm.default) if targets.count(t)}

    relu, bmm = torch.ops.aten.relu.default, torch.ops.aten.bmm.default
    full = SimpleNamespace(build=lambda dump_folder: SimpleNamespace())
    assert (relu in recomputed(None), relu in recomputed(full), relu in recomputed(Selective())) == (False, True, False)
    assert bmm in recomputed(SimpleNamespace(memory_budget=0.5))


def test_paths_of_torchtitan_that_are_not_here(fake_group: None) -> None:
    dims = Dims()
    with pytest.raises(UnsupportedError, match=r"spmd_backend='spmd_types': .* set spmd_backend='partial_"):
        parallelized(dims, spmd_backend="spmd_types")
    with pytest.raises(UnsupportedError, match="enable_fsdp_symm_mem"):
        parallelized(dims, enable_fsdp_symm_mem=True)
    dims.cp_enabled = True
    with pytest.raises(UnsupportedError, match="context_parallel_degree"):
        parallelized(dims)


@pytest.mark.long
@pytest.mark.parametrize("name", ["torchtitan-llama3", "torchtitan-llama3-pipeline", "torchtitan-deepseek_v3"])
def test_its_trainer_has_the_losses_of_fsdp2(name: str, tmp_path: Any) -> None:
    pytest.importorskip("torchtitan")
    program = library_programs.PROGRAMS[name]
    found = [library_programs.losses(name, program, way, tmp_path / way) for way in ("fsdp2", "graph_fsdp")]
    assert library_programs.difference(*found, beside="FSDP2") == "as FSDP2"
