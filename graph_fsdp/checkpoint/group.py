"""The ranks that save and load together tell each other what is wrong.

They talk over a gloo group of their own, apart from the training's messages: a save may go on in the background.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graph_fsdp.errors import CheckpointError, UnsupportedError
from graph_fsdp.mesh import group_of
from graph_fsdp.runtime.ranks.agreement import is_shared
from graph_fsdp.runtime.ranks.failure import gone
from graph_fsdp.runtime.ranks.lockstep import finish

# How long a rank waits for another to come and to write its part, and then fails.
TIMEOUT_SECONDS = 1800.0
Value = TypeVar("Value")
NOT_DISTRIBUTED = "torch.distributed is disabled"  # torch.distributed.checkpoint warns of a process that is alone


@dataclass(frozen=True)
class Ranks:
    """Holds the global ranks that save and load together; ``group`` is None where this process is alone."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, model: nn.Module) -> Ranks:
        """Return the ranks that hold parts of the model's parameters, or all ranks if nothing is a DTensor. All of them
        call this, as the first call for some ranks makes their group.

        Raises:
            TypeError: it is no module.
            UnsupportedError: the model is one of XLA's replicas, whose parts nothing says the places of.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        engine = getattr(model, "_graph_fsdp", None)
        if engine is not None and engine.storage.is_of_replica:
            raise UnsupportedError(
                "graph_fsdp.checkpoint has no parts of models compiled with sharding='replicas'; save "
                "graph_fsdp.xla.full_state_dict(model), or each replica's state_dict() with "
                "graph_fsdp.xla.shard_metadata(model)"
            )
        if not dist.is_available() or not dist.is_initialized():
            return cls((0,), None)
        meshes = dict.fromkeys(p.device_mesh for p in model.parameters() if isinstance(p, DTensor))
        ranks = _joined(list(meshes)) or tuple(range(dist.get_world_size()))
        return cls(ranks, _group(ranks, "checkpoints") if is_shared(ranks) else None)

    @property
    def index(self) -> int:
        """Return this rank's place among them."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def apart(self, use: str) -> Ranks:
        """Return the same ranks with a group for a thread, which talk there while others talk here. All call it."""
        if self.group is None:
            return self
        return Ranks(self.ranks, _group(self.ranks, use))

    def gather(self, value: Value) -> list[Value]:
        """Return each rank's value, in the order of ranks. Raises CheckpointError where one does not answer."""
        everyone = [value for _ in self.ranks]
        if self.group is not None:
            try:
                dist.all_gather_object(everyone, value, group=self.group)
            except RuntimeError as error:
                raise no_answer(error, self.ranks) from error
        return everyone

    @contextlib.contextmanager
    def agreeing(self, facts: Sequence[str]) -> Iterator[list[str]]:
        """Tell the other ranks of whatever is raised within. All give the same ``facts``. What the first rank puts into
        the list is in that of all ranks afterwards.

        Raises:
            CheckpointError: another rank has a problem or other facts, or did not answer.
        """
        problem: Exception | None = None
        told: list[str] = []
        try:
            yield told
        except Exception as error:
            problem = error
        mine = (list(facts), None if problem is None else f"{type(problem).__name__}: {problem}", told)
        try:
            everyone = self.gather(mine)
        except CheckpointError as error:
            raise problem or error from error.__cause__
        if problem is not None:
            raise problem
        first = everyone[0]
        for rank, (_, message, _) in zip(self.ranks, everyone, strict=True):
            if message is not None:
                raise CheckpointError(f"rank {rank}: {message}")
        for rank, (theirs, _, _) in zip(self.ranks, everyone, strict=True):
            if theirs != first[0]:
                raise CheckpointError(
                    f"ranks must save and load the same: rank {rank} has {theirs} and rank {self.ranks[0]} {first[0]}"
                )
        told[:] = first[2]

    def told(self, error: BaseException) -> BaseException:
        """Return an error of torch.distributed.checkpoint as one of ours, which says on which ranks and why; where this
        rank was interrupted (Ctrl-C) or told to exit, as that."""
        if not isinstance(error, CheckpointException):
            return no_answer(error, self.ranks) if isinstance(error, RuntimeError) else CheckpointError(describe(error))
        own: BaseException | None = error.failures.get(self.index, (None,))[0]
        while own is not None:  # files that are closed raise in turn
            if not isinstance(own, Exception):
                return own
            own = own.__context__
        failures = {self.ranks[index]: failure[0] for index, failure in sorted(error.failures.items())}
        first, reason = next(iter(failures.items()))
        if self.group is None:
            return CheckpointError(describe(reason))
        others = "" if len(failures) == 1 else f" (and {len(failures) - 1} more ranks)"
        return CheckpointError(f"rank {first}{others}: {describe(reason)}")


ALONE = Ranks((0,), None)


def _joined(meshes: Sequence[DeviceMesh]) -> tuple[int, ...]:
    """Return the ranks that this one shares a mesh with, and those that they do, in ascending order.

    Where no mesh has all of them, a rank knows its own meshes only. Ranks then tell each other over the dimensions of
    the meshes, one after the other: these are of one mesh, so that its ranks are reached by a step along each.
    """
    on = [mesh.mesh.flatten().tolist() for mesh in meshes]
    held = sorted({rank for ranks in on for rank in ranks})
    if not held or max(map(len, on)) == len(held):
        return tuple(held)
    for mesh in meshes:
        known = torch.zeros(dist.get_world_size(), dtype=torch.uint8, device=mesh.device_type)
        known[held] = 1
        for group in mesh.get_all_groups():
            finish(dist.all_reduce(known, dist.ReduceOp.MAX, group, async_op=True), known.device)
        held = known.nonzero().flatten().tolist()
    return tuple(held)


def _group(ranks: tuple[int, ...], use: str) -> dist.ProcessGroup:
    return group_of(ranks, use, datetime.timedelta(seconds=TIMEOUT_SECONDS), "gloo")


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def no_answer(error: BaseException, ranks: Sequence[int]) -> CheckpointError:
    known = gone(ranks)
    which = f" ({known})" if known else ""
    return CheckpointError(f"a rank has failed or does not answer while ranks save or load together{which}: {error}")
