"""The process group of which only one rank exists, and the benchmark that runs on it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import simulated_cluster
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from models import CLASSES, MLP, WIDTH
from reference import fsdp2
from simulated_group import Launch, SimulatedGroup, simulated_group
from simulated_link import INSTANT, Link
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import graph_fsdp
from graph_fsdp.compat import all_gather_single, reduce_scatter_single
from graph_fsdp.runtime.ranks.agreement import agree, is_shared

RANKS, RANK = 4, 2
LINK = Link(bandwidth=1e9, latency=1e-3)
ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
DEVICES = ["cpu", *([ACCELERATOR.type] if ACCELERATOR else [])]


@pytest.fixture
def group() -> Iterator[SimulatedGroup]:
    with simulated_group(RANKS, LINK, rank=RANK) as group:
        yield group


def shard(device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(6, dtype=dtype, device=device).view(2, 3)


# What collectives write


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_an_all_gather_repeats_this_ranks_shard(group: SimulatedGroup, device: str, dtype: torch.dtype) -> None:
    mine = shard(device, dtype)
    full = torch.full((2 * RANKS, 3), -1, dtype=dtype, device=device)
    all_gather_single(full, mine)
    assert torch.equal(full, mine.repeat(RANKS, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_an_all_gather_of_a_part_of_its_output(group: SimulatedGroup, device: str) -> None:
    full = torch.zeros(2 * RANKS, 3, device=device)
    full[2 * RANK : 2 * RANK + 2] = shard(device)
    all_gather_single(full, full[2 * RANK : 2 * RANK + 2])
    assert torch.equal(full, shard(device).repeat(RANKS, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_an_all_gather_into_a_list_and_of_objects(group: SimulatedGroup, device: str) -> None:
    parts = [torch.zeros(2, 3, device=device) for _ in range(RANKS)]
    dist.all_gather(parts, shard(device))
    assert all(torch.equal(part, shard(device)) for part in parts)
    if device == "cpu":
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, {"rank": RANK})
        assert objects == [{"rank": RANK}] * RANKS


REDUCTIONS = {"AVG": 1, "SUM": RANKS, "MIN": 1, "MAX": 1}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "factor"), REDUCTIONS.items())
def test_reductions_are_those_of_equal_ranks(group: SimulatedGroup, device: str, op: str, factor: int) -> None:
    reduce_op = getattr(dist.ReduceOp, op)
    full = torch.arange(6 * RANKS, dtype=torch.float32, device=device)
    mine = torch.zeros(6, device=device)
    reduce_scatter_single(mine, full, op=reduce_op)
    assert torch.equal(mine, factor * full[6 * RANK : 6 * RANK + 6])
    assert torch.equal(full, torch.arange(6.0 * RANKS, device=device)), "the input is left as it was"

    tensor = shard(device)
    dist.all_reduce(tensor, op=reduce_op)
    assert torch.equal(tensor, factor * shard(device))


def test_a_broadcast_leaves_what_all_ranks_have(group: SimulatedGroup) -> None:
    tensor = shard("cpu")
    dist.broadcast(tensor, src=0)
    dist.barrier()
    assert torch.equal(tensor, shard("cpu"))


def test_parameters_and_inference_tensors_can_be_written(group: SimulatedGroup) -> None:
    parameter = nn.Parameter(shard("cpu"))
    dist.all_reduce(parameter.detach())
    assert torch.equal(parameter.detach(), RANKS * shard("cpu"))
    with torch.inference_mode():
        tensor = shard("cpu")
        dist.all_reduce(tensor)
        assert torch.equal(tensor, RANKS * shard("cpu"))


def test_dtensors_and_functional_collectives(group: SimulatedGroup) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    full = DTensor.from_local(shard("cpu"), mesh, [Shard(0)], run_check=False).full_tensor()
    assert torch.equal(full, shard("cpu").repeat(RANKS, 1))
    assert torch.equal(funcol.all_reduce(shard("cpu"), "sum", mesh) + 0, RANKS * shard("cpu"))


def test_groups_of_a_mesh_are_simulated_over_the_same_link(group: SimulatedGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("replicate", "shard"):
        part = mesh.get_group(name)
        assert isinstance(part, SimulatedGroup)
        assert (part.size(), part.link) == (2, LINK)
        assert dist.get_process_group_ranks(part)[part.rank()] == RANK


# What they take


def test_a_collective_takes_its_time_beside_the_host(group: SimulatedGroup) -> None:
    group.link = Link(bandwidth=1e9, latency=0.05)
    full, mine = torch.zeros(2 * RANKS, 3), shard("cpu")
    begin = time.perf_counter()
    work = all_gather_single(full, mine, async_op=True)
    early, was_written = work.is_completed(), bool(full.any())
    checked = time.perf_counter()
    # Whatever else the machine does: what was there early was there after its time.
    assert checked - begin >= 0.05 or not (early or was_written)
    assert work.wait()
    assert time.perf_counter() - begin >= 0.05
    assert work.is_completed()
    assert torch.equal(full, mine.repeat(RANKS, 1))


def test_collectives_of_a_group_follow_each_other(group: SimulatedGroup) -> None:
    begin = time.perf_counter()
    tensor = torch.ones(3)
    works = []
    for latency in (0.05, 0.0, 0.02):  # the later ones are shorter
        group.link = Link(1e9, latency)
        works.append(dist.all_reduce(tensor, async_op=True))
    works[1].wait()
    assert works[0].is_completed()
    works[2].wait()
    assert time.perf_counter() - begin >= 0.07
    assert torch.equal(tensor, torch.full((3,), RANKS**3.0))


@pytest.mark.skipif(ACCELERATOR is None, reason="needs a device with streams")
def test_a_collective_occupies_a_stream_of_its_own(group: SimulatedGroup) -> None:
    assert ACCELERATOR is not None
    group.link, group.trace = Link(1e9, 0.05), []
    work = dist.all_reduce(torch.ones(3, device=ACCELERATOR), async_op=True)
    done = torch.accelerator.current_stream().record_event()
    done.synchronize()
    assert not work.is_completed(), "the current stream is not the one that is occupied"
    work.wait()
    torch.accelerator.synchronize()
    assert work.is_completed()
    assert 0.5 < group.trace[0].occupied() / group.trace[0].seconds < 2


@pytest.mark.parametrize("device", DEVICES)
def test_a_ring_moves_each_ranks_part_once(group: SimulatedGroup, device: str) -> None:
    group.trace = []
    full, mine = torch.zeros(4000 * RANKS, device=device), torch.zeros(4000, device=device)
    all_gather_single(full, mine)
    reduce_scatter_single(mine, full)
    dist.all_reduce(full)
    dist.broadcast(full, src=0)
    found = [(launch.kinds, launch.moved) for launch in group.trace]
    nbytes = full.nbytes
    assert found == [
        (("all_gather",), nbytes * 3 / 4),
        (("reduce_scatter",), nbytes * 3 / 4),
        (("all_reduce",), nbytes * 6 / 4),
        (("broadcast",), nbytes),
    ]
    assert [launch.seconds for launch in group.trace] == [1e-3 + moved / 1e9 for _, moved in found]
    if device == "cpu":
        assert all(launch.occupied() >= 0.999 * launch.seconds for launch in group.trace), "sums of floats"


def test_one_rank_and_an_instant_link_take_no_time() -> None:
    for ranks, link in ((1, LINK), (RANKS, INSTANT)):
        with simulated_group(ranks, link) as group:
            group.trace = []
            dist.all_reduce(torch.ones(3))
            assert [launch.seconds for launch in group.trace] == [0.0]


# Groups of messages


Grouped = Callable[[list[Tensor]], None]
GROUPED: dict[str, Grouped] = {
    "all_gather": lambda tensors: [all_gather_single(t, t[-2:].clone()) for t in tensors] and None,
    "reduce_scatter": lambda tensors: [reduce_scatter_single(t[:2], t.clone()) for t in tensors] and None,
    "all_reduce": lambda tensors: [dist.all_reduce(t) for t in tensors] and None,
}
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda t: t[-2:].repeat(RANKS, 1),
    "reduce_scatter": lambda t: torch.cat([RANKS * t[2 * RANK : 2 * RANK + 2], t[2:]]),
    "all_reduce": lambda t: RANKS * t,
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("explicit", [False, True], ids=["collected by torch", "collected by the group"])
@pytest.mark.parametrize("kind", GROUPED)
def test_a_group_of_messages_has_one_latency(group: SimulatedGroup, kind: str, explicit: bool, device: str) -> None:
    group.trace = []
    befores = [torch.rand(2 * RANKS, columns, device=device) for columns in (3, 5)]
    tensors = [before.clone() for before in befores]
    with _coalescing_manager(group, torch.device(device) if explicit else None, async_ops=True) as manager:
        GROUPED[kind](tensors)
        assert not group.trace, "nothing starts before the group is complete"
    manager.wait()
    for tensor, before in zip(tensors, befores, strict=True):
        assert torch.equal(tensor, RESULTS[kind](before))
    (launch,) = group.trace
    assert launch.kinds == (kind, kind)
    moved = sum(tensor.nbytes for tensor in tensors) * (6 if kind == "all_reduce" else 3) / 4
    assert (launch.moved, launch.seconds) == (moved, 1e-3 + moved / 1e9)


# What cannot be


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dist.gather(torch.ones(1), None, dst=0), "others are not"),
        (lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT), "reductions are SUM, AVG, MIN and MAX"),
        (lambda: all_gather_single(torch.ones(7), torch.ones(2)), "4 ranks' parts of 2 elements"),
        (lambda: reduce_scatter_single(torch.ones(2), torch.ones(7)), "4 ranks' parts of 2 elements"),
        (lambda: Link(bandwidth=0, latency=1), "bandwidth must be above 0"),
    ],
)
def test_what_is_not_simulated_is_an_error(group: SimulatedGroup, call: Callable[[], Any], message: str) -> None:
    with pytest.raises((NotImplementedError, ValueError), match=message):
        call()


# Training


def test_ranks_that_do_not_exist_are_not_waited_for(group: SimulatedGroup) -> None:
    assert not is_shared(range(RANKS))
    agree("alone", ["gather blocks.0"], range(RANKS), timeout=0.01)


def test_ours_plans_for_a_device_of_so_many_gigabytes() -> None:
    cluster, device = simulated_cluster.CLUSTERS["nvlink"], torch.device("cpu")
    assert simulated_cluster.hardware_of(cluster, device, 5.0).memory == 5e9
    assert simulated_cluster.hardware_of(cluster, device).memory != 5e9


Trained: TypeAlias = tuple[list[Tensor], dict[str, Tensor], list[Launch]]


def train(model: nn.Module, group: SimulatedGroup, steps: int = 2) -> Trained:
    """Losses, this rank's shards at the end, and the last step's collectives."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        group.trace = []
        x, target = torch.randn(8, WIDTH, generator=generator), torch.randn(8, CLASSES, generator=generator)
        loss = F.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    shards = {name: p.to_local().detach() for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return losses, shards, group.trace


POLICIES = {
    "float32": MixedPrecisionPolicy(),
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["8 ranks", "2 times 4 ranks"])
def test_fsdp2_and_graph_fsdp_train_alike(shape: tuple[int, ...], policy: MixedPrecisionPolicy) -> None:
    def ours(mesh: DeviceMesh) -> nn.Module:
        return graph_fsdp.compile(MLP(), mesh, mp_policy=policy, backend="eager")

    def theirs(mesh: DeviceMesh) -> nn.Module:
        return fsdp2(MLP(), mesh=mesh, mp_policy=policy)

    found = []
    with simulated_group(8, LINK) as world:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        group = mesh.get_group(mesh.ndim - 1)
        assert isinstance(group, SimulatedGroup)
        for shard_model in (ours, theirs):
            torch.manual_seed(0)
            found.append(train(shard_model(mesh), group))
        assert (group is world) == (len(shape) == 1)
    (our_losses, our_shards, our_launches), (their_losses, their_shards, their_launches) = found
    assert our_losses == their_losses, "bit for bit"
    assert our_losses[0] != our_losses[1]
    assert our_shards.keys() == their_shards.keys() == dict(MLP().named_parameters()).keys()
    assert all(torch.equal(our_shards[name], shard) for name, shard in their_shards.items())
    for launches in (our_launches, their_launches):
        assert {kind for launch in launches for kind in launch.kinds} == {"all_gather", "reduce_scatter"}


@pytest.mark.long
def test_the_benchmark_compares_both_on_each_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = "--device cpu --size tiny --layers 1 --backend eager --rounds 2 --warmup 1 --latency-scale 1 --out"
    simulated_cluster.main([*options.split(), str(out)])
    printed = capsys.readouterr().out
    assert printed.count("\nratio: step ") == len(simulated_cluster.CLUSTERS)
    result = json.loads(out.read_text())
    assert result["clusters"].keys() == simulated_cluster.CLUSTERS.keys()
    for name, cluster in result["clusters"].items():
        assert cluster["ranks"] == simulated_cluster.CLUSTERS[name].ranks
        assert cluster["bandwidth"] == simulated_cluster.CLUSTERS[name].link.bandwidth * result["bandwidth_scale"]
        assert cluster["loss_difference"] <= simulated_cluster.LOSS_TOLERANCE
        assert cluster["gradient_difference"] <= simulated_cluster.GRADIENT_TOLERANCE
        rows = cluster["implementations"]
        assert rows.keys() == simulated_cluster.IMPLEMENTATIONS.keys()
        for row in rows.values():
            assert len(row["steps_s"]) == len(row["computes_s"]) == 2
            assert row["bound_s"] == max(row["compute_s"], row["link_s"])
            assert row["over_bound"] == row["step_s"] / row["bound_s"]
            planned = row["collectives"] * cluster["latency_s"] + row["moved_bytes"] / cluster["bandwidth"]
            assert row["link_s"] == pytest.approx(planned)
        ours, theirs = rows.values()
        assert cluster["ratios"]["step_s"] == ours["step_s"] / theirs["step_s"]
        assert len(set(map(len, cluster["losses"].values()))) == 1
    sixty_four, eight = (result["clusters"][name]["losses"]["graph_fsdp"] for name in ("infiniband", "nvlink"))
    assert sixty_four != eight, "other shards make another model"


def shard_other_weights(model: nn.Module, *arguments: Any) -> nn.Module:
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(10)
    return simulated_cluster.shard_ours(model, *arguments)


def shard_without_gradient(model: nn.Module, *arguments: Any) -> nn.Module:
    model.get_parameter("model.norm.weight").requires_grad_(False)
    return simulated_cluster.shard_ours(model, *arguments)


@pytest.mark.long
@pytest.mark.parametrize("shard_model", [shard_other_weights, shard_without_gradient])
def test_a_run_whose_numbers_differ_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_model: Callable[..., nn.Module]
) -> None:
    monkeypatch.setitem(simulated_cluster.IMPLEMENTATIONS, "graph_fsdp", shard_model)
    out = tmp_path / "result.json"
    options = "--device cpu --size tiny --layers 1 --backend eager --rounds 1 --warmup 1 --clusters nvlink --out"
    with pytest.raises(SystemExit, match="losses or gradients differ on nvlink"):
        simulated_cluster.main([*options.split(), str(out)])
    assert out.exists(), "what was measured can be looked at"


def test_differences_are_relative_and_infinite_where_a_number_is_missing() -> None:
    difference = simulated_cluster.difference
    assert difference({0: 1.0, 1: 2.0, 2: 0.0}, {0: 1.0, 1: 1.8, 2: 0.0}) == pytest.approx(0.1)
    assert difference({0: float("nan")}, {0: float("nan")}) == float("inf")
    assert difference({0: 1.0}, {0: 1.0, 1: 1.0}) == float("inf")
