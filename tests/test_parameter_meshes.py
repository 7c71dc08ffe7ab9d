"""Meshes of parameters' own: experts on other ranks than the rest of the model."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from experts import Experts, MoE
from facts import Facts
from launch import run_ranks
from printed import bucket_table, calls
from reference import check_close, gradients_of, parameters_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

import graph_fsdp
from graph_fsdp import RankDisagreement, checkpoint
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of

COUNT, WIDTH, ROWS = 4, 16, 8  # experts, their width, tokens per rank


def rank() -> int:
    return dist.get_rank()


def meshes(*sizes: int, names: tuple[str, ...] = ("efsdp", "ep")) -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks for data parallelism, and the same ranks in the dimensions that experts have."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh._flatten("dp"), mesh


def model_of(mesh: DeviceMesh | None = None, layers: int = 2) -> MoE:
    torch.manual_seed(0)
    model = MoE(COUNT, WIDTH, layers)
    return model if mesh is None else model.distribute(mesh)


def ours(model: nn.Module, mesh: DeviceMesh, own: Any, **options: Any) -> Any:
    return graph_fsdp.compile(model, mesh, meshes=own, **{"backend": "eager", **options})


def tokens(step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """Of one rank; of all four with the defaults."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4 * ROWS, WIDTH, generator=generator).chunk(ranks)[rank]


def train(model: nn.Module, steps: int = 10, rank: int = 0, ranks: int = 1, clip: Callable[[], Any] = bool) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(tokens(step, rank, ranks)).square().mean().backward()
        clip()
        optimizer.step()
    return {"gradients": gradients_of(model), "parameters": parameters_of(model)}


def check_as_one_process(found: Any, steps: int = 10, layers: int = 2) -> None:
    """Parameters to 1e-6. Gradients after several steps have the rounding of all of them, of which processors differ by
    1.6e-6; a gradient that is not the mean over the batch is off by a factor."""
    expected = train(model_of(layers=layers), steps)
    for kind, bound in (("parameters", 1e-6), ("gradients", 5e-6)):
        check_close(found[kind], expected[kind], bound, kind)
    assert not found["gradients"]["layers.0.experts.w1"][-1].any(), "an expert without tokens has zero gradients"


# The graphs


def test_experts_have_buckets_on_their_mesh(fake_group: None) -> None:
    mesh, own = meshes(4, 2)
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]})
    model(tokens(0)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        calls(report.forward, "all_gather_start"),
        """\
gather_root = all_gather_start([embed.{weight, bias}], float32, world_size=8)
gather_layers_0 = all_gather_start([layers.0.{norm.weight, norm.bias, router.weight, router.bias}], float32,
    world_size=8)
gather_layers_0_1 = all_gather_start([layers.0.experts.{w1, w2}], float32, world_size=4)
gather_layers_1 = all_gather_start([layers.1.{norm.weight, norm.bias, router.weight, router.bias}], float32,
    world_size=8)
gather_layers_1_1 = all_gather_start([layers.1.experts.{w1, w2}], float32, world_size=4)
gather_root_1 = all_gather_start([head.{weight, bias}], float32, world_size=8)""",
    )
    assert_expected_inline(
        calls(report.backward, "reduce_scatter_start"),
        """\
reduce_root_1 = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_layers_1_1 = reduce_scatter_start([layers.1.experts.{w1: bmm, w2: bmm}], float32, world_size=4, factor=8.0)
reduce_layers_1 = reduce_scatter_start([layers.1.{norm.weight: getitem, norm.bias: getitem, router.weight: mm,
    router.bias: sum}], float32, world_size=8)
reduce_layers_0_1 = reduce_scatter_start([layers.0.experts.{w1: bmm, w2: bmm}], float32, world_size=4, factor=8.0)
reduce_layers_0 = reduce_scatter_start([layers.0.{norm.weight: getitem, norm.bias: getitem, router.weight: mm,
    router.bias: sum}], float32, world_size=8)
reduce_root = reduce_scatter_start([embed.{weight: mm, bias: sum}], float32, world_size=8)""",
    )
    assert_expected_inline(
        bucket_table(report.forward),
        """\
root gather 2 1,536
layers.0 gather 4 2,048
layers.0#1 gather 2 16,384
layers.1 gather 4 2,048
layers.1#1 gather 2 16,384
root#1 gather 2 1,536 kept""",
    )


def test_where_no_other_rank_has_an_expert_its_gradient_is_divided_and_not_reduced(fake_group: None) -> None:
    mesh, own = meshes(1, 8)
    model = ours(MoE(8, WIDTH).distribute(own["ep"]), mesh, {Experts: own["efsdp"]})
    model(tokens(0)).sum().backward()
    backward = graph_fsdp.inspect(model).backward
    assert backward.stages["free"].body.count(", 8.0)") == 4, "two gradients of each layer"
    assert_expected_inline(
        calls(backward, "reduce_scatter_start"),
        """\
reduce_root_1 = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8)
reduce_layers_1 = reduce_scatter_start([layers.1.{norm.weight: getitem, norm.bias: getitem, router.weight: mm,
    router.bias: sum}], float32, world_size=8)
reduce_layers_0 = reduce_scatter_start([layers.0.{norm.weight: getitem, norm.bias: getitem, router.weight: mm,
    router.bias: sum}], float32, world_size=8)
reduce_root = reduce_scatter_start([embed.{weight: mm, bias: sum}], float32, world_size=8)""",
    )


@pytest.mark.parametrize("policy", [OffloadPolicy(), CPUOffloadPolicy()])
def test_gradients_that_need_no_reduction_are_not_kept(fake_group: None, policy: OffloadPolicy) -> None:
    mesh, own = meshes(1, 8)
    model = ours(MoE(8, WIDTH, layers=1).distribute(own["ep"]), mesh, {Experts: own["efsdp"]}, offload_policy=policy)
    with model.no_sync():
        model(tokens(0)).sum().backward()
    given = [name for name, p in model.named_parameters() if p.grad is not None]
    assert given == ["layers.0.experts.w1", "layers.0.experts.w2"]
    model(tokens(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_report_names_the_mesh(fake_group: None, tmp_path: Path) -> None:
    mesh, own = meshes(4, 2)
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]})
    model(tokens(0)).sum().backward()
    graph_fsdp.inspect(model).save_trace(tmp_path / "trace.json")
    assert '"over efsdp"' in (tmp_path / "trace.json").read_text()


def test_the_report_has_the_models_own_collectives_on_a_lane(fake_group: None, tmp_path: Path) -> None:
    mesh, own = meshes(4, 2)
    pipeline = default_pipeline(hardware="h100")
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]}, passes=pipeline)
    model(tokens(0)).sum().backward()
    report = graph_fsdp.inspect(model)
    line = r"collectives of the model: (.*?); ([\d.]+) ms, of it exposed ([\d.]+), beside .* ([\d.]+)"
    found = [re.search(line, str(view.model_collectives())).groups() for view in (report.forward, report.backward)]
    assert str(report).count("collectives of the model") == 2
    assert [kinds for kinds, *_ in found] == ["4 all_to_all_single"] * 2, "of two layers, there and back"
    for _, taken, exposed, beside in found:
        assert 0 < float(exposed) <= float(taken) and 0 < float(beside) <= float(taken), "gathers go on meanwhile"
    report.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    group = f"of the model, group {own['ep'].get_group().group_name}"
    (lane,) = {event["tid"] for event in events if event["ph"] == "M" and event["args"]["name"] == group}
    slices = [event for event in events if event["ph"] == "X" and event["tid"] == lane]
    assert len(slices) == 8 and all(event["args"]["bytes"] for event in slices)
    alone = ours(model_of(), mesh, None)
    alone(tokens(0)).sum().backward()
    assert "collectives of the model" not in str(graph_fsdp.inspect(alone))


def test_a_class_a_module_a_function_and_a_placement_say_the_same(fake_group: None) -> None:
    mesh, own = meshes(4, 2)

    def spec(given: Any, **options: Any) -> Any:
        return engine_of(ours(given.distribute(own["ep"]), mesh, **options)).spec

    by_class = spec(model_of(), own={Experts: own["efsdp"]})
    assert {p.mesh.name for p in by_class.parameters.values() if p.mesh.name} == {"efsdp"}
    model = model_of()
    assert spec(model, own=dict.fromkeys(model.experts, own["efsdp"])) == by_class
    assert spec(model_of(), own=lambda p: own["efsdp"] if p.dim() == 3 else None) == by_class
    assert spec(model_of(), own=None, shard_placement_fn=lambda p: placed(p, mesh, own["efsdp"])) == by_class


def placed(p: nn.Parameter, mesh: DeviceMesh, own: DeviceMesh) -> Any:
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    if not hasattr(common, "ShardPlacementResult"):
        pytest.skip("torch has no meshes of parameters")
    chosen = own if p.dim() == 3 else mesh
    return common.ShardPlacementResult(Shard(0), common.FSDPMeshInfo(chosen, shard_mesh_dim=0))


# Four ranks

FACTS = Facts(__name__)


@FACTS
def pairs_of_ranks_with_experts_equal_one_process_and_fsdp2() -> None:
    mesh, own = meshes(2, 2)
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]})
    for unit in [*model.layers, model]:
        unit.set_force_sum_reduction_for_comms(True)  # as FSDP2 does where a factor is set
    check_as_one_process(found := train(model, rank=rank(), ranks=4))
    other = model_of(own["ep"])
    for layer in other.layers:
        fully_shard(layer.experts, mesh=own["efsdp"])
        fully_shard(layer, mesh=mesh)
    fully_shard(other, mesh=mesh)
    for unit in other.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(4.0)
    expected = train(other, rank=rank(), ranks=4)
    for kind in expected:
        for name, value in expected[kind].items():
            assert torch.equal(found[kind][name], value), (kind, name)


@FACTS
def experts_on_all_ranks_equal_one_process() -> None:
    mesh, own = meshes(1, 4)
    model = ours(model_of(own["ep"], layers=1), mesh, {Experts: own["efsdp"]})
    check_as_one_process(train(model, rank=rank(), ranks=4), layers=1)


@FACTS
def replicas_with_experts_equal_one_process() -> None:
    """Experts are replicated and lie on two ranks each; the rest is sharded over two ranks, of two replicas."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    mesh["efsdp", "ep"]._flatten("dp_shard")
    own = mesh["dp_replicate", "efsdp"]
    model = ours(model_of(mesh["ep"], layers=1), mesh["dp_replicate", "dp_shard"], {Experts: own})
    check_as_one_process(train(model, rank=rank(), ranks=4), layers=1)


@FACTS
def kept_gradients_mixed_precision_and_offload_go_with_experts() -> None:
    mesh, own = meshes(2, 2)
    options = {"mp_policy": MixedPrecisionPolicy(torch.float64), "offload_policy": CPUOffloadPolicy()}
    model = ours(model_of(own["ep"], layers=1), mesh, {Experts: own["efsdp"]}, **options)
    with model.no_sync():
        model(tokens(0, rank(), 4)).square().mean().backward()
    model(tokens(1, rank(), 4)).square().mean().backward()
    one = model_of(layers=1).double()
    for step in range(2):
        one(tokens(step).double()).square().mean().backward()
    check_close(gradients_of(model), {n: g.float() for n, g in gradients_of(one).items()}, 1e-6, "gradients")


@FACTS
def norms_are_those_of_one_process_over_any_meshes() -> None:
    for sizes in ((1, 4), (2, 2)):
        mesh, own = meshes(*sizes)
        model, one = ours(model_of(own["ep"], layers=1), mesh, {Experts: own["efsdp"]}), model_of(layers=1)
        for norm_type in (2.0, 1.0, math.inf):
            for trained, part in ((model, tokens(0, rank(), 4)), (one, tokens(0))):
                trained.zero_grad()
                trained(part).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(one.parameters(), 1e-3, norm_type)
            found = model.clip_grad_norm_(1e-3, norm_type)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
            check_close(gradients_of(model), gradients_of(one), 1e-6, "gradients")
    counts = []
    reduce = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: counts.append(kwargs["group"].group_name) or reduce(*args, **kwargs)
    try:
        model.clip_grad_norm_(1.0)
    finally:
        dist.all_reduce = reduce
    assert len(counts) == len(set(counts)) == 3, f"all ranks, those that share experts, those that hold all: {counts}"


@FACTS
def norms_of_any_gradients_are_those_of_one_process() -> None:
    """A NaN on one rank, and squares that overflow the gradients' type."""
    model = graph_fsdp.compile(nn.Linear(8, 8, bias=False, dtype=torch.float16), backend="eager")
    shard = model.weight
    for where in range(4):
        shard.grad = torch.full_like(shard, 100.0)
        if rank() == where:
            shard.grad.to_local()[0] = math.nan
        for norm_type in (2.0, math.inf):
            assert model.clip_grad_norm_(1.0, norm_type).isnan(), (where, norm_type)
    shard.grad = torch.full_like(shard, 100.0)
    one = nn.Parameter(torch.ones(8, 8, dtype=torch.float16))
    one.grad = torch.full_like(one, 100.0)
    torch.testing.assert_close(model.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_([one], 1.0).float())
    torch.testing.assert_close(shard.grad.full_tensor(), one.grad)


@FACTS
def checkpoints_hold_experts_on_any_mesh() -> None:
    mesh, own = meshes(2, 2)
    model = ours(model_of(own["ep"]), mesh, {Experts: own["efsdp"]})
    saved, folder = parameters_of(model), [tempfile.mkdtemp() if rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    checkpoint.save(Path(folder[0]) / "one", model)
    other_mesh, other = meshes(1, 4)
    for restored in (model, ours(model_of(other["ep"]), other_mesh, {Experts: other["efsdp"]})):
        with torch.no_grad():
            for p in restored.parameters():
                p.zero_()
        checkpoint.load(Path(folder[0]) / "one", restored)
        assert all(torch.equal(value, saved[name]) for name, value in parameters_of(restored).items())
    dist.barrier()
    if rank() == 0:
        shutil.rmtree(folder[0])


@FACTS
def whole_units_and_the_first_ranks_values_go_with_meshes() -> None:
    mesh, own = meshes(2, 2)
    torch.manual_seed(rank())
    model = ours(MoE(COUNT, WIDTH), mesh, {Experts: own["efsdp"]}, sync_module_states=True)
    # The parameters that have a mesh of their own are alike on its ranks, and others on other ranks.
    with graph_fsdp.unsharded(model):
        whole: list[Any] = [None] * 4
        dist.all_gather_object(whole, [model.head.weight.sum().item(), model.layers[1].experts.w1.sum().item()])
    assert len({head for head, _ in whole}) == 1
    assert [experts == whole[0][1] for _, experts in whole] == [True, False, True, False]


test_on_four_ranks = FACTS.on(4)


def another_mesh() -> str:
    mesh, own = meshes(2, 1)
    model = ours(model_of(), mesh, {Experts: own["efsdp"]} if rank() else None)
    try:
        model(tokens(0, rank(), 2)).sum().backward()
    except RankDisagreement as error:
        return str(error)
    return ""


def clip_alone() -> str:
    model = ours(model_of(), init_device_mesh("cpu", (2,)), None)
    model(tokens(0, rank(), 2)).sum().backward()
    try:
        model.clip_grad_norm_(1.0 if rank() else 2.0, norm_type=2.0 if rank() else 1.0)
    except RankDisagreement as error:
        return str(error)
    return ""


def test_ranks_that_ask_for_other_norms_are_told() -> None:
    for said in run_ranks(clip_alone, 2):
        assert "ranks have to take the same branches" in said and "clip_grad_norm_() call" in said, said


def test_ranks_that_give_parameters_other_meshes_are_told() -> None:
    for said in run_ranks(another_mesh, 2):
        assert "layers.0.experts.w1" in said and "on mesh efsdp, 1 replicas of 2 ranks" in said, said


# What is refused
