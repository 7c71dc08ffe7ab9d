"""What a rank of ``soak_with_faults.py`` does: it trains, meets its own faults, and writes down what happens."""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import logging
import math
import os
import random
import resource
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import workload_of
from soak import size_of_process
from torch.distributed.device_mesh import init_device_mesh
from workloads import loss_of

import graph_fsdp
from graph_fsdp import checkpoint

KILLED, STOPPED, FULL, NAN, SLOW = FAULTS = ("killed", "stopped", "full disk", "NaN", "slow")
FROM_OUTSIDE = (KILLED, STOPPED)
TIMEOUT = 40.0  # seconds; of the process group's collectives
LATE = 25.0  # seconds; longer than until a rank that waits says so, shorter than the timeout
NO_LOSS = struct.pack("<d", -1.0)


@dataclass(frozen=True)
class Fault:
    """``kind`` of ``FAULTS`` strikes ``rank`` in ``step``."""

    kind: str
    step: int
    rank: int


def faults_of(options: argparse.Namespace) -> list[Fault]:
    """The faults of a run: the same in each process."""
    found = []
    for number, step in enumerate(range(options.every, options.steps, options.every)):
        kind = options.kinds[number % len(options.kinds)]
        # Not right after a checkpoint, where little would be lost.
        step += 0 if kind == FULL else random.Random(number).randrange(1, options.save_every)
        found.append(Fault(kind, step, number // len(options.kinds) % options.ranks))
    return [fault for fault in found if fault.step < options.steps]


class Notes:
    """What a rank writes down for whoever has started it: losses by step, what happened, how large it is."""

    def __init__(self, folder: Path, rank: int, steps: int) -> None:
        self.rank, self._folder = rank, folder
        path = folder / f"losses{rank}"
        if not path.exists():
            path.write_bytes(NO_LOSS * steps)
        self._losses = open(path, "r+b", buffering=0)  # noqa: SIM115 (until the process ends)
        self._progress = open(folder / f"progress{rank}", "w+b", buffering=0)  # noqa: SIM115

    def loss(self, step: int, value: float) -> None:
        """Write a step's loss, which must be what it was if the step has been run before."""
        where, new = 8 * step, struct.pack("<d", value)
        old = os.pread(self._losses.fileno(), 8, where)
        if old != NO_LOSS:
            self.event("again", step)
            if old != new:
                self.event("another loss", step, f"{struct.unpack('<d', old)[0]!r}, then {value!r}")
        os.pwrite(self._losses.fileno(), new, where)

    def progress(self, step: int) -> None:
        os.pwrite(self._progress.fileno(), struct.pack("<q", step), 0)

    def event(self, what: str, step: int, text: str = "") -> None:
        self._append("events", {"what": what, "step": step, "rank": self.rank, "text": text, "time": time.time()})

    def sample(self, step: int, since_start: int) -> None:
        life = int(os.environ["GRAPH_FSDP_SOAK_LIFE"])
        self._append("samples", asdict(Sample(step, since_start, life, self.rank, *size_of_process())))

    def _append(self, name: str, value: dict[str, Any]) -> None:
        with open(self._folder / f"{name}{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(value) + "\n")


@dataclass(frozen=True)
class Sample:
    """``life``: how often ranks had been started before."""

    step: int
    since_start: int
    life: int
    rank: int
    resident: int
    files: int
    threads: int


class _Warnings(logging.Handler):
    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.event("warning", -1, record.getMessage())


def live(options: argparse.Namespace, folder: Path) -> None:
    """Train from the last checkpoint to the last step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT))
    rank = dist.get_rank()
    notes = Notes(folder, rank, options.steps)
    logging.getLogger("graph_fsdp").addHandler(_Warnings(notes))
    inside = {f.step: f for f in faults_of(options) if f.kind == NAN or (options.faults and f.kind in (FULL, SLOW))}
    try:
        _train(options, folder / "checkpoints", notes, inside)
    except Exception as error:
        notes.event("error", -1, f"{type(error).__name__}: {error}")
        raise
    dist.destroy_process_group()


def _train(options: argparse.Namespace, folder: Path, notes: Notes, inside: dict[int, Fault]) -> None:
    workload, device = workload_of(options), torch.device("cpu")
    model = graph_fsdp.compile(workload.make(device), init_device_mesh("cpu", (options.ranks,)), backend="eager")
    optimizer = graph_fsdp.distribute_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    last = checkpoint.latest(folder)
    first = 0 if last is None else checkpoint.load(last, model, optimizer)["step"]
    notes.event("start", first)
    pending: checkpoint.PendingSave | None = None
    for step in range(first, options.steps):
        notes.progress(step)
        fault = inside.get(step)
        kind, mine = (fault.kind, fault.rank == notes.rank) if fault is not None else ("", False)
        if kind == SLOW and mine:
            time.sleep(LATE)
        loss = loss_of(model(**workload.tokens(step, notes.rank, device)))
        if kind == NAN and mine:
            loss = loss * math.nan
        loss.backward()
        if model.clip_grad_norm_(1.0).isfinite():
            optimizer.step()
        else:
            notes.event("skipped", step)
        optimizer.zero_grad()
        notes.loss(step, loss.item())
        done = step + 1
        if kind == FULL or done % options.save_every == 0:
            if pending is not None:
                pending.result()
            save = functools.partial(
                checkpoint.save, folder / f"step_{done}", model, optimizer, extra={"step": done}, keep=2
            )
            if kind != FULL:
                pending = save(asynchronous=True)
            else:
                _not_saved(save, mine, step, notes)
        if (done - first) % options.sample_every == 0:
            notes.sample(done, done - first)
    checkpoint.save(folder / last_checkpoint(options), model, optimizer, extra={"step": options.steps}, keep=1)


def _not_saved(save: Callable[[], object], mine: bool, step: int, notes: Notes) -> None:
    """Save, while no file of this rank may be larger than 4 KiB if the fault is ``mine``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        save()
    except checkpoint.CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        notes.event("not saved", step, str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def last_checkpoint(options: argparse.Namespace) -> str:
    return f"step_{options.steps + 1}"


def events_of(folder: Path, ranks: int, name: str = "events") -> list[dict[str, Any]]:
    """What ranks wrote down, in order of rank."""
    paths = [folder / f"{name}{rank}.jsonl" for rank in range(ranks)]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
