"""Numbers on meshes that replicate, on gloo ranks: FSDP2's on the same mesh bit for bit, and those of one process."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from marks import mostly_long, selected
from models import MLP
from reference import Outcome, Step, check_close, parameters_of, train_reference, train_sharded
from test_train import check_equal, fsdp2, ours, steps_with
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp
from graph_fsdp import RankDisagreement
from graph_fsdp.mesh import group_of
from graph_fsdp.report.report import engine_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
FP16_REDUCED = MixedPrecisionPolicy(reduce_dtype=torch.float16)

# model, shape of the mesh, options
SETTINGS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "mlp on 2 x 2": ("mlp", (2, 2), {}),
    "mlp on 2 x 2, gathered again, reduced in bfloat16": (
        *("mlp", (2, 2)),
        {"reshard_after_forward": True, "mp_policy": BF16_REDUCED},
    ),
    "mlp on 2 x 2, kept for backward, reduced in float16": (
        *("mlp", (2, 2)),
        {"reshard_after_forward": False, "mp_policy": FP16_REDUCED},
    ),
    "tied weights on 2 x 2": ("gpt_tied", (2, 2), {}),
    "frozen parameters on 2 x 2, bfloat16": ("frozen", (2, 2), {"mp_policy": BF16}),
    "mlp on 4, resharded to 2, bfloat16": ("mlp", (4,), {"reshard_after_forward": 2, "mp_policy": BF16}),
    "mlp on 1 x 4, resharded to 2": ("mlp", (1, 4), {"reshard_after_forward": 2}),
    "mlp on 4 x 1": ("mlp", (4, 1), {}),
}


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def compare_with_fsdp2(settings: list[str]) -> dict[str, list[dict[str, Any]]]:
    """On a rank: the results of both for each setting."""
    results = {}
    for key in settings:
        name, shape, options = SETTINGS[key]
        torch._dynamo.reset()
        mesh = mesh_of(shape)
        shards: list[Callable[..., nn.Module]] = [functools.partial(shard, mesh=mesh) for shard in (fsdp2, ours)]
        results[key] = [steps_with(shard, name, "adamw", 1, 1, options) for shard in shards]
    return results


@pytest.fixture(scope="module")
def both() -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(compare_with_fsdp2, 4, selected(SETTINGS, __name__, "setting"))


SHORT = ["mlp on 2 x 2", "mlp on 4, resharded to 2, bfloat16"]


@pytest.mark.parametrize("setting", mostly_long(SETTINGS, SHORT))
def test_a_step_equals_fsdp2_bit_for_bit(both: list[dict[str, list[dict[str, Any]]]], setting: str) -> None:
    check_equal(both, setting)


# Replicated, against DDP and FSDP2 with nothing sharded; with two summands no order can differ


def replicated(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_replicate",))
    return graph_fsdp.compile(model, mesh, **{"backend": "eager", **options})


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def unsharded_fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    return fsdp2(model, mesh=mesh_of((dist.get_world_size(), 1)), **options)


REPLICATED: dict[str, tuple[Callable[..., nn.Module], str, dict[str, Any]]] = {
    "mlp as DDP": (ddp, "mlp", {}),  # on four ranks
    "scalars as DDP": (ddp, "uneven", {}),
    "tied weights as DDP": (ddp, "gpt_tied", {}),
    "mlp as FSDP2, bfloat16": (unsharded_fsdp2, "mlp", {"mp_policy": BF16}),
    "mlp as FSDP2, reduced in float16": (unsharded_fsdp2, "mlp", {"mp_policy": FP16_REDUCED}),
}


ON_TWO = [key for key in REPLICATED if key != "mlp as DDP"]


def compare_replicated(settings: list[str]) -> dict[str, list[dict[str, Any]]]:
    results = {}
    for key in settings:
        torch._dynamo.reset()
        other, name, options = REPLICATED[key]
        both = [steps_with(shard, name, "adamw", 1, 2, options) for shard in (other, replicated)]
        for kind in ("gradients", "parameters"):
            both[0][kind] = {n.removeprefix("module."): value for n, value in both[0][kind].items()}
        results[key] = both
    return results


@pytest.fixture(scope="module")
def both_replicated() -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(compare_replicated, 2, selected(ON_TWO, __name__, "replicas"))


@pytest.mark.parametrize("replicas", mostly_long(ON_TWO, ["scalars as DDP", "mlp as FSDP2, bfloat16"]))
def test_replicated_steps_equal_others_bit_for_bit(
    both_replicated: list[dict[str, list[dict[str, Any]]]], replicas: str
) -> None:
    check_equal(both_replicated, replicas)


@pytest.mark.long
def test_replicated_steps_on_four_ranks_equal_ddp() -> None:
    for rank in run_ranks(compare_replicated, 4, ["mlp as DDP"]):
        theirs, own = rank["mlp as DDP"]
        for kind in ("gradients", "parameters"):
            check_close(own[kind], theirs[kind], 1e-6, kind)


# Facts that all four ranks check

FACTS = Facts(__name__)


def batch() -> Tensor:
    return torch.ones(4, 16)


@FACTS
def parameters_are_sharded_over_the_second_dimension_and_replicated_over_the_first() -> None:
    reference = MLP()
    model = MLP()
    model.load_state_dict(reference.state_dict())
    graph_fsdp.compile(model, mesh_of((2, 2)), backend="eager")
    for (name, shard), full in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(shard, DTensor) and shard.placements == (Replicate(), Shard(0)), name
        begin = dist.get_rank() % 2 * -(-full.shape[0] // 2)
        assert torch.equal(shard.to_local(), full[begin:][: -(-full.shape[0] // 2)]), name


@FACTS
def the_full_state_dict_is_the_models() -> None:
    model = MLP()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    graph_fsdp.compile(model, mesh_of((2, 2)), backend="eager")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert list(full) == list(expected)
    assert all(torch.equal(full[name], value) for name, value in expected.items())


@FACTS.long
def sync_module_states_gives_every_rank_the_values_of_the_first() -> None:
    torch.manual_seed(0)
    expected = dict(MLP().named_parameters())
    for shape in ((2, 2), (4, 1)):
        torch.manual_seed(dist.get_rank())
        model = graph_fsdp.compile(MLP(), mesh_of(shape), backend="eager", sync_module_states=True)
        values = parameters_of(model)
        assert all(torch.equal(values[name], p) for name, p in expected.items())


@FACTS
def the_first_rank_of_a_mesh_is_the_one_that_it_lists_first() -> None:
    torch.manual_seed(2)
    expected = dict(MLP().named_parameters())
    for ranks in ([2, 0, 3, 1], [[2, 3], [0, 1]]):
        torch.manual_seed(dist.get_rank())
        mesh = DeviceMesh("cpu", ranks)
        model = graph_fsdp.compile(MLP(), mesh, backend="eager", sync_module_states=True)
        assert all(torch.equal(value, expected[name]) for name, value in parameters_of(model).items())


@FACTS
def ranks_of_all_dimensions_agree() -> None:
    model = nn.Sequential(nn.Linear(16, 5))
    graph_fsdp.compile(model, mesh_of((2, 2)), backend="eager", reshard_after_forward=dist.get_rank() == 3)
    with pytest.raises(RankDisagreement, match="reshard_after_forward"):
        model(batch())


@FACTS
def models_on_slices_of_one_mesh_do_not_wait_for_other_slices() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = nn.Sequential(nn.Linear(16, 5))
    graph_fsdp.compile(model, mesh["data"], backend="eager", reshard_after_forward=dist.get_rank() % 2 == 0)
    model(batch()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@FACTS.long
def printed_stages_run_and_give_the_same_gradients() -> None:
    model = graph_fsdp.compile(MLP(), mesh_of((2, 2)), backend="eager", reshard_after_forward=True)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x).sum().backward()
    report = graph_fsdp.inspect(model)
    tangent = torch.ones(4, 5)
    results = []
    for name in ("annotate", "recompute"):
        inputs = [engine_of(model).storage.parameters[n].input for n, _ in model.named_parameters()]
        values: list[Tensor] = [*inputs[:2], x, *inputs[2:], tangent]
        results.append(run_stage(report.joint.stages[name], values)[1:])
    expected = [p.grad.to_local() for p in model.parameters()]
    for gradients in results:
        found = [g for g in gradients if g is not None]
        for g, p in zip(found, expected, strict=True):
            torch.testing.assert_close(g[: p.shape[0]], p, rtol=1e-6, atol=1e-7)


@FACTS
def printed_stages_run_where_shards_are_kept() -> None:
    model = graph_fsdp.compile(MLP(), mesh_of((4,)), backend="eager", reshard_after_forward=2)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
    expected = model(x)
    report = graph_fsdp.inspect(model)
    inputs = [engine_of(model).storage.parameters[n].input for n, _ in model.named_parameters()]
    for stage in ("reshard", "free"):
        found = run_stage(report.forward.stages[stage], [*inputs[:2], x, *inputs[2:]])
        assert torch.equal(found[0], expected)
        kept = found[1:4]
        full = [model.blocks[0].up.weight, model.blocks[1].up.weight, model.head.weight]
        for shard, parameter in zip(kept, full, strict=True):
            rows = -(-parameter.shape[0] // 4) * 2  # two of four chunks
            mine = parameter.full_tensor()[dist.get_rank() % 2 * rows :][:rows].flatten()
            assert torch.equal(shard[: mine.numel()], mine)


@FACTS.long
def slices_of_a_larger_mesh_reshard_by_themselves() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "data"))
    if dist.get_rank() >= 2:  # the other slice never makes such a group
        return
    model = graph_fsdp.compile(MLP(), mesh["data"], backend="eager", reshard_after_forward=2)
    model(batch()).sum().backward()
    from graph_fsdp.mesh import DataParallelMesh

    group = DataParallelMesh.of(mesh["data"]).subgroup(2)
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    assert total == 2


@FACTS
def ranks_agree_on_names_of_groups_although_they_are_members_of_different_numbers_of_groups() -> None:
    pair, everyone = dist.new_group([0, 3]), tuple(range(4))
    groups = [group_of(everyone, "all", datetime.timedelta(seconds=60), "gloo")]
    if dist.get_rank() in (0, 3):
        groups.append(group_of((0, 3), "the two", datetime.timedelta(seconds=60), "gloo"))
        total = torch.ones(())
        dist.all_reduce(total, group=pair)
        assert total == 2
    groups.append(dist.new_group(list(everyone), datetime.timedelta(seconds=60)))
    for group in groups:
        total = torch.ones(())
        dist.all_reduce(total, group=group)
        assert total == group.size()


def run_stage(stage: Any, inputs: list[Tensor]) -> list[Any]:
    namespace: dict[str, Any] = {}
    exec(stage.code, namespace)
    with torch.no_grad():
        return list(namespace["forward"](*inputs))


test_on_four_ranks = FACTS.on(4)


# Against one process, which sees the rows of all ranks as one batch

STEPS = [Step(rows=4)] * 5
TRAINED: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "uneven rows and scalars, hybrid": ("uneven", (2, 2), {}),
    "uneven rows and scalars, resharded to 2": ("uneven", (4,), {"reshard_after_forward": 2}),
}
# What is reduced over replicas, no region sees.
WITH_INDUCTOR: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "resharded to 2": ("one_block", (4,), {"reshard_after_forward": 2, "backend": "inductor"}),
}


def train(settings: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]]) -> dict[str, Outcome]:
    outcomes = {}
    for key, (name, shape, options) in settings.items():
        torch._dynamo.reset()
        outcomes[key] = train_sharded(name, STEPS, "adamw", mesh=mesh_of(shape), **{"backend": "eager", **options})
    return outcomes


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Outcome]]:
    keys = selected(TRAINED, __name__, "key")
    return run_ranks(train, 4, {key: TRAINED[key] for key in keys})


@pytest.fixture(scope="module")
def trained_with_inductor() -> list[dict[str, Outcome]]:
    return run_ranks(train, 4, WITH_INDUCTOR)


@pytest.mark.parametrize("key", mostly_long(TRAINED, ["uneven rows and scalars, hybrid"]))
def test_five_steps_on_four_ranks_equal_one_process(trained: list[dict[str, Outcome]], key: str) -> None:
    check_trained([of_rank[key] for of_rank in trained], TRAINED[key][0])


@pytest.mark.long
@pytest.mark.parametrize("key", WITH_INDUCTOR)
def test_so_do_they_with_inductor(trained_with_inductor: list[dict[str, Outcome]], key: str) -> None:
    check_trained([of_rank[key] for of_rank in trained_with_inductor], WITH_INDUCTOR[key][0])


def check_trained(outcomes: list[Outcome], name: str) -> None:
    (expected,) = train_reference(name, STEPS, "adamw", world_size=len(outcomes), global_batch=True)
    for outcome in outcomes[1:]:
        for key, value in outcomes[0].parameters.items():
            assert torch.equal(outcome.parameters[key], value), f"ranks hold different values of {key}"
    mean_losses = torch.stack([torch.stack(outcome.losses) for outcome in outcomes]).mean(0)
    check_close(dict(enumerate(mean_losses)), dict(enumerate(expected.losses)), 1e-5, "losses")
    check_close(outcomes[0].parameters, expected.parameters, 1e-5, "parameters")
