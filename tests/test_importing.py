"""``graph_fsdp.import_``: whole tensors into shards, of a mapping, an iterator, one rank, or another process group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from facts import Facts
from launch import run_ranks
from models import MLP
from test_export import Mixed, built, check_exported, compiled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import graph_fsdp
from graph_fsdp.errors import CheckpointError, ParameterChangedError, RankDisagreement, RankFailure
from graph_fsdp.runtime.ranks import agreement

FACTS = Facts(__name__)


def other(make: Any = Mixed) -> dict[str, Tensor]:
    """The state of a model of another seed."""
    return built(make, seed=1).state_dict()


def check_imported(model: nn.Module, make: Any = Mixed) -> None:
    check_exported(list(graph_fsdp.export(model)), built(make, seed=1))


def without(state: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name not in names}


def test_one_process_takes_mappings_and_iterators() -> None:
    for tensors in (other(), reversed(other().items())):
        model = compiled(Mixed)
        assert graph_fsdp.import_(model, tensors) == ([], [])
        check_imported(model)


def test_values_are_cast_and_a_tied_name_may_be_left_out() -> None:
    state = {name: v.bfloat16() if v.is_floating_point() else v for name, v in other().items()}
    model = compiled(Mixed)
    graph_fsdp.import_(model, without(state, "gpt.head.weight"))
    for name, tensor in graph_fsdp.export(model):
        assert tensor.dtype == other()[name].dtype and torch.equal(tensor, state[name].to(tensor.dtype))


def test_a_step_after_an_import_is_that_of_the_other_model() -> None:
    losses = []
    for imports in (False, True):
        model = compiled(MLP) if imports else graph_fsdp.compile(built(MLP, seed=1), backend="eager")
        if imports:
            model(torch.ones(2, 16)).sum().backward()  # a graph is captured before
            model.zero_grad()
            graph_fsdp.import_(model, other(MLP))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(2, 16)).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_wrong_arguments_are_named_and_nothing_is_written() -> None:
    model = compiled(MLP)
    for given, options, error, text in (
        (None, {}, TypeError, "tensors must be a mapping or an iterable"),
        ("weights.pt", {}, TypeError, "tensors must be a mapping or an iterable"),
        ({}, {"max_bytes": 0}, ValueError, "max_bytes must be a positive number of bytes, got 0"),
        ({}, {"rank": 3}, ValueError, "rank must be a global rank of the model's mesh, 0 to 0, got 3"),
        ({}, {"strict": None}, TypeError, "strict must be True or False, got None"),
        ({}, {}, CheckpointError, r"Missing key\(s\) in state_dict: \"blocks.0.up.weight\""),
        ([("head.bias", 3)], {}, TypeError, r"tensors\['head.bias'\] is int, and not a whole tensor; give one"),
        ([torch.ones(1)], {}, TypeError, "tensors must give pairs of a name and a tensor, got Tensor"),
        ({"head.bias": torch.ones(5, dtype=torch.long)}, {}, CheckpointError, "int64 cannot be written into torch.fl"),
    ):
        with pytest.raises(error, match=text):
            graph_fsdp.import_(model, given, **options)  # type: ignore[arg-type]
    check_exported(list(graph_fsdp.export(model)), built(MLP))
    with pytest.raises(TypeError, match=r"MLP was not compiled by graph_fsdp; call graph_fsdp\.compile first"):
        graph_fsdp.import_(MLP(), {})


def test_a_mapping_that_does_not_fit_changes_nothing_and_a_stream_says_what_it_changed() -> None:
    wrong = {**other(MLP), "head.bias": torch.ones(6)}
    model = compiled(MLP)
    with pytest.raises(CheckpointError, match="size mismatch for head") as raised:
        graph_fsdp.import_(model, wrong)
    assert "were written" not in str(raised.value)
    check_exported(list(graph_fsdp.export(model)), built(MLP))
    with pytest.raises(CheckpointError, match=r"head.bias.*; 9 tensors were written before it, 'blocks.0.up.w"):
        graph_fsdp.import_(model, iter(wrong.items()))
    with pytest.raises(CheckpointError, match=r"Missing.*\"head.bias\".*; 9 tensors were written before it"):
        graph_fsdp.import_(model, iter(without(wrong, "head.bias").items()))


@pytest.mark.parametrize("kind", ["meta", "sparse"])
def test_tensors_without_elements_to_copy_are_refused(kind: str) -> None:
    weight = other(MLP)["head.weight"]
    wrong = {**other(MLP), "head.weight": weight.to("meta") if kind == "meta" else weight.to_sparse()}
    model = compiled(MLP)
    words = rf"tensors\['head.weight'\] is o[nf] the .*{kind}.*; give a dense tensor with values"
    with pytest.raises(TypeError, match=words) as raised:
        graph_fsdp.import_(model, wrong)
    assert "were written" not in str(raised.value)
    check_exported(list(graph_fsdp.export(model)), built(MLP))
    with pytest.raises(TypeError, match=rf"{words}.*; 8 tensors were written before it, 'blocks.0.up.w"):
        graph_fsdp.import_(model, iter(wrong.items()))


def test_without_strict_what_does_not_fit_is_returned() -> None:
    model = compiled(MLP)
    state = {"extra": torch.ones(1), **without(other(MLP), "head.bias")}
    for tensors in (state, state.items()):
        found = graph_fsdp.import_(model, tensors, strict=False)
        assert found.missing_keys == ["head.bias"] and found.unexpected_keys == ["extra"]


class Sent(TorchDispatchMode):
    """The bytes of tensors that are broadcast, without what describes them."""

    def __init__(self) -> None:
        super().__init__()
        self.floats = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "broadcast_" in str(func):
            self.floats += sum(t.nbytes for t in args[0] if t.is_floating_point())
        return func(*args, **(kwargs or {}))


@FACTS
def every_rank_keeps_its_rows_of_what_it_has_and_nothing_is_sent() -> None:
    for tensors in (other(), iter(other().items())):
        model = compiled(Mixed)
        with Sent() as sent:
            graph_fsdp.import_(model, tensors)
        assert sent.floats == 0
        check_imported(model)
    model = compiled(MLP, offload_policy=CPUOffloadPolicy())
    graph_fsdp.import_(model, other(MLP))
    check_imported(model, MLP)


@FACTS
def one_rank_has_them_and_sends_each_once() -> None:
    for max_bytes in (1, 5000, 2**28):
        model = compiled(Mixed)
        with Sent() as sent:
            state = other()
            graph_fsdp.import_(model, state if dist.get_rank() == 1 else None, rank=1, max_bytes=max_bytes)
        assert sent.floats == sum(t.nbytes for t in state.values() if t.is_floating_point())
        check_imported(model)


@FACTS
def what_is_wrong_on_the_rank_that_sends_is_raised_on_all_and_training_goes_on() -> None:
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from list(other(MLP).items())[:3]
        raise OSError("no more")

    model = compiled(MLP)
    wrong = {**other(MLP), "head.bias": torch.ones(6)}
    for make, text in ((broken, "OSError: no more; 2 tensors were written"), (wrong.items, "size mismatch for head")):
        with pytest.raises(CheckpointError, match=text):
            graph_fsdp.import_(model, make() if dist.get_rank() == 0 else None, rank=0, max_bytes=1)  # type: ignore[operator]
        model(torch.ones(2, 16)).sum().backward()
    on_meta = {**other(MLP), "head.bias": torch.ones(5, device="meta")}
    for given, error, text in ((wrong, CheckpointError, "size mismatch for head"), (on_meta, TypeError, "meta device")):
        with pytest.raises(error if dist.get_rank() == 0 else RankDisagreement, match=text):
            graph_fsdp.import_(model, given if dist.get_rank() == 0 else None, rank=0)
    graph_fsdp.import_(model, other(MLP) if dist.get_rank() == 0 else None, rank=0)
    check_imported(model, MLP)


@FACTS
def ranks_that_ask_for_different_things_or_have_them_are_told() -> None:
    model = compiled(MLP)
    with pytest.raises(RankDisagreement, match="max_bytes"):
        graph_fsdp.import_(model, other(MLP), max_bytes=1000 + dist.get_rank())
    state = list(other(MLP).items())
    with pytest.raises(RankDisagreement, match="10 tensors"):
        graph_fsdp.import_(model, iter(state if dist.get_rank() == 0 else state[::-1]))
    expected = ValueError if dist.get_rank() == 0 else RankDisagreement
    with pytest.raises(expected, match="tensors must be None on a rank that is sent them"):
        graph_fsdp.import_(model, state, rank=1)


test_on_two_ranks = FACTS.on(2)


def on_meshes_of_two_dimensions() -> None:
    for rank in (None, 0, 3):
        model = compiled(Mixed, init_device_mesh("cpu", (2, 2)))
        graph_fsdp.import_(model, other() if rank in (None, dist.get_rank()) else None, rank=rank, max_bytes=4000)
        check_imported(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = built(MLP)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    leaves = ((name, styles.get(name.rpartition(".")[2])) for name, _ in plain.named_modules())
    parallelize_module(plain, mesh["tp"], {name: style for name, style in leaves if style is not None})
    graph_fsdp.compile(plain, mesh["dp"], backend="eager")
    graph_fsdp.import_(plain, other(MLP))
    check_imported(plain, MLP)


def from_another_model() -> None:
    """Ranks 0 and 1 export, and 2 and 3 import what one of them receives."""
    rank = dist.get_rank()
    between, halves = dist.new_group([1, 2]), [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mesh = DeviceMesh.from_group(halves[rank // 2], "cpu")
    model = graph_fsdp.compile(built(Mixed, seed=1 if rank < 2 else 0), mesh, backend="eager")
    if rank < 2:
        list(graph_fsdp.export(model, group=between))
    else:
        graph_fsdp.import_(model, graph_fsdp.receive(between, src=1) if rank == 2 else None, rank=2)
    check_imported(model)


def on_four_ranks() -> bool:
    on_meshes_of_two_dimensions()
    from_another_model()
    return True


def test_meshes_of_two_dimensions_and_another_process_group() -> None:
    assert run_ranks(on_four_ranks, 4) == [True] * 4


def one_rank_raises(how: str) -> str:
    """What this rank raised. Others of a rank that raised look for it after a short time."""
    model = compiled(lambda: MLP(2))
    stream: Any = graph_fsdp.export(model, max_bytes=1)
    if how == "export":
        next(stream)
    with mock.patch.object(agreement, "PATIENCE_SECONDS", 0.2):
        try:
            if dist.get_rank() == 1 and how == "export":
                with torch.no_grad():
                    model.head.bias.add_(1)
            if how == "export":
                list(stream)
            else:
                given = iter(other(lambda: MLP(2)).items())
                refuse = mock.patch.object(Tensor, "copy_", side_effect=MemoryError("no memory on rank 1"))
                with refuse if dist.get_rank() == 1 else mock.MagicMock():
                    graph_fsdp.import_(model, given if dist.get_rank() == 0 else None, rank=0, max_bytes=1)
        except (ParameterChangedError, RankFailure, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(("how", "error"), [("export", "ParameterChangedError"), ("import", "MemoryError")])
def test_a_rank_that_raises_is_named_on_the_other_long_before_the_timeout(how: str, error: str) -> None:
    waits, raises = run_ranks(one_rank_raises, 2, how, timeout=300)
    assert raises.startswith(f"{error}: ")
    assert waits.startswith("RankFailure: ") and f"rank 1 raised {error}" in waits
    assert f"in the {how}{'_' if how == 'import' else ''}() call" in waits
