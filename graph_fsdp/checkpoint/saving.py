"""Save a training, at once or in the background."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from graph_fsdp.checkpoint import folder
from graph_fsdp.checkpoint.claims import claim, is_of_others
from graph_fsdp.checkpoint.extra import check_extra
from graph_fsdp.checkpoint.files import Writer, access_of
from graph_fsdp.checkpoint.group import NOT_DISTRIBUTED, Ranks
from graph_fsdp.checkpoint.hosts import give_sequence, survey
from graph_fsdp.checkpoint.in_memory import MemoryWriter, prepare
from graph_fsdp.checkpoint.state import optimizers_of, training_state
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.passes.ir.settings import check_flags, check_path, is_count


class PendingSave:
    """Holds a save that was begun. It is done already unless it is ``asynchronous``."""

    def __init__(self, path: Path, future: concurrent.futures.Future[None]) -> None:
        self.path, self._future = path, future
        self._told = False  # of its error

    def __repr__(self) -> str:
        if not self._future.done():
            return f"<PendingSave to {self.path}: under way>"
        error = self._future.exception()
        return f"<PendingSave to {self.path}: {'done' if error is None else f'failed, {error}'}>"

    def done(self) -> bool:
        """Say whether the save has ended on this rank, in whatever way."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for the end of the save, and return the folder of the checkpoint, which is complete then.

        Raises:
            CheckpointError: it failed, on all ranks alike. What was there before is as it was.
            TimeoutError: it takes longer than ``timeout`` seconds, and goes on.
        """
        try:
            self._future.result(timeout)
        except concurrent.futures.TimeoutError as error:
            raise TimeoutError(f"{self.path} is still being saved after {timeout} s") from error
        except CheckpointError:
            self._told = True
            raise
        return self.path


# To memory (True) or to disk → the last save that was begun.
_last: dict[bool, PendingSave] = {}


def save(
    path: AnyPath,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep: int | None = None,
    overwrite: bool = False,
    memory: bool = False,
) -> PendingSave:
    """Save a training as a checkpoint of ``torch.distributed.checkpoint``. All ranks of the model call it.

    It is written to a temporary folder beside ``path``, which one rank renames when all have written: a program that is
    killed at any time leaves complete checkpoints only. All files are readable by the user alone. Models on ranks of
    their own, as the stages of a pipeline, save to a path each.

    Args:
        path: the folder of the checkpoint, on a file system that all hosts share.
        model: compiled by graph_fsdp, or any other, as one with ``fully_shard``. Keys are its own names.
        optimizer: one, or several.
        extra: what else is to be remembered, by name: the step, where the data has got to. Numbers, text, lists, dicts
            and tensors; of what has a ``state_dict()`` and a ``load_state_dict()``, as a scheduler, that state. The
            first rank's is saved, and all ranks' parts of DTensors.
        asynchronous: copy the values to the CPU's memory, and return while they are written. One save is under way at a
            time, to disk and to memory each: another such, or a load, first waits for it, and raises its error on all
            ranks if ``result()`` has not on one.
        keep: once this checkpoint is complete, remove all but so many of the newest, this one included, that graph_fsdp
            has written and whose names differ from this one's in their numbers only.
        overwrite: replace a checkpoint of this name, once the new one is complete.
        memory: write to the memory of hosts and not to ``path``: each rank's part to its own host's and to the next
            one's (Gemini, SOSP 2023). ``latest(folder, model)`` finds it, where no two hosts in turn were lost. The
            last two of a series (names that differ in their numbers only) stay, until a newer one of it is complete on
            disk. Hosts are told apart by their folder in memory: ``/dev/shm``, unless the environment variable
            ``GRAPH_FSDP_MEMORY`` names another.

    Raises:
        CheckpointError: on all ranks, when one could not write its part; or, which is known before anything is
            written, ``path`` is there already, other ranks' model saves to it, or a host has no room in memory. What
            was there is as before.
        TypeError, ValueError: an argument is wrong; before anything is written.
    """
    ranks = Ranks.of(model)
    with ranks.agreeing([]):  # an error of an earlier save may be known to one of them
        check_path("path", path)
        finish_pending(memory)
        final = Path(os.path.abspath(path))
    facts = [f"keep={keep}", f"overwrite={overwrite}", f"asynchronous={asynchronous}", f"memory={memory}"]
    seen = survey(ranks, final.parent, [str(final), *facts])
    temporary: Path | None = None
    try:
        given: list[str] = []
        with ranks.agreeing(given) as told:
            check_flags(asynchronous=asynchronous, overwrite=overwrite)
            _check(final, extra, keep, memory)
            optimizers = optimizers_of(optimizer)
            given.append(f"{len(optimizers)} optimizers")
            to_write = functools.partial(access_of(model).to_write, copy=asynchronous)
            tree = training_state(model, optimizers, extra or {}, ranks.index, to_write)
            if ranks.is_first:
                claim(final, ranks.ranks, alone_in_series=memory or keep is not None)
            if memory:
                told.append(prepare(final, seen, overwrite))
            elif ranks.is_first:
                temporary = folder.begin(final, overwrite, lambda other: is_of_others(other, ranks.ranks))
                told.append(str(temporary))
    except Exception:
        if temporary is not None:
            temporary.rmdir()
        raise
    if asynchronous or memory:  # other messages may pass between them while they write
        ranks = ranks.apart("checkpoints in memory" if memory else "checkpoints on disk")
    sequence = give_sequence(final.parent, seen)
    if memory:
        writer: Writer = MemoryWriter(told[0], final, ranks, sequence)
    else:
        writer = Writer(Path(told[0]), final, ranks, sequence, keep)
    return _begin(tree, writer, asynchronous)


def _begin(tree: dict[str, Any], writer: Writer, asynchronous: bool) -> PendingSave:
    if asynchronous:
        if writer.among.group is None:  # for good: what is ignored for a while only is so for all threads
            warnings.filterwarnings("ignore", NOT_DISTRIBUTED)
        executor = concurrent.futures.ThreadPoolExecutor(1, "graph_fsdp-save")
        pending = PendingSave(writer.final, executor.submit(_write, tree, writer))
        executor.shutdown(wait=False)
        _last[isinstance(writer, MemoryWriter)] = pending
        return pending
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", NOT_DISTRIBUTED)
        _write(tree, writer)
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    done.set_result(None)
    return PendingSave(writer.final, done)


def finish_pending(*memory: bool) -> None:
    """Wait for saves under way, to memory (True) or to disk (False), and raise the error of which nobody was told."""
    for place in memory or (False, True):
        pending = _last.pop(place, None)
        if pending is not None and not pending._told:
            pending.result()


def _check(path: Path, extra: Mapping[str, Any] | None, keep: int | None, memory: bool) -> None:
    if path.name.startswith("."):
        raise ValueError(f"path: {path.name!r} begins with a dot, as temporary folders do; choose another name")
    check_extra(extra)
    if not isinstance(memory, bool):
        raise TypeError(f"memory must be True, to write to the memory of hosts, or False, got {memory!r}")
    if keep is None:
        return
    if memory:
        raise ValueError(f"keep={keep}: memory=True keeps the last two of a series; leave keep out")
    if not is_count(keep):
        raise ValueError(f"keep must be a number of checkpoints, at least 1, or None for all, got {keep!r}")
    if folder.series(path.name) == path.name:
        raise ValueError(
            f"keep={keep}: {path.name!r} has no number, so that no other checkpoint can be of its series; name it as "
            "step_100"
        )


def _write(tree: dict[str, Any], writer: Writer) -> None:
    ranks = writer.among
    try:
        writer.begin()
        dcp.save(tree, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
        writer.complete()
    except (Exception, CheckpointException) as error:
        writer.abandon()
        if isinstance(error, CheckpointError):
            raise
        raise ranks.told(error) from error
