"""Collectives that the user brings, by FSDP2's protocol: in the printed graphs, called, and bit for bit as without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from facts import Facts
from models import MLP
from printed import calls
from torch import Tensor, nn

import graph_fsdp
from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError

FACTS = Facts(__name__)


class Counting:
    """Counts calls, and what it has allocated."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.allocated: list[tuple[int, torch.dtype]] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.allocated.append((*size, dtype))
        return torch.full(tuple(size), float("nan"), dtype=dtype, device=device)


class CountingGather(Counting):
    """Ends where it starts: the protocol lets it return nothing to wait for."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.calls.append(output_tensor.numel())
        own = output_tensor.view(group.size(), -1)[group.rank()]
        assert input_tensor.data_ptr() == own.data_ptr(), "the input is the rank's own part of the output"
        compat.all_gather_single(output_tensor, input_tensor.clone(), group=group)


class CountingReduction(Counting):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        self.calls.append(input_tensor.numel())
        return compat.reduce_scatter_single(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def compiled(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return graph_fsdp.compile(MLP(), backend="eager", **options)


def gathers(model: nn.Module) -> str:
    return calls(graph_fsdp.inspect(model).forward, "all_gather_start")


@pytest.mark.usefixtures("fake_group")
def test_the_graph_says_which_collectives_are_the_users_own() -> None:
    model = compiled()
    model(torch.randn(4, 16)).sum().backward()
    assert "custom" not in gathers(model)
    model.set_custom_all_gather(CountingGather())
    model.set_custom_reduce_scatter(CountingReduction())
    model(torch.randn(4, 16)).sum().backward()
    assert_expected_inline(
        gathers(model),
        """\
gather_blocks_0 = all_gather_start([blocks.0.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8,
    custom=True)
gather_blocks_1 = all_gather_start([blocks.1.{up.weight, up.bias, down.weight, down.bias}], float32, world_size=8,
    custom=True)
gather_root = all_gather_start([head.{weight, bias}], float32, world_size=8, custom=True)""",
    )
    assert_expected_inline(
        calls(graph_fsdp.inspect(model).backward, "reduce_scatter_start"),
        """\
reduce_root = reduce_scatter_start([head.{weight: mm, bias: sum}], float32, world_size=8, custom=True)
reduce_blocks_1 = reduce_scatter_start([blocks.1.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8, custom=True)
reduce_blocks_0 = reduce_scatter_start([blocks.0.{up.weight: mm, up.bias: sum, down.weight: mm, down.bias: sum}],
    float32, world_size=8, custom=True)""",
    )
    captures = len(graph_fsdp.inspect(model).graphs)
    model.set_custom_all_gather(CountingGather())
    model(torch.randn(4, 16)).sum().backward()
    assert len(graph_fsdp.inspect(model).graphs) == captures, "another object needs no other graph"
    model.set_custom_all_gather(None)
    model.set_custom_reduce_scatter(None)
    model(torch.randn(4, 16)).sum().backward()
    assert len(graph_fsdp.inspect(model).graphs) == captures, "nor do the process group's own, which were there first"
    memory = graph_fsdp.inspect(model).graphs[1].views["forward"].memory
    assert memory.peak_landing == 5120, "a bucket of what the object allocates, which is unpacked from"


@pytest.mark.usefixtures("fake_group")
def test_wrong_objects_and_places_that_have_none() -> None:
    model = compiled()
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(TypeError, match=f"{method}: comm must have allocate"):
            getattr(model, method)(dist.all_gather)
    model.set_custom_all_gather(CountingGather())
    with pytest.raises(ValueError, match="set_custom_all_gather was called, and that object allocates"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    torch._dynamo.reset()
    whole = graph_fsdp.compile(MLP(), regions="whole")
    with pytest.raises(UnsupportedError, match="the compiler runs the collectives"):
        whole.set_custom_all_gather(CountingGather())


class Misallocating(CountingReduction):
    def __init__(self, memory: Callable[[int, torch.dtype], Tensor]) -> None:
        super().__init__()
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.memory(*size, dtype)


WRONG: dict[str, Callable[[int, torch.dtype], Tensor]] = {
    r"shape \(2,\) in torch.float32": lambda numel, dtype: torch.empty(2, dtype=dtype),
    r"shape \(8, \d+\) in torch.float32": lambda numel, dtype: torch.empty(8, numel, dtype=dtype),
    r"in torch.float16 on cpu": lambda numel, dtype: torch.empty(numel, dtype=torch.float16),
    r"strides \(2,\)": lambda numel, dtype: torch.empty(2 * numel, dtype=dtype)[::2],
}


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("said", WRONG)
def test_memory_that_was_not_asked_for_is_an_error_that_says_what_was(said: str) -> None:
    for method in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        model = compiled()
        getattr(model, method)(Misallocating(WRONG[said]))
        with pytest.raises(ValueError, match=rf"allocate\(\) of .* Misallocating returned a tensor of .*{said}"):
            model(torch.randn(4, 16)).sum().backward()


def test_where_nothing_is_sharded_it_is_warned_of() -> None:
    model = compiled()
    for method, value in (
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_custom_all_gather", CountingGather()),
    ):
        with pytest.warns(UserWarning, match=f"{method} changes nothing"):
            getattr(model, method)(value)


def train(model: nn.Module) -> dict[str, Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


def equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


@functools.cache
def trained() -> dict[str, Tensor]:
    """Without objects of the user's, on this rank."""
    return train(compiled())


@FACTS
def every_bucket_goes_through_the_users_object_and_no_number_changes() -> None:
    model, gather, reduction = compiled(reshard_after_forward=True), CountingGather(), CountingReduction()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduction)
    equal(train(model), trained())
    counted = graph_fsdp.inspect(model).collectives
    assert len(gather.calls) == len(gather.allocated) == counted["all_gather"] == 12
    assert 2 * len(reduction.calls) == len(reduction.allocated) and len(reduction.calls) == counted["reduce"] == 6
    assert [numel for numel, _ in gather.allocated] == gather.calls


@FACTS
def so_does_what_is_gathered_before_a_forward() -> None:
    model, gather = compiled(), CountingGather()
    expected = {name: p.full_tensor() for name, p in model.named_parameters()}
    model.set_custom_all_gather(gather)
    for unit in (*model.blocks, model):
        unit.unshard()
    assert len(gather.calls) == 3
    equal(dict(model.named_parameters()), expected)
    for unit in (*model.blocks, model):
        unit.reshard()
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.ones(4, 16))
    assert len(gather.calls) == 6, "evaluations keep units whole"
    with graph_fsdp.unsharded(model):
        equal(dict(model.named_parameters()), expected)
    assert len(gather.calls) == 6, "what can be written is gathered exactly"


@FACTS
def torchs_own_objects_are_taken() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as torchs

    model = compiled()
    model.set_custom_all_gather(torchs.DefaultAllGather())
    model.set_custom_reduce_scatter(torchs.DefaultReduceScatter())
    equal(train(model), trained())


@FACTS
def memory_of_the_process_group_changes_no_number() -> None:
    model = compiled()
    model.set_allocate_memory_from_process_group_for_comm(True)
    equal(train(model), trained())
    assert "custom" not in gathers(model), "nothing is gathered apart, to be copied"
    report = graph_fsdp.inspect(model)
    assert report.graphs[0].views["forward"].memory.total[-1] >= report.forward.slots.nbytes > 0, "slots stay"
    model.set_allocate_memory_from_process_group_for_comm(False)
    with torch.no_grad():
        assert model(torch.randn(4, 16)).isfinite().all()


test_on_two_ranks = FACTS.on(2)
