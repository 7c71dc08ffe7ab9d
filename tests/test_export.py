"""``graph_fsdp.export`` and ``receive``: whole tensors bucket by bucket, on one process and on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from models import GPT, MLP
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp.errors import ParameterChangedError, RankDisagreement, UnsupportedError

FACTS = Facts(__name__)


class Mixed(nn.Module):
    """Buffers of two dtypes, uneven rows, a scalar and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT(tied=True)
        self.norm, self.scale = nn.BatchNorm1d(5), nn.Parameter(torch.tensor(0.5))
        self.odd = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.gpt(x).mean() + self.odd(self.norm(x[:, :5].float())).mean() * self.scale


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def compiled(make: Callable[[], nn.Module], *mesh: Any, **options: Any) -> Any:
    return graph_fsdp.compile(built(make), *mesh, backend="eager", **options)


def check_exported(found: list[tuple[str, Tensor]], expected: nn.Module, dtype: torch.dtype | None = None) -> None:
    state = expected.state_dict()
    assert sorted(name for name, _ in found) == sorted(state)
    for name, tensor in found:
        value = state[name].to(dtype) if dtype and state[name].is_floating_point() else state[name]
        assert type(tensor) is Tensor and not tensor.requires_grad and tensor.dtype == value.dtype
        assert torch.equal(tensor, value), name


class Gathers(TorchDispatchMode):
    """The sizes, in elements, of what each all-gather brings."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in str(func):
            self.sizes.append(made.numel())
        return made


def test_one_process_exports_its_state_dict() -> None:
    found = list(graph_fsdp.export(compiled(Mixed)))
    check_exported(found, built(Mixed))
    tied = [place for place, (name, _) in enumerate(found) if name in ("gpt.tokens.weight", "gpt.head.weight")]
    assert tied[1] == tied[0] + 1
    check_exported(list(graph_fsdp.export(compiled(Mixed), dtype=torch.bfloat16)), built(Mixed), torch.bfloat16)


def test_wrong_arguments_are_named_at_the_call() -> None:
    model = compiled(MLP)
    for options, error, text in (
        ({"dtype": torch.int8}, TypeError, "dtype must be a floating-point torch.dtype or None, got torch.int8"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be a positive number of bytes or None, got 0"),
        ({"rank": 3}, ValueError, "rank must be a global rank of the model's mesh, 0 to 0, got 3"),
    ):
        with pytest.raises(error, match=text):
            graph_fsdp.export(model, **options)
    with pytest.raises(TypeError, match=r"MLP was not compiled by graph_fsdp; call graph_fsdp\.compile first"):
        graph_fsdp.export(MLP())


def test_parameters_on_meshes_of_which_none_has_all_ranks_are_refused(fake_group: dist.ProcessGroup) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "ep"))
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer, dimension in zip(model, ("tp", "ep"), strict=True):
        parallelize_module(layer, mesh[dimension], ColwiseParallel())
    graph_fsdp.compile(model, mesh["dp"], backend="eager")
    for moved in (lambda: graph_fsdp.export(model), lambda: graph_fsdp.import_(model, {})):
        with pytest.raises(
            UnsupportedError, match="parameters are on 6 ranks, and the largest mesh of one, DeviceMesh"
        ):
            moved()


@FACTS
def every_rank_gets_the_state_dict_of_a_plain_model() -> None:
    check_exported(list(graph_fsdp.export(compiled(Mixed))), built(Mixed))
    check_exported(list(graph_fsdp.export(compiled(Mixed), dtype=torch.bfloat16)), built(Mixed), torch.bfloat16)
    check_exported(list(graph_fsdp.export(compiled(MLP, offload_policy=CPUOffloadPolicy()))), built(MLP))


@FACTS
def one_rank_gets_it_and_the_others_gather() -> None:
    found = list(graph_fsdp.export(compiled(Mixed), rank=1))
    if dist.get_rank() == 1:
        check_exported(found, built(Mixed))
    else:
        assert found == []


@FACTS
def a_bucket_is_a_unit_or_at_most_so_many_bytes() -> None:
    model = compiled(lambda: MLP(2))
    exported = graph_fsdp.export(model)
    with Gathers() as gathers:
        name, _ = next(exported)
    unit = name.rpartition(".")[0].rpartition(".")[0]
    of_unit = [p for p_name, p in model.named_parameters() if p_name.startswith(unit)]
    assert len(of_unit) < len(list(model.parameters()))
    assert len(gathers.sizes) == len(of_unit) and sum(gathers.sizes) >= sum(p.numel() for p in of_unit)
    list(exported)
    with Gathers() as gathers:
        next(graph_fsdp.export(model, max_bytes=1))
    assert len(gathers.sizes) == len(list(model.parameters())), "closed at once, it has gathered the rest"
    exported = graph_fsdp.export(model, max_bytes=1)
    with Gathers() as gathers:
        next(exported)
        assert len(gathers.sizes) == 1
    list(exported)


@FACTS
def values_are_cast_before_they_are_gathered() -> None:
    model = compiled(MLP)
    sent: list[torch.dtype] = []

    class Dtypes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if "all_gather_into_tensor" in str(func):
                sent.append(made.dtype)
            return made

    with Dtypes():
        list(graph_fsdp.export(model, dtype=torch.bfloat16))
    assert set(sent) == {torch.bfloat16}


@FACTS
def a_rank_that_stops_early_leaves_the_others_complete() -> None:
    model = compiled(Mixed)
    kept = graph_fsdp.export(model)
    if dist.get_rank() == 0:
        next(kept)
        kept.close()
        for _, _ in graph_fsdp.export(model):
            break
    else:
        check_exported(list(kept), built(Mixed))
        check_exported(list(graph_fsdp.export(model)), built(Mixed))
    check_exported(list(graph_fsdp.export(model)), built(Mixed))


@FACTS
def a_step_between_two_tensors_is_an_error_and_training_goes_on() -> None:
    model = compiled(lambda: MLP(2))
    plain = built(lambda: MLP(2))
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    exported = graph_fsdp.export(model)
    next(exported)
    for trained, step in zip((model, plain), steps, strict=True):
        trained(torch.ones(2, 16)).square().mean().backward()
        step.step()
    with pytest.raises(ParameterChangedError, match="was written to while export"):
        list(exported)
    for (name, found), (_, value) in zip(graph_fsdp.export(model), plain.state_dict().items(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-7, msg=name)


@FACTS
def ranks_that_ask_for_different_things_are_told() -> None:
    model = compiled(MLP)
    with pytest.raises(RankDisagreement, match="max_bytes"):
        graph_fsdp.export(model, max_bytes=1000 + dist.get_rank())


test_on_two_ranks = FACTS.on(2)


def on_meshes_of_two_dimensions() -> None:
    check_exported(list(graph_fsdp.export(compiled(Mixed, init_device_mesh("cpu", (2, 2))))), built(Mixed))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = built(MLP)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    leaves = ((name, styles.get(name.rpartition(".")[2])) for name, _ in model.named_modules())
    parallelize_module(model, mesh["tp"], {name: style for name, style in leaves if style is not None})
    graph_fsdp.compile(model, mesh["dp"], backend="eager")
    check_exported(list(graph_fsdp.export(model)), built(MLP))


def trained_and_served() -> None:
    """Ranks 0 and 1 train; 2 serves, and takes what comes; 3 does nothing."""
    rank = dist.get_rank()
    serving, trainers = dist.new_group([0, 2]), dist.new_group([0, 1])
    if rank == 2:
        served = built(Mixed, seed=1)
        served.load_state_dict(dict(graph_fsdp.receive(serving, src=0)))
        check_exported(list(served.state_dict().items()), built(Mixed))
        with pytest.raises(RuntimeError, match="rank 0 sends no more of the model: ParameterChangedError"):
            list(graph_fsdp.receive(serving, src=0))
    if rank > 1:
        return
    assert isinstance(trainers, dist.ProcessGroup)
    model = compiled(Mixed, DeviceMesh.from_group(trainers, "cpu"))
    found = list(graph_fsdp.export(model, rank=1, group=serving))
    assert bool(found) == (rank == 1)
    exported = graph_fsdp.export(model, group=serving)
    next(exported)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    with pytest.raises(ParameterChangedError):
        list(exported)


def on_four_ranks() -> bool:
    on_meshes_of_two_dimensions()
    trained_and_served()
    return True


def test_meshes_of_two_dimensions_and_a_process_outside_of_the_mesh() -> None:
    assert run_ranks(on_four_ranks, 4) == [True] * 4
