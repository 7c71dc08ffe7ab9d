"""FSDP2 and ours run on the virtual device as on the CPU, with no race; runtimes of ours that are wrong are found."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from facts import Facts, Failures, check
from models import GPT, MLP, VOCABULARY
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from both_devices import LINK, RANKS, Training, fsdp2, on_cpu, on_virtual, ours
from mutants import mutated
from virtual import library
from virtual.accesses import Race
from virtual.group import VirtualGroup, virtual_group
from virtual.machine import Machine, Operation

from graph_fsdp.compat import reduce_scatter_single
from graph_fsdp.parameters.host_memory import pinned_nbytes
from graph_fsdp.passes import Hardware, default_pipeline, find_hardware
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import slots
from graph_fsdp.runtime.comm import collectives, copies, streams
from graph_fsdp.runtime.comm.collectives import Comms

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = ("all_gather", "reduce_scatter")
mlp = functools.partial(MLP, depth=4)


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 16, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def same_numbers(shard: Any, make: Any = mlp, batch: Any = rows, steps: int = 3) -> Machine:
    """Trains on the virtual device, which raises where it finds a race, and on the CPU."""
    machine = Machine("h100", traced=True)

    def run(device: str) -> list[Tensor]:
        return Training(shard, make, batch, device).values(steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = on_virtual(machine, run), on_cpu(run)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(found, expected, strict=True))
    return machine


def overlapped(machine: Machine) -> float:
    """Seconds in which kernels of the default stream run beside collectives."""
    links = [op for op in machine.operations or () if op.operator in KINDS]
    kernels = [op for op in machine.operations or () if op.stream == 0 and op.operator not in KINDS]
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in links for b in kernels)


@FACTS
def fsdp2_trains_as_on_the_cpu_and_overlaps() -> None:
    machine = same_numbers(fsdp2)
    assert overlapped(machine) > 20e-6


@FACTS
def fsdp2_in_bfloat16() -> None:
    same_numbers(functools.partial(fsdp2, mp_policy=BF16))


@FACTS
def fsdp2_of_a_gpt() -> None:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        same_numbers(fsdp2, GPT, tokens)


@FACTS
def fsdp2_with_offload() -> None:
    same_numbers(functools.partial(fsdp2, offload_policy=CPUOffloadPolicy()))


@FACTS
def ours_by_default() -> None:
    same_numbers(ours)


def launched(machine: Machine, kind: str) -> list[Operation]:
    return [operation for operation in machine.operations or () if operation.operator == kind]


@FACTS
def ours_overlaps_where_the_hardware_does() -> None:
    machine = same_numbers(functools.partial(ours, passes=default_pipeline(hardware="h100")))
    assert overlapped(machine) > 20e-6
    gathers, reductions = launched(machine, "all_gather"), launched(machine, "reduce_scatter")
    assert {operation.priority for operation in [*gathers, *reductions]} == {-1}, "compute does not hold them up"
    assert len({op.stream for op in gathers}) == len({op.stream for op in reductions}) == 1
    assert gathers[0].stream != reductions[0].stream


@FACTS
def messages_are_launched_together() -> None:
    """A message for nearly every parameter, and no more launches than buckets."""
    passes = default_pipeline(hardware=cheap_messages())
    machine = same_numbers(functools.partial(ours, passes=passes, reshard_after_forward=True), steps=1)
    assert len(launched(machine, "all_gather")) == 10 and len(launched(machine, "reduce_scatter")) == 5


def cheap_messages() -> Hardware:
    """Hardware on which unpacking costs more than a message."""
    base = {**vars(find_hardware("h100")), "memory_bandwidth": 1e6, "name": "slow copies"}
    return Hardware(**base)


@FACTS
def registered_memory_is_gathered_into_and_not_copied() -> None:
    def shard(model: nn.Module) -> nn.Module:
        model = ours(model, passes=default_pipeline(hardware=cheap_messages()))
        model.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
        return model

    VirtualGroup.landed.clear()
    machine = same_numbers(shard)
    landed = {kind: {registered for other, registered in VirtualGroup.landed if other == kind} for kind in KINDS}
    assert landed == {kind: {True} for kind in KINDS}
    assert not launched(machine, "aten.split_with_sizes_copy")


class TheirGather(DefaultAllGather):
    """Notes on what stream it is called, and whether it is to return at once."""

    called: ClassVar[list[tuple[int, bool]]] = []

    def __call__(self, *args: Any, async_op: bool = False, **given: Any) -> Any:
        self.called.append((torch.accelerator.current_stream().stream_id, async_op))
        return super().__call__(*args, async_op=async_op, **given)


@FACTS
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


@FACTS
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

    nothing_told = mutated(vars(streams.UnderWay)["__del__"], ("tensor.record_stream(self.stream)", "pass"))
    with Machine("h100") as machine, strict(), virtual_group(RANKS, LINK) as group:
        assert not races(group)
        with nothing_told:
            assert {race.first.operator for race in races(group)} == {"reduce_scatter"}


@FACTS
def ours_in_bfloat16() -> None:
    same_numbers(functools.partial(ours, mp_policy=BF16))


@FACTS
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
    same_numbers(shard, uneven, lambda generator: torch.randn(4, 84, generator=generator))


# Mutants. Each leaves out, or moves, what keeps one operation behind another.

STARTS, WAITS = vars(streams.UnderWay)["__init__"], streams.UnderWay.wait
COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "a gather is not waited for": (
        collectives.start_all_gather,
        ("under_way.wait()", "pass"),
    ),
    "a reduction is not waited for": (
        getattr(collectives, "_reduction"),  # noqa: B009
        ("under_way.wait()", "pass"),
    ),
    "nothing keeps the reduced gradients": (
        STARTS,
        ("self.tensors, self.device = tensors,", "self.tensors, self.device = (),"),
    ),
    "collectives start at once": (
        STARTS,
        ("self.stream.wait_stream(torch.accelerator.current_stream(self.device))", "pass"),
    ),
    "the event comes before the collective": (
        STARTS,
        ("    with self.stream:", "    self.event = self.stream.record_event()\n    with self.stream:"),
        ("start(False)\n    self.event = self.stream.record_event()", "start(False)"),
    ),
    "a wait for reductions waits for gathers": (
        WAITS,
        ("wait_event(self.event)", 'wait_event(stream_of(self.device, "gather").record_event())'),
    ),
    "a wait for gathers waits for reductions": (
        WAITS,
        ("wait_event(self.event)", 'wait_event(stream_of(self.device, "reduce").record_event())'),
    ),
    "all buckets have one slot": (
        slots.Slots.take,
        ("buffer = self._storage[slot]", "slot = min(self._storage); buffer = self._storage[slot]"),
    ),
    "landing buffers lie in slots of gathered ones": (
        slots.Slots.take_landing,
        ("self.take(numel, dtype, device, slot)", "self.take(numel, dtype, device, min(self._storage, default=slot))"),
    ),
}
COPIES: dict[str, tuple[Any, ...]] = {
    "a copy starts at once": (
        getattr(copies, "_start"),  # noqa: B009
        ("stream.wait_stream(torch.accelerator.current_stream(device))", "pass"),
    ),
    "a fetch is not waited for": (
        getattr(copies, "_start"),  # noqa: B009
        ("lambda: torch.accelerator.current_stream(device).wait_event(event), event", "lambda: None, event"),
    ),
    "the allocator does not know of a copy": (
        getattr(copies, "_start"),  # noqa: B009
        ("source.record_stream(stream)", "pass"),
    ),
    "the event comes before the copy": (
        getattr(copies, "_start"),  # noqa: B009
        ("    with stream:", "    event = stream.record_event()\n    with stream:"),
        (
            "            part.copy_(source, non_blocking=True)\n    event = stream.record_event()",
            "            part.copy_(source, non_blocking=True)",
        ),
    ),
    "the host does not wait for gradients": (
        getattr(copies, "_start"),  # noqa: B009
        ("return Copy(whole, event.synchronize, event)", "return Copy(whole, lambda: None, event)"),
    ),
}


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Process groups keep nothing alive."""
    VirtualGroup.keeps_tensors = False
    try:
        yield
    finally:
        VirtualGroup.keeps_tensors = True


def survivors(mutants: dict[str, tuple[Any, ...]], **options: Any) -> list[str]:
    """Mutants that one step does not show: it has no race, and no wrong loss."""
    machine = Machine("h100")

    def run(device: str) -> list[str]:
        training = Training(functools.partial(ours, **options), mlp, rows, device)
        for _ in range(3):
            training.step()
        torch.accelerator.synchronize()
        assert not machine.take_races(), "nothing is mutated yet"
        left = []
        for name, (function, *replaced) in mutants.items():
            error: BaseException | None = None
            with mutated(function, *replaced):
                try:
                    wrong = any(training.step().isnan() for _ in range(2))
                except (RuntimeError, ValueError, KeyError, AssertionError) as raised:
                    error, wrong = raised, True
            torch.accelerator.synchronize()
            races = machine.take_races()
            print(f"{name}: {'wrong numbers, ' * wrong}{error or ''}", *races[:1])
            if not races and not wrong:
                left.append(name)
        return left

    with strict(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(on_virtual(machine, run))


@FACTS
def mutants_of_collectives_are_found() -> None:
    assert survivors(COLLECTIVES, passes=default_pipeline(hardware="h100")) == []


@FACTS
def mutants_of_copies_are_found() -> None:
    assert survivors(COPIES, passes=default_pipeline(hardware="h100"), offload_policy=CPUOffloadPolicy()) == []


@pytest.fixture(scope="module")
def process() -> Failures:
    return FACTS.check_on(1, backend=None, env={"GRAPH_FSDP_FRESH": "1"})


@pytest.mark.parametrize("name", FACTS.names)
def test_on_the_virtual_device(process: Failures, name: str) -> None:
    check(process, name)
