"""Tensor parallel first, then sharded: DTensor parameters on one dimension of a mesh, data parallelism on another."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from launch import run_ranks
from printed import stage_text
from reference import check_close, fsdp2, gradients_of, parameters_of
from tensor_parallel import (
    Block,
    Transformer,
    batch,
    ours,
    train,
    with_matrices,
    with_sequences,
)
from test_bad_input import refuse
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import graph_fsdp
from graph_fsdp import (
    AlreadyShardedError,
    CheckpointError,
    EmptyPlaceholderError,
    RankDisagreement,
    UnsupportedError,
)
from graph_fsdp.checkpoint import load_full_state_dict


def two_by_two(names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


# The graphs


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


def two_linear(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(TwoLinear(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def test_the_part_of_a_rank_is_gathered_and_becomes_the_dtensor_that_the_model_uses(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = ours(two_linear(mesh["tp"]), mesh["dp"])
    model(torch.randn(3, 4)).sum().backward()
    report = graph_fsdp.inspect(model)
    assert_expected_inline(
        stage_text(report.capture, stage="insert_gathers"),
        """\
    ...
gather_param(up.weight, shape=[4, 4], float32, float32)
    as_dtensor(up.weight), ...
gather_param(down.weight, shape=[4, 4], float32, float32)
    as_dtensor(down.weight), ...
return ...""",
    )
    assert_expected_inline(
        stage_text(report.forward),
        """\
gather_root = all_gather_start([up.weight, down.weight], float32, world_size=4)
full_root = all_gather_wait(gather_root)
    mm(up.weight), mm(down.weight)
all_reduce = all_reduce(mm, reduce_op=sum)
wait_tensor = wait_tensor(all_reduce)
return wait_tensor, full_root, down.weight, ...""",
    )
    assert_expected_inline(
        stage_text(report.backward),
        """\
takes kept(root)
    ..., mm(down.weight), ...
free(kept(root))
reduce_root = reduce_scatter_start([up.weight: mm, down.weight: mm], float32, world_size=4)
reduced_root = reduce_wait(reduce_root)
return ..., up.weight.grad, down.weight.grad""",
    )


class WithTarget(TwoLinear):
    """Computes a target of its own first, as in self-supervised training."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.down(self.up(x))
        return (self.down(self.up(x)) - target - 1).square().sum()


def test_a_parameter_whose_first_use_is_without_gradients_has_one(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = ours(parallelize_module(WithTarget(), mesh["tp"], plan), mesh["dp"])
    model(torch.randn(3, 4)).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    with torch.no_grad():
        assert not model(torch.randn(3, 4)).requires_grad


def test_each_layer_is_gathered_where_it_is_used(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = Transformer(attention=False)
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    ours(with_matrices(model, mesh["tp"]), mesh["dp"], auto_wrap_policy={Block})
    model(batch(0, 0)[:, :-1]).sum().backward()
    lines = stage_text(graph_fsdp.inspect(model).forward).splitlines()
    done = [line for line in lines if "full_" in line and line.startswith(("full", "free"))]
    assert_expected_inline(
        "\n".join(done),
        """\
full_root = all_gather_wait(gather_root)
free(full_root)
full_blocks_0 = all_gather_wait(gather_blocks_0)
free(full_blocks_0)
full_blocks_1 = all_gather_wait(gather_blocks_1)
free(full_blocks_1)
full_root_1 = all_gather_wait(gather_root_1)""",
    )


def test_a_reference_from_before_is_no_parameter_any_more(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = two_linear(mesh["tp"])
    weight = model.up.weight
    ours(model, mesh["dp"])
    model(torch.randn(3, 4))
    assert weight.shape == (8, 4) and weight.is_leaf
    for read in (lambda: weight + 1, lambda: repr(weight), weight.to_local, weight.full_tensor, weight.redistribute):
        with pytest.raises(EmptyPlaceholderError, match=r"'up\.weight' of module 'up' is a reference from before"):
            read()


def test_collectives_of_the_model_keep_their_order(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = ours(with_sequences(Transformer(attention=False), mesh["tp"]), mesh["dp"])
    model(batch(0, 0)[:, :-1]).sum().backward()
    for view in (graph_fsdp.inspect(model).forward, graph_fsdp.inspect(model).backward):
        own = [node for node in view.graph.nodes if "_c10d_functional" in str(node.target) and "wait" not in node.name]
        kinds = [kind for *_, kind in view.graph.dependencies().edges(data="kind")]
        assert len(own) > 2 and kinds.count("model_collective") == len(own) - 1


# Bad input


def test_activations_within_a_memory_budget(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    saved = []
    for budget in (None, 0.0):
        model = ours(
            with_matrices(Transformer(attention=False), mesh["tp"]), mesh["dp"], activation_checkpointing=budget
        )
        model(batch(0, 0)[:, :-1]).sum().backward()
        saved.append(graph_fsdp.inspect(model).forward.memory.timeline["saved"][-1])
    assert saved[1] < saved[0]


def test_parameters_that_are_sharded_otherwise(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    described = (f"parameter 'up.weight' is a DTensor with placements (Shard(dim=0),) on {mesh['tp']}",)
    for wrong in (mesh["tp"], None, init_device_mesh("cpu", (8,), mesh_dim_names=("all",))):
        words = (*described, "is not beside DeviceMesh(", "plain tensors", "mesh['tp'], mesh['dp']")
        refuse(two_linear(mesh["tp"]), AlreadyShardedError, *words, mesh=wrong, runs=False)


def test_what_is_not_available_for_tensor_parallel_parameters(fake_group: Any) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    model = two_linear(mesh["tp"])
    model.up.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 4), mesh["tp"], [Partial()]))
    refuse(model, UnsupportedError, "are not partial", mesh=mesh["dp"], runs=False)


# Ranks


FACTS = Facts(__name__)
PLANS = {"matrices": with_matrices, "sequences": with_sequences}
CLIPPED = {"matrices": None, "sequences": 0.5}  # norms over two meshes are the user's to put together, as with FSDP2


def check_training(shard: Callable[..., nn.Module], plan: str, optimizer: str, bound: float, **options: Any) -> None:
    mesh = two_by_two()
    model = shard(PLANS[plan](Transformer(), mesh["tp"]), mesh["dp"], **options)
    found = train(model, optimizer, 2, mesh["dp"].get_local_rank(), 2, CLIPPED[plan])
    check_against_one_process(found, plan, optimizer, bound)


def check_against_one_process(found: Any, plan: str, optimizer: str, bound: float) -> None:
    expected = train(Transformer(), optimizer, 2, clip=CLIPPED[plan])
    for kind in ("gradients", "parameters"):
        check_close(found[kind], expected[kind], bound, f"{plan}, {optimizer}: {kind}")


@FACTS
def steps_equal_one_process_and_those_of_fsdp2_bit_for_bit() -> None:
    found = check_against_fsdp2("sequences", "sgd")
    check_against_one_process(found, "sequences", "sgd", bound=1e-5)


@FACTS
def so_do_those_where_parameters_are_sharded_on_another_dimension() -> None:
    placement = {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}
    check_against_fsdp2("matrices", "adamw", attention=False, **placement)


@FACTS.long
def steps_of_blocks_matrices_equal_one_process() -> None:
    check_training(ours, "matrices", "adamw", bound=1e-4)


@FACTS.long
def steps_in_bfloat16_equal_fsdp2s() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    check_against_fsdp2("sequences", "adamw", mp_policy=policy, reshard_after_forward=True)


def check_against_fsdp2(plan: str, optimizer: str, *, attention: bool = True, **options: Any) -> Any:
    """What our steps leave, which is what FSDP2's do."""
    mesh = two_by_two()
    models, found = [], []
    for shard in (fsdp2, ours):
        models.append(shard(PLANS[plan](Transformer(attention=attention), mesh["tp"]), mesh=mesh["dp"], **options))
        found.append(train(models[-1], optimizer, 2, mesh["dp"].get_local_rank(), 2, CLIPPED[plan]))
    for kind in ("gradients", "parameters"):
        theirs, own = (results[kind] for results in found)
        different = [name for name, value in theirs.items() if not torch.equal(own[name], value)]
        assert not different, f"{plan}, {options}: {kind} of {different}"
    for (name, theirs), own in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert own.placements == own.grad.placements == theirs.placements, name
        assert own.device_mesh == theirs.device_mesh, name
        assert own.to_local().shape == own.grad.to_local().shape == theirs.to_local().shape, name
    names = {p.device_mesh.mesh_dim_names for p in models[1].parameters()}
    assert names == ({("dp", "tp")} if plan == "sequences" else {("dp",), ("dp", "tp")})
    return found[1]


@FACTS.long
def the_full_state_dict_is_that_of_one_process() -> None:
    mesh = two_by_two()
    model = ours(with_matrices(Transformer(), mesh["tp"]), mesh["dp"])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    expected = Transformer().state_dict()
    if dist.get_rank() == 0:
        assert list(full) == list(expected)
        assert all(torch.equal(full[name], value) for name, value in expected.items())


@FACTS
def each_rank_loads_its_part_of_whole_tensors() -> None:
    mesh = two_by_two()
    one, model = TwoLinear(), ours(two_linear(mesh["tp"]), mesh["dp"])
    with torch.no_grad():
        for p in one.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape))
    model.load_state_dict(one.state_dict())
    assert all(torch.equal(value, one.get_parameter(name)) for name, value in parameters_of(model).items())


@FACTS
def one_rank_gives_and_gets_whole_tensors() -> None:
    """Also a rank of another slice of the mesh than this one's."""
    mesh, rank = two_by_two(), dist.get_rank()
    one, model = TwoLinear(), ours(two_linear(mesh["tp"]), mesh["dp"])
    for number, load in enumerate((functools.partial(graph_fsdp.import_, rank=0), load_full_state_dict)):
        with torch.no_grad():
            for p in one.parameters():
                p.copy_(torch.arange(p.numel()).view(p.shape) + number)
        load(model, one.state_dict() if rank == 0 else None)
        assert all(torch.equal(value, one.get_parameter(name)) for name, value in parameters_of(model).items())
    found = dict(graph_fsdp.export(model, rank=3))
    assert list(found) == (["up.weight", "down.weight"] if rank == 3 else [])
    assert all(torch.equal(value, one.get_parameter(name)) for name, value in found.items())
    with pytest.raises(ValueError, match=r"rank must be a global rank of the model's mesh, 0 to 3, got 4"):
        graph_fsdp.export(model, rank=4)
    wrong = {**one.state_dict(), "other": torch.ones(2)}
    with pytest.raises(CheckpointError if rank == 0 else RankDisagreement, match=r"Unexpected key\(s\).*other"):
        graph_fsdp.import_(model, wrong if rank == 0 else None, rank=0)


@FACTS
def losses_of_divided_logits_equal_one_process() -> None:
    """The model returns a DTensor, over which torch's ``loss_parallel`` computes a loss without gathering it."""
    mesh = two_by_two()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7))
    model = parallelize_module(copy.deepcopy(plain), mesh["tp"], {"1": ColwiseParallel(use_local_output=False)})
    ours(model, mesh["dp"])
    x, target = torch.randn(4, 4), torch.arange(4)
    own = mesh["dp"].get_local_rank()
    with loss_parallel():
        loss = nn.functional.cross_entropy(model(x.chunk(2)[own]), target.chunk(2)[own])
        loss.backward()
    nn.functional.cross_entropy(plain(x), target).backward()
    check_close(gradients_of(model), gradients_of(plain), 1e-5, "gradients")


@FACTS.long
def the_whole_mesh_says_by_its_names_what_is_for_what() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    model = ours(with_sequences(Transformer(), mesh["tp"]), mesh)
    weight = model.blocks[0].mlp.up.weight
    assert weight.device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    assert weight.placements[0] == Replicate() and weight.placements[2] == Shard(0)


@FACTS
def values_of_the_first_rank_of_each_slice_arrive() -> None:
    mesh = two_by_two()
    model = with_sequences(Transformer(), mesh["tp"])
    expected = parameters_of(model)
    if mesh["dp"].get_local_rank() == 1:
        with torch.no_grad():
            for p in model.parameters():
                p.to_local().zero_()
    ours(model, mesh["dp"], sync_module_states=True)
    assert all(torch.equal(value, expected[name]) for name, value in parameters_of(model).items())


@FACTS.long
def evaluation_and_frozen_parameters() -> None:
    mesh = two_by_two()
    plain, model = Transformer(), with_sequences(Transformer(), mesh["tp"])
    model.tokens.weight.requires_grad_(False)
    ours(model, mesh["dp"])
    x = batch(0, mesh["dp"].get_local_rank(), 2)[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
    model(x).sum().backward()
    assert model.tokens.weight.grad is None and model.head.weight.grad is not None


@FACTS
def batches_of_another_size() -> None:
    mesh = two_by_two()
    plain = TwoLinear()
    model = two_linear(mesh["tp"])
    with torch.no_grad():
        for p, value in zip(model.parameters(), plain.parameters(), strict=True):
            p.copy_(distribute_tensor(value.detach(), p.device_mesh, p.placements))
    ours(model, mesh["dp"])
    for rows in (4, 1):
        x = torch.randn(rows, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


@FACTS.long
def batches_of_another_size_where_sequences_are_sharded() -> None:
    mesh = two_by_two()
    plain, model = Transformer(), ours(with_sequences(Transformer(), mesh["tp"]), mesh["dp"])
    for rows in (4, 1):
        x = batch(0, 0)[:rows, :-1]
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)


def steps_with_inductor_equal_one_process() -> None:
    torch.set_num_threads(1)
    check_training(ours, "sequences", "sgd", bound=1e-4, backend="inductor")
    torch._dynamo.reset()
    check_training(ours, "sequences", "sgd", bound=1e-4, backend="inductor", regions="whole")


@pytest.mark.long
def test_with_inductor_on_four_ranks() -> None:
    run_ranks(steps_with_inductor_equal_one_process, 4, timeout=280)


test_on_four_ranks = FACTS.on(4)
