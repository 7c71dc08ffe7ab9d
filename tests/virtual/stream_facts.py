"""What runs on which stream of the virtual device, and in which memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from both_devices import (
    KINDS,
    LINK,
    RANKS,
    Training,
    mlp,
    numbers_of_fsdp2,
    on_virtual,
    ours,
    overlapped,
    rows,
    same_numbers,
    strict,
)
from models import MLP
from mutants import wrong
from simulated_link import Message
from symmetric import standing_in
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from virtual.accesses import Race
from virtual.group import VirtualGroup, virtual_group
from virtual.machine import Machine, Operation

import graph_fsdp
from graph_fsdp.compat import reduce_scatter_single
from graph_fsdp.parameters.host_memory import pinned_nbytes
from graph_fsdp.passes import Hardware, default_pipeline, find_hardware
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime.comm import collectives, copies
from graph_fsdp.runtime.comm.collectives import Comms
from graph_fsdp.runtime.comm.copies import Copy


def launched(machine: Machine, kind: str) -> list[Operation]:
    return [operation for operation in machine.operations or () if operation.operator == kind]


def collectives_run_on_streams_of_high_priority() -> None:
    machine = same_numbers(functools.partial(ours, passes=default_pipeline(hardware="h100")), alike=True)
    assert overlapped(machine) > 20e-6
    gathers, reductions = launched(machine, "all_gather"), launched(machine, "reduce_scatter")
    assert {operation.priority for operation in [*gathers, *reductions]} == {-1}, "compute does not hold them up"
    assert len({op.stream for op in gathers}) == len({op.stream for op in reductions}) == 1
    assert gathers[0].stream != reductions[0].stream


def messages_are_launched_together() -> None:
    """A message for nearly every parameter, and no more launches than buckets."""
    passes = default_pipeline(hardware=cheap_messages())
    shard = functools.partial(ours, passes=passes, reshard_after_forward=True)
    machine = same_numbers(shard, steps=1, alike=True)
    assert len(launched(machine, "all_gather")) == 10 and len(launched(machine, "reduce_scatter")) == 5


def cheap_messages() -> Hardware:
    """Hardware on which unpacking costs more than a message."""
    base = {**vars(find_hardware("h100")), "memory_bandwidth": 1e6, "name": "slow copies"}
    return Hardware(**base)


def registered_memory_is_gathered_into_and_not_copied() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model = ours(model, passes=default_pipeline(hardware=cheap_messages()))
        model.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        return model

    VirtualGroup.landed.clear()
    machine = same_numbers(shard, alike=True)
    landed = {kind: {registered for other, registered in VirtualGroup.landed if other == kind} for kind in KINDS}
    assert landed == {kind: {True} for kind in KINDS}
    assert not launched(machine, "aten.split_with_sizes_copy")


def symmetric_slots_are_exchanged_once_and_gathered_into_without_a_copy() -> None:
    """With stand-ins for torch's allocation and exchange of addresses."""
    gathers: list[tuple[set[int], set[int]]] = []  # addresses of the storages that a gather sends from and writes
    launch = VirtualGroup.launch

    def noted(self: VirtualGroup, messages: Sequence[Message]) -> Any:
        for message in messages:
            if message.kind == "all_gather" and Machine.current is not None:
                sent, written = (
                    {t.untyped_storage().data_ptr() for t in tensors} for tensors in (message.inputs, message.outputs)
                )
                gathers.append((sent, written))
        return launch(self, messages)

    def shard(model: nn.Module) -> nn.Module:
        model = ours(model, passes=default_pipeline(hardware=cheap_messages()), reshard_after_forward=True)
        if Machine.current is not None:
            model.set_symm_mem_for_comm()  # type: ignore[operator]
        return model

    with standing_in() as asked, mock.patch.object(VirtualGroup, "launch", noted), strict():
        machine = same_numbers(shard, steps=3, alike=True)
    assert asked.pools and set(asked.pools) == {"virtual"}
    assert len(asked.exchanged) == len(asked.pools) == len(asked.addresses), "no slot is exchanged, or made, again"
    count, rest = divmod(len(gathers), 3)
    steps = [gathers[step * count : (step + 1) * count] for step in range(3)]
    assert count and not rest and steps[0] == steps[1] == steps[2], "slots stay where they are"
    for sent, written in steps[0]:
        assert sent == written <= asked.addresses, "a rank sends its own part of a slot"
    assert not launched(machine, "aten.split_with_sizes_copy")


class TheirGather(DefaultAllGather):
    """Notes on what stream it is called, and whether it is to return at once."""

    called: ClassVar[list[tuple[int, bool]]] = []

    def __call__(self, *args: Any, async_op: bool = False, **given: Any) -> Any:
        self.called.append((torch.accelerator.current_stream().stream_id, async_op))
        return super().__call__(*args, async_op=async_op, **given)


def custom_collectives_are_called_on_our_streams() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model = ours(model)
        model.set_custom_all_gather(TheirGather())  # type: ignore[operator]
        model.set_custom_reduce_scatter(DefaultReduceScatter())  # type: ignore[operator]
        return model

    machine = same_numbers(shard)
    gathers = launched(machine, "all_gather")
    assert TheirGather.called[: len(gathers)] == [(gathers[0].stream, False)] * len(gathers)
    assert all(async_op for _, async_op in TheirGather.called[len(gathers) :]), "on the CPU"


def memory_of_collectives_that_nobody_waits_for_is_not_given_away() -> None:
    def races(group: dist.ProcessGroup) -> list[Race]:
        def raises(target: Tensor, source: Tensor, **given: Any) -> None:
            reduce_scatter_single(target, source, **given)
            raise KeyboardInterrupt

        raises.allocate = DefaultReduceScatter().allocate  # type: ignore[attr-defined]
        for comms in (None, Comms(reduce_scatter=raises)):  # type: ignore[arg-type]
            gradients, mean = [torch.ones(8, 3, device="virtual")], collectives.mean_of(torch.float32, RANKS)
            reduction = collectives.ReduceScatter(gradients, torch.float32, group, mean, comms=comms)
            with contextlib.suppress(KeyboardInterrupt):
                reduction.start(gradients)
            del gradients
            torch.empty(8, device="virtual")
        return machine.take_races()

    nothing_told = wrong(
        "", "runtime.comm.streams:OnStream.__del__", "tensor.record_stream(self.stream)", "pass"
    ).active()
    with Machine("h100") as machine, strict(), virtual_group(RANKS, LINK) as group:
        assert not races(group)
        with nothing_told:
            assert {race.first.operator for race in races(group)} == {"reduce_scatter"}


def memory_of_copies_that_nobody_waits_for_is_not_given_away() -> None:
    """As where a forward with offloaded parameters or activations is interrupted, or a start itself."""

    def starts() -> Iterator[Copy]:
        layout = GatherLayout.make([0, 8], [8, 8], 16, RANKS, [0, 16])
        yield copies.start_fetch([torch.ones(8, pin_memory=True) for _ in range(2)], layout, device)
        yield copies.start_offload([torch.ones(8, device=device)], pin_memory=True)
        yield copies.offload_activation(torch.ones(8, device=device))
        yield copies.reload_activation(torch.ones(8, pin_memory=True), device)

    def interrupted(self: Machine, *given: Any) -> None:
        launch(self, *given)
        raise KeyboardInterrupt

    launch = Machine.launch
    with Machine("h100"):  # which raises where it finds a race
        device = torch.device("virtual", 0)
        for copy in starts():
            del copy
            torch.empty(8, device=device)
        with mock.patch.object(Machine, "launch", interrupted), contextlib.suppress(KeyboardInterrupt):
            next(starts())
        torch.empty(8, device=device)


def ours_with_offload_and_pinned_memory_of_little_more_than_the_shards_bytes() -> None:
    def shard(model: Any) -> Any:
        made = ours(model, offload_policy=CPUOffloadPolicy())
        if Machine.current is not None:
            pinned, buffers = Machine.current.memory.pinned, engine_of(made).storage.buffers
            nbytes = sum(buffer.nbytes for buffer in buffers)
            assert pinned_nbytes(nbytes) > 1.8 * nbytes, "as one buffer"
            assert nbytes <= pinned <= 1.05 * nbytes and 1 < len(buffers) <= 8
        return made

    uneven = functools.partial(MLP, depth=5, width=84)
    same_numbers(shard, uneven, lambda generator: torch.randn(4, 84, generator=generator), alike=True)


class Ahead(Training):
    """With the next forward's first gathers in the optimizer's step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.optimizer = graph_fsdp.distribute_optimizer(self.optimizer, gather_ahead=1)


def gathers_of_a_step_run_beside_its_kernels() -> None:
    machine = Machine("h100", traced=True)
    with strict():
        shard = functools.partial(ours, auto_wrap_policy={nn.Linear})
        found = on_virtual(machine, lambda device: Ahead(shard, mlp, rows, device).values(3))
    assert all(torch.equal(a, b) for a, b in zip(found, numbers_of_fsdp2(), strict=True))
    *_, gather = launched(machine, "all_gather")
    kernels = [op for op in machine.operations or () if op.stream == 0]
    beside = [op for op in kernels if op.begin < gather.end and op.end > gather.begin]
    assert beside and all("foreach" in op.operator for op in beside), "the update of the other units"
    before = [op for op in kernels if op.end <= gather.begin]
    assert "foreach" in before[-1].operator, "the update of the first"


class TwoOutputs(MLP):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.blocks[0](x)


def a_clipped_step_of_two_outputs_does_not_wait_for_the_device() -> None:
    """Of a gradient that one of the outputs has not, ranks agree whether any rank has it."""

    def run(device: str) -> None:
        training = Training(ours, functools.partial(TwoOutputs, 1), rows, device)
        model: Any = training.model
        x = training.batch()
        for _ in range(2):
            torch.accelerator.synchronize()
            before = machine.clocks.host.seconds
            sum(y.square().mean() for y in model(x)).backward()  # type: ignore[union-attr]
            model.clip_grad_norm_(0.1)
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert machine.clocks.host.seconds == before, "launching takes no time there"

    machine = Machine("h100")
    on_virtual(machine, run)


FOUND = (
    a_clipped_step_of_two_outputs_does_not_wait_for_the_device,
    collectives_run_on_streams_of_high_priority,
    messages_are_launched_together,
    registered_memory_is_gathered_into_and_not_copied,
    symmetric_slots_are_exchanged_once_and_gathered_into_without_a_copy,
    custom_collectives_are_called_on_our_streams,
    memory_of_collectives_that_nobody_waits_for_is_not_given_away,
    memory_of_copies_that_nobody_waits_for_is_not_given_away,
    ours_with_offload_and_pinned_memory_of_little_more_than_the_shards_bytes,
    gathers_of_a_step_run_beside_its_kernels,
)
