"""FSDP2 and ours run on the virtual device as on the CPU, with no race; runtimes of ours that are wrong are found."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import Facts, Failures, check
from models import GPT, MLP, VOCABULARY
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from both_devices import Training, fsdp2, on_cpu, on_virtual, ours
from mutants import mutated
from virtual import library
from virtual.group import VirtualGroup
from virtual.machine import Machine

from graph_fsdp.parameters.host_memory import pinned_nbytes
from graph_fsdp.passes import default_pipeline
from graph_fsdp.report.report import engine_of
from graph_fsdp.runtime import slots
from graph_fsdp.runtime.comm import collectives, copies

pytestmark = pytest.mark.skipif(library.COMPILER is None, reason="needs a C++ compiler")
FACTS = Facts(__name__)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
mlp = functools.partial(MLP, depth=4)


def rows(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 16, generator=generator)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=generator)


def same_numbers(shard: Any, make: Any = mlp, batch: Any = rows) -> Machine:
    """Trains on the virtual device, which raises where it finds a race, and on the CPU."""
    machine = Machine("h100", traced=True)

    def run(device: str) -> list[Tensor]:
        return Training(shard, make, batch, device).values(steps=3)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = on_virtual(machine, run), on_cpu(run)
    assert all(torch.equal(a, b) and not a.isnan().any() for a, b in zip(found, expected, strict=True))
    return machine


def overlapped(machine: Machine) -> float:
    """Seconds in which kernels of the default stream run beside collectives."""
    kinds = ("all_gather", "reduce_scatter")
    links = [op for op in machine.operations or () if op.operator in kinds]
    kernels = [op for op in machine.operations or () if op.stream == 0 and op.operator not in kinds]
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


@FACTS
def ours_overlaps_where_the_hardware_does() -> None:
    machine = same_numbers(functools.partial(ours, passes=default_pipeline(hardware="h100")))
    assert overlapped(machine) > 20e-6


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

COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "a gather is not waited for": (
        collectives.start_all_gather,
        ("_wait_for(works, result.device)", "pass"),
    ),
    "a reduction is not waited for": (
        getattr(collectives, "_reduction"),  # noqa: B009
        ("_wait_for(works, out.device)", "pass"),
    ),
    "nothing keeps the reduced gradients": (
        getattr(collectives, "_reduction"),  # noqa: B009
        ("def finish(keep_alive: Any = keep_alive)", "def finish(keep_alive: Any = None)"),
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
