"""Compare plans: meshes, schedules, when parameters are resharded, what is gathered at once, what is recomputed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from torch import nn

from graph_fsdp.errors import BudgetError, MeshError, UnsupportedError
from graph_fsdp.passes import Hardware, default_pipeline, find_hardware
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.passes.transforms.arrange import BucketSize
from graph_fsdp.planning.dimensions import Dimensions, Parallelize
from graph_fsdp.planning.prediction import Plan, plan
from graph_fsdp.planning.stages import PipelinePlan, Stage, plan_pipeline


@dataclass(frozen=True)
class Choice:
    """Names the options of a plan: ``mesh_shape`` as in :func:`plan`, ``reshard`` is ``reshard_after_forward``,
    ``bucket`` that of ``default_pipeline``, ``checkpointing`` is ``activation_checkpointing``. ``schedule``: of a
    pipeline, its name and the stages of a rank."""

    mesh_shape: tuple[int, ...] | Dimensions
    reshard: bool | None = None
    bucket: BucketSize = "unit"
    checkpointing: str | None = None
    schedule: tuple[str, int] | None = None

    def __str__(self) -> str:
        if self.schedule is not None:
            name, stages = self.schedule
            of = f", {name} of {stages} stages" if stages > 1 else f", {name}"
            return f"mesh {self.mesh_shape}{of}, checkpointing {self.checkpointing or 'none'}"
        mesh = "x".join(map(str, self.mesh_shape)) if isinstance(self.mesh_shape, tuple) else self.mesh_shape
        reshard = {None: "all but the last", True: "all", False: "none"}[self.reshard]
        return f"mesh {mesh}, reshard {reshard}, bucket {self.bucket}, checkpointing {self.checkpointing or 'none'}"


# Gets the choices and their number, and yields them one by one, as a progress bar does.
Progress: TypeAlias = Callable[[Iterable[Choice], int], Iterable[Choice]]


@dataclass(frozen=True)
class Candidate:
    """Says what a step takes with a choice, per rank, in seconds and bytes; ``tokens_per_second`` as in a plan."""

    choice: Choice
    step_seconds: float
    exposed_seconds: float
    peak_nbytes: int
    mfu: float
    tokens_per_second: float | None


@dataclass(frozen=True)
class Search:
    """Holds all candidates, the ``refused`` choices with the reasons, and ``memory``, the bytes of a rank."""

    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[Choice, str], ...]
    memory: int

    @property
    def front(self) -> list[Candidate]:
        """Return the Pareto front of time against memory, fastest first: none is faster and holds less."""
        found: list[Candidate] = []
        for candidate in sorted(self.candidates, key=lambda c: (c.step_seconds, c.peak_nbytes)):
            if not found or candidate.peak_nbytes < found[-1].peak_nbytes:
                found.append(candidate)
        return found

    @property
    def best(self) -> Candidate | None:
        """Return the fastest candidate that fits; None where none does."""
        return next((candidate for candidate in self.front if candidate.peak_nbytes <= self.memory), None)

    def summary(self) -> dict[str, Any]:
        """Return the search as a dict that ``json.dumps`` takes."""
        best = self.best
        return {
            "memory": self.memory,
            "best": None if best is None else asdict(best),
            "front": [asdict(candidate) for candidate in self.front],
            "candidates": [asdict(candidate) for candidate in self.candidates],
            "refused": [{"choice": asdict(choice), "reason": reason} for choice, reason in self.refused],
        }

    def __str__(self) -> str:
        best = self.best
        lines = [f"{len(self.candidates)} plans; those that no other beats in time and memory, fastest first:"]
        for candidate in self.front:
            mark = "*" if candidate is best else " "
            lines.append(
                f"{mark} step {candidate.step_seconds * 1e3:10,.1f} ms  peak {candidate.peak_nbytes / 1e9:8.2f} GB  "
                f"MFU {candidate.mfu:5.1%}  {candidate.choice}"
            )
        room = f"{self.memory / 1e9:.1f} GB"
        lines.append(f"* the fastest in {room}" if best is not None else f"none fits in {room}")
        return "\n".join([*lines, *(f"refused: {choice}: {reason}" for choice, reason in self.refused)])

    __repr__ = __str__


def meshes(ranks: int, island: int) -> list[tuple[int, ...]]:
    """Propose ways to lay ``ranks`` out: all shard, or the ranks of 1, 8, 64… islands do and the rest replicate."""
    found: list[tuple[int, ...]] = [(ranks,)]
    shards = island
    while shards < ranks:
        if ranks % shards == 0:
            found.append((ranks // shards, shards))
        shards *= 8
    return found


def search(
    model_fn: Callable[[], nn.Module],
    example_inputs: tuple[Any, ...] | Mapping[str, Any],
    *,
    mesh_shapes: Sequence[Mapping[str, int] | Sequence[int] | Dimensions],
    hardware: str | Hardware,
    memory: int | None = None,
    reshards: Sequence[bool | None] = (None, True, False),
    buckets: Sequence[BucketSize] = ("unit", "auto"),
    checkpointings: Sequence[str | None] = (None, "selective", "unit"),
    progress: Progress | None = None,
    **plan_options: Any,
) -> Search:
    """Plan every combination of the choices.

    Args:
        model_fn, example_inputs, hardware: of :func:`plan`.
        mesh_shapes: meshes to compare, of as many ranks each; :func:`meshes` proposes some.
        memory: bytes that a rank has; None is what the hardware has.
        reshards, buckets, checkpointings: options to compare; see :class:`Choice`.
        progress: gets the choices and their number, and yields them one by one, as a progress bar does.
        plan_options: further options of :func:`plan`.

    Raises:
        ValueError: nothing is to be compared, or an option of the plans is what is compared.
        TypeError: what is compared is no list.
        All that :func:`plan` raises, but for choices that cannot be, which are in ``refused``.
    """
    described = find_hardware(hardware)
    for name in ("passes", "reshard_after_forward", "activation_checkpointing", "mesh_shape"):
        if name in plan_options:
            raise ValueError(
                f"{name}: is what search() chooses; give it in mesh_shapes, reshards, buckets, checkpointings"
            )
    compared = {"mesh_shapes": mesh_shapes, "reshards": reshards, "buckets": buckets, "checkpointings": checkpointings}
    for name, values in compared.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise TypeError(f"{name} must be a list of what is compared, got {values!r}")
    shapes = [tuple(m) if isinstance(m, Sequence) else Dimensions.of(m) for m in mesh_shapes]
    axes: tuple[Sequence[Any], ...] = (shapes, reshards, buckets, checkpointings)
    choices = [Choice(*values) for values in itertools.product(*axes)]
    if not choices:
        raise ValueError("nothing to search: mesh_shapes, reshards, buckets and checkpointings need a value each")

    def planned(choice: Choice) -> Plan:
        return plan(
            model_fn,
            example_inputs,
            mesh_shape=choice.mesh_shape,
            hardware=described,
            reshard_after_forward=choice.reshard,
            activation_checkpointing=choice.checkpointing,
            passes=default_pipeline(bucket=choice.bucket, hardware=described),
            **plan_options,
        )

    refusals = (BudgetError, MeshError, UnsupportedError)  # of a choice; any other error is the call's
    return _compared(choices, planned, refusals, described, memory, progress)


def _compared(
    choices: Sequence[Choice],
    planned: Callable[[Choice], Plan | PipelinePlan],
    refusals: tuple[type[Exception], ...],
    hardware: Hardware,
    memory: int | None,
    progress: Progress | None,
) -> Search:
    if memory is not None and not is_count(memory):
        raise ValueError(f"memory must be a number of bytes above 0, got {memory!r}")
    candidates, refused = [], []
    for choice in progress(choices, len(choices)) if progress is not None else choices:
        try:
            made = planned(choice)
        except refusals as error:
            refused.append((choice, str(error)))
            continue
        figures = {field.name: getattr(made, field.name) for field in fields(Candidate)[1:]}
        candidates.append(Candidate(choice, **figures))
    return Search(tuple(candidates), tuple(refused), hardware.memory if memory is None else memory)


def neighbours(dimensions: Dimensions, island: int) -> list[Dimensions]:
    """Propose meshes of as many ranks, whose ``pp`` and ``tp`` are as large, half or twice as large."""
    found = [dimensions]
    sizes = ([size, 2 * size, *([size // 2] if size % 2 == 0 else [])] for size in (dimensions.pp, dimensions.tp))
    for pp, tp in itertools.product(*sizes):
        rest, remainder = divmod(dimensions.pp * dimensions.tp * dimensions.dp_shard, pp * tp)
        if rest and not remainder and tp <= island and rest * dimensions.cp % dimensions.ep == 0:
            found.append(replace(dimensions, pp=pp, tp=tp, dp_shard=rest))
    return list(dict.fromkeys(found))


def search_pipelines(
    divided: Callable[[Dimensions], tuple[Callable[[int, int], Stage], Parallelize]],
    *,
    mesh_shapes: Sequence[Mapping[str, int] | Dimensions],
    hardware: str | Hardware,
    microbatches: int,
    memory: int | None = None,
    schedules: Sequence[tuple[str, int]] = (("1F1B", 1), ("Interleaved1F1B", 2)),
    checkpointings: Sequence[str | None] = (None, "unit"),
    progress: Progress | None = None,
    **plan_options: Any,
) -> Search:
    """Plan every combination of meshes, schedules and checkpointing for a batch of one size.

    Args:
        divided: gives the stages, and what divides them, on a mesh.
        mesh_shapes: meshes to compare, of as many ranks each; :func:`neighbours` proposes some.
        microbatches: of a step on all ranks of data parallelism together, each with rows of its own.
        schedules: names, and stages of a rank.
        hardware, memory, checkpointings, progress, plan_options: of :func:`search` and :func:`plan_pipeline`.

    Raises:
        All that :func:`plan_pipeline` raises, but for choices that cannot be, which are in ``refused``.
    """
    described = find_hardware(hardware)
    every = itertools.product(map(Dimensions.of, mesh_shapes), checkpointings, schedules)
    choices = [Choice(mesh, checkpointing=how, schedule=schedule) for mesh, how, schedule in every]

    def planned(choice: Choice) -> PipelinePlan:
        assert isinstance(choice.mesh_shape, Dimensions) and choice.schedule is not None
        replicas = choice.mesh_shape.dp_replicate * choice.mesh_shape.dp_shard
        if microbatches % replicas:
            raise MeshError(
                f"microbatches: {microbatches} do not divide by the {replicas} ranks that have rows apart; give a "
                "multiple"
            )
        stage, parallelize = divided(choice.mesh_shape)
        return plan_pipeline(
            stage,
            mesh_shape=choice.mesh_shape,
            hardware=described,
            microbatches=microbatches // replicas,
            schedule=choice.schedule[0],
            stages_per_rank=choice.schedule[1],
            parallelize=parallelize,
            activation_checkpointing=choice.checkpointing,
            **plan_options,
        )

    refusals = (BudgetError, MeshError, UnsupportedError, ValueError)
    return _compared(choices, planned, refusals, described, memory, progress)
