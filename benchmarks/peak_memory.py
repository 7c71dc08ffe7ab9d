"""The most bytes that a training step holds on a rank: shards, optimizer state, gradients, activations, gathered
parameters, all that the device's allocator hands out.

On accelerators it is ``max_memory_allocated`` over a step, less what was allocated before the model was made. CPU
allocators keep no such count, so there torch's profiler records every allocation from before the model is made to
after it is dropped, and the records are added up. The two sides of a comparison are counted alike.

[Note: frees that are not seen]
gloo's threads drop their references to a collective's tensors a moment after the collective ends. Where such a thread
is the last to drop a tensor, the profiler of the training thread does not see it. The trainer is dropped at the end, so
an allocation whose free was not seen by then is either one of these, or a tensor that something else still holds. Only
those that are found alive count. It happens by chance, to FSDP2's reduce-scatter inputs for the most part; the peak is
the most of several steps, so that one step without it is enough.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from harness import synchronize
from torch.profiler import ProfilerActivity, profile, record_function

from graph_fsdp.compat import FakeTensor

WARMUP, STEPS = 2, 4
_SPAN = "measured step "


class _Trainer(Protocol):
    def step(self) -> None: ...

    def losses(self) -> list[float]: ...


@dataclass(frozen=True)
class Peak:
    """Bytes: the most during a step, and those held between steps (shards, optimizer state, buffers of DDP)."""

    peak: int
    between_steps: int
    losses: list[float]


def measure(make: Callable[[], _Trainer], device: str) -> Peak:
    """Make a trainer, run ``WARMUP`` and then ``STEPS`` steps, drop it. It must be all that is made meanwhile."""
    gc.collect()
    return _on_cpu(make) if device == "cpu" else _on_accelerator(make, device)


def _on_accelerator(make: Callable[[], _Trainer], device: str) -> Peak:
    memory = torch.accelerator.memory
    synchronize(device)
    before = memory.memory_allocated()
    trainer = make()
    for _ in range(WARMUP):
        trainer.step()
    synchronize(device)
    gc.collect()
    held = memory.memory_allocated() - before
    memory.reset_peak_memory_stats()
    for _ in range(STEPS):
        trainer.step()
    synchronize(device)
    peak = memory.max_memory_allocated() - before
    return Peak(peak, held, trainer.losses())


def _on_cpu(make: Callable[[], _Trainer]) -> Peak:
    with _trace() as found:
        trainer = make()
        for _ in range(WARMUP):
            trainer.step()
        for step in range(STEPS):
            gc.collect()
            with record_function(f"{_SPAN}{step}"):
                trainer.step()
        losses = trainer.losses()
        del trainer
        torch._dynamo.reset()
        gc.collect()
        alive = _addresses_in_use()
    spans = [e for e in found if e.get("ph") == "X" and e["name"].startswith(_SPAN)]
    assert len(spans) == STEPS
    changes = allocation_changes([e for e in found if e["name"] == "[memory]"], alive)
    peak = held = 0
    for span in spans:
        begin, end = span["ts"], span["ts"] + span["dur"]
        total = sum(size for time, size in changes if time < begin)
        held = max(held, total)
        peak = max(peak, total)
        for time, size in changes:
            if begin <= time <= end:
                total += size
                peak = max(peak, total)
    return Peak(peak, held, losses)


@contextlib.contextmanager
def _trace() -> Iterator[list[dict[str, Any]]]:
    """The profiler's events, in the list when the block has ended."""
    events: list[dict[str, Any]] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield events
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events.extend(json.loads(path.read_text())["traceEvents"])


def allocation_changes(records: list[dict[str, Any]], alive: set[int]) -> list[tuple[float, int]]:
    """(time, bytes more or less) of all allocations that are alive or whose free was seen (see the note above)."""
    allocated: dict[int, tuple[float, int]] = {}
    changes: list[tuple[float, int]] = []
    for record in sorted(records, key=lambda r: r["ts"]):
        time, size, address = record["ts"], record["args"]["Bytes"], record["args"]["Addr"]
        if size > 0:
            allocated[address] = time, size
        elif address in allocated:
            changes += [allocated.pop(address), (time, size)]
    return sorted([*changes, *(change for address, change in allocated.items() if address in alive)])


def _addresses_in_use() -> set[int]:
    tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor) and not issubclass(type(o), FakeTensor)]
    return {address for tensor in tensors if (address := _address(tensor)) is not None}


def _address(tensor: torch.Tensor) -> int | None:
    """None for a sparse tensor or one of a transformation, which have no storage: torch offers no question, but raises
    one of two errors."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
