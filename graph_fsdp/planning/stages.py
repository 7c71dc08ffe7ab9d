"""Plan a step of a pipeline: each stage is a program, planned as any other, and the schedule says what runs when.

What ranks do in which order is read from the schedules of ``torch.distributed.pipelining``. Microbatches keep their
gradients, and a graph reduces them after a stage's last backward (``finalize_backward``); parameters are gathered once
a step and stay whole where they can be, as ``integrations/pipelining.py`` does. An action begins when its rank is free
and what it receives has arrived; sending takes a link's time, and no rank computes less for it. Of each stage lie in
memory, besides what its programs hold while they run, the saved activations of as many microbatches as are in flight.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import networkx
import torch
from torch import Tensor, nn

from graph_fsdp.compat import pytree
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes import Hardware
from graph_fsdp.passes.analysis.memory import shard_nbytes, whole_nbytes
from graph_fsdp.passes.analysis.simulate import Conditions, simulate
from graph_fsdp.passes.analysis.storages import storages
from graph_fsdp.passes.ir.settings import is_count
from graph_fsdp.planning.dimensions import Dimensions, Parallelize
from graph_fsdp.planning.prediction import Plan, plan

_COMPUTES = re.compile(r"(\d+)([FB])\d+")
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
# (stage, kind, microbatch). Kinds: "F" and "B" of a microbatch, "G" gathers and "R" reduces once a step.
Action = tuple[int, str, int]


@dataclass(frozen=True)
class Stage:
    """Says what ranks of a stage run: ``inputs`` are those of one rank and microbatch, and what the stage before sends
    requires gradients. Stages of equal ``key`` are planned once."""

    model_fn: Callable[[], nn.Module]
    inputs: tuple[Any, ...] | Mapping[str, Any]
    key: Hashable


@dataclass(frozen=True)
class StageFigures:
    """Holds what is predicted of one rank of a stage, in seconds and bytes.

    ``forward``, ``backward``: of a microbatch, ``compute`` of both without waiting. ``gather``: before the first
    microbatch; ``reduce`` and ``optimizer``: after the last. ``held``: category → bytes, throughout a step. ``saved``:
    of each microbatch between its forward and backward. ``working``: the most that programs hold besides. ``received``:
    what the stage before sends. ``flops``: of the model's matrix multiplications, for a microbatch.
    """

    forward: float
    backward: float
    compute: float
    gather: float
    reduce: float
    optimizer: float
    held: Mapping[str, int]
    saved: int
    working: int
    received: int
    flops: int

    @classmethod
    def of(cls, made: Plan) -> StageFigures:
        """Read the figures of a microbatch's plan (``finalization=True``)."""
        traced, spec, context = made.traced, made.spec, made.traced.context
        cost, conditions = context.cost, made.conditions
        assert cost is not None
        finalization = traced.finalization
        reduce = simulate(finalization[0], cost, conditions).seconds if finalization else 0.0
        gather, parameters = 0.0, spec.parameters.values()
        held = {"shards": shard_nbytes(parameters), "optimizer": made.memory.get("optimizer", 0)}
        if traced.whole:
            gather = sum(cost.all_gather_seconds(bucket.gathered_nbytes, bucket.mesh.group) for bucket in spec.buckets)
            held["gathered"] = whole_nbytes(context)
        trained = [p for p in parameters if p.trainable]
        # Whole, in the dtype that they are added up in; on one rank those of ``.grad``.
        kept = (p.shard_numel * p.world_size * (p.reduce_dtype if finalization else p.dtype).itemsize for p in trained)
        held["gradients"] = sum(kept)
        found = storages(traced.backward, context).found
        saved = sum(s.nbytes for s in found if s.category == "saved" and s.begin == 0)
        leaves = pytree.tree_leaves(made.inputs)
        received = sum(t.numel() for t in leaves if isinstance(t, Tensor) and t.requires_grad)
        dtype = next((p.param_dtype for p in parameters), torch.float32)
        return cls(
            made.graph_seconds["forward"],
            made.graph_seconds["backward"],
            made.compute_seconds,
            gather,
            reduce,
            made.optimizer_seconds,
            held,
            saved,
            max(0, _most(made, held) - saved),
            received * dtype.itemsize,
            made.model_flops,
        )


def _most(made: Plan, held: Mapping[str, int]) -> int:
    """Return the most bytes that a microbatch's graphs hold, without the categories of ``held``."""
    profiles = [profile for view in (made.forward, made.backward) if (profile := view.memory) is not None]
    rows = (zip(*(v for name, v in p.timeline.items() if name not in held), strict=True) for p in profiles)
    return max(sum(map(int, row)) for row in itertools.chain(*rows))


# What runs when


def pipeline_orders(schedule: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return what each rank of a pipeline runs, in order.

    Raises:
        ValueError: the schedule is not known, or refuses the number of microbatches or stages.
        UnsupportedError: the schedule divides a backward into that of inputs and that of weights.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    if schedule not in SCHEDULES:
        if schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            raise UnsupportedError(
                f"schedule: {schedule} divides each backward into that of inputs and that of weights, and a graph runs "
                f"both; take one of {', '.join(SCHEDULES)}"
            )
        raise ValueError(f"schedule: {schedule!r} is not known; known are {', '.join(SCHEDULES)}")
    for name, value in (("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if not is_count(value):
            raise ValueError(f"{name} must be a whole number, 1 or more, got {value!r}")
    several = schedule == "Interleaved1F1B"
    if several is (stages_per_rank == 1):
        wanted = "2 or more" if several else "1"
        raise ValueError(f"stages_per_rank: {schedule} takes {wanted} stages of a rank, got {stages_per_rank}")
    count = ranks * stages_per_rank
    place = {"num_stages": count, "group_size": ranks, "group_rank": 0, "has_backward": True}
    stages: Any = [
        SimpleNamespace(stage_index=i, is_first=i == 0, is_last=i == count - 1, **place) for i in range(0, count, ranks)
    ]
    try:
        made = get_schedule_class(schedule)(stages if several else stages[0], microbatches, loss_fn=lambda *_: None)
    except ValueError as error:
        raise ValueError(f"microbatches: {schedule} refuses {microbatches}: {' '.join(str(error).split())}") from error
    table: Any = made.pipeline_order
    orders = []
    for rank in range(ranks):
        # As torch prints them, such as "0F3": the kinds' values differ between versions.
        read = (_COMPUTES.fullmatch(str(action)) for action in table[rank])
        kinds = [(int(found[1]), found[2]) for found in read if found is not None]
        # A stage takes microbatches in their order. torch's table of 1F1B numbers the last stage's forwards from 1.
        numbers: dict[tuple[int, str], Iterator[int]] = defaultdict(itertools.count)
        orders.append(_with_collectives([(*kind, next(numbers[kind])) for kind in kinds]))
    return orders


def _with_collectives(actions: Sequence[Action]) -> list[Action]:
    """Add the gathers before a stage's first forward, and its reductions after its last backward."""
    first = {stage: action for action in reversed(actions) for stage in [action[0]]}
    last = {action[0]: action for action in actions}
    order: list[Action] = []
    for action in actions:
        stage = action[0]
        order += [(stage, "G", 0)] if action == first[stage] else []
        order += [action, (stage, "R", 0)] if action == last[stage] else [action]
    return order


def schedule_ends(
    orders: Sequence[Sequence[Action]], seconds: Mapping[tuple[int, str], float], sends: Mapping[int, float]
) -> dict[Action, float]:
    """Return when each action ends. ``seconds``: of a stage's kinds of actions; ``sends``: of what a stage exchanges
    with the one before it. Linear."""
    graph = networkx.DiGraph()
    for order in orders:
        graph.add_nodes_from(order)
        graph.add_edges_from(itertools.pairwise(order), seconds=0.0)
    for stage, kind, microbatch in list(graph):
        if kind in "FB" and stage in sends:
            before = (stage - 1, kind, microbatch), (stage, kind, microbatch)
            graph.add_edge(*(before if kind == "F" else before[::-1]), seconds=sends[stage])
    ends: dict[Action, float] = {}
    for action in networkx.topological_sort(graph):
        arrived = (ends[source] + lag for source, _, lag in graph.in_edges(action, data="seconds"))
        ends[action] = max(arrived, default=0.0) + seconds[action[:2]]
    return ends


# The plan


@dataclass(frozen=True, eq=False)
class PipelinePlan:
    """Predicts what a training step of a pipeline takes, in seconds and bytes. ``stages`` has the figures of each
    stage, ``plans`` the plan of its microbatch's program, a report like any other. ``tokens``: of a rank's microbatch.
    """

    dimensions: Dimensions
    hardware: Hardware
    schedule: str
    microbatches: int
    orders: Sequence[Sequence[Action]]
    stages: Sequence[StageFigures]
    plans: Sequence[Plan]
    tokens: int | None
    sends: Mapping[int, float]
    conditions: Conditions

    # Time

    def ends(self) -> dict[Action, float]:
        """Return when each action of a step ends."""
        kinds = {"F": "forward", "B": "backward", "G": "gather", "R": "reduce"}
        seconds = {(i, k): getattr(s, name) for i, s in enumerate(self.stages) for k, name in kinds.items()}
        return schedule_ends(self.orders, seconds, self.sends)

    @property
    def step_seconds(self) -> float:
        ends = self.ends()
        return max(ends[order[-1]] + sum(s.optimizer for s in self._of(order)) for order in self.orders)

    @property
    def bubble(self) -> float:
        """Return the part of the step in which ranks have nothing to run, a mean over ranks."""
        microbatches = self.microbatches
        busy = (microbatches * (s.forward + s.backward) + s.gather + s.reduce + s.optimizer for s in self.stages)
        return max(0.0, 1 - sum(busy) / (len(self.orders) * self.step_seconds))  # rounding can make it negative

    @property
    def exposed_seconds(self) -> float:
        """Return the seconds in which the rank that computes most computes nothing."""
        computed = (sum(self.microbatches * s.compute + s.optimizer for s in self._of(order)) for order in self.orders)
        return self.step_seconds - max(computed)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of all ranks over their number; None where no input looks like tokens."""
        if self.tokens is None:
            return None
        return self.microbatches * self.tokens / (self.dimensions.tp * self.dimensions.pp * self.step_seconds)

    @property
    def mfu(self) -> float:
        """Return the model FLOPs utilisation of all ranks, as ``Plan.mfu``."""
        peak = self.plans[0].peak_flops * len(self.orders) * self.step_seconds
        return sum(self.microbatches * s.flops for s in self.stages) / peak

    # Memory

    @property
    def in_flight(self) -> list[int]:
        """Return of each stage how many microbatches are between forward and backward at once."""
        return [max(counts[stage] for counts in self._flights(stage)) for stage in range(len(self.stages))]

    @property
    def memory(self) -> list[dict[str, int]]:
        """Return the bytes of each category on a rank of each place in the pipeline."""
        found = []
        for order in self.orders:
            held = Counter[str]()
            for stage in self._of(order):
                held.update(stage.held)
            flights = self._flights(order[0][0])
            held["saved"] = max(sum(n * self.stages[stage].saved for stage, n in counts.items()) for counts in flights)
            held["working"] = max(stage.working for stage in self._of(order))
            found.append({name: nbytes for name, nbytes in held.items() if nbytes})
        return found

    @property
    def peak_nbytes(self) -> int:
        return max(sum(held.values()) for held in self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_nbytes <= self.hardware.memory

    def _flights(self, stage: int) -> list[Counter[int]]:
        """Return the microbatches in flight, by stage, behind each action of the rank that has a stage."""
        counts, found = Counter[int](), []
        for at, kind, _ in next(order for order in self.orders if any(action[0] == stage for action in order)):
            counts[at] += (kind == "F") - (kind == "B")
            found.append(counts.copy())
        return found

    def _of(self, order: Sequence[Action]) -> list[StageFigures]:
        return [self.stages[stage] for stage in dict.fromkeys(action[0] for action in order)]

    # Text

    def summary(self) -> dict[str, Any]:
        """Return the plan's figures as a dict that ``json.dumps`` takes."""
        names = ("step_seconds", "bubble", "exposed_seconds", "tokens_per_second", "mfu", "peak_nbytes", "fits")
        return {
            "hardware": self.hardware.name,
            "mesh_shape": self.dimensions.sizes(),
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            **{name: getattr(self, name) for name in (*names, "in_flight", "memory")},
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "conditions": dataclasses.asdict(self.conditions),
        }

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:,.1f} tokens/s per rank, " if self.tokens_per_second is not None else ""
        room = "fits" if self.fits else "does not fit"
        met = f", with {self.conditions}" if str(self.conditions) else ""
        lines = [
            f"plan: {len(self.stages)} stages on a mesh of {self.dimensions} {self.hardware.name}, {self.schedule} "
            f"with {self.microbatches} microbatches{met}",
            f"  step {self.step_seconds * 1e3:,.1f} ms, of it bubble {self.bubble:.1%}",
            f"  {speed}{self.mfu:.1%} MFU",
            f"  peak {self.peak_nbytes / 1e9:.2f} GB, {room} in {self.hardware.memory / 1e9:.0f}",
            "  of a rank     forward  backward  once, ms  in flight     GB  held",
        ]
        flights = self.in_flight
        for place, (order, memory) in enumerate(zip(self.orders, self.memory, strict=True)):
            stages = self._of(order)
            several = [sum(getattr(s, name) for s in stages) for name in ("forward", "backward")]
            once = sum(s.gather + s.reduce + s.optimizer for s in stages)
            most = max(flights[action[0]] for action in order)
            held = ", ".join(f"{name} {n / 1e9:.2f}" for name, n in sorted(memory.items(), key=lambda i: -i[1]))
            times = "".join(f"{seconds * 1e3:10,.1f}" for seconds in (*several, once))
            lines.append(f"  pp {place:<8}{times}{most:11}{sum(memory.values()) / 1e9:7.2f}  {held}")
        return "\n".join(lines)

    __repr__ = __str__


def plan_pipeline(
    stage: Callable[[int, int], Stage],
    *,
    mesh_shape: Mapping[str, int] | Dimensions,
    hardware: str | Hardware,
    microbatches: int,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    parallelize: Parallelize | None = None,
    **plan_options: Any,
) -> PipelinePlan:
    """Predict what a training step of a pipeline takes, without devices, weights or other processes.

    Args:
        stage: gives the stage of an index, of so many.
        mesh_shape: ``{name: size}`` of the dimensions of :mod:`graph_fsdp.planning.dimensions`. Without ``pp``, there
            is one stage, and microbatches accumulate gradients.
        hardware: of every rank.
        microbatches: of a step, on each rank.
        schedule: "GPipe", "1F1B" or "Interleaved1F1B", which has ``stages_per_rank`` of 2 or more.
        parallelize, plan_options: of :func:`plan`, for every stage.

    Raises:
        ValueError, UnsupportedError: the schedule cannot be, or not with so many microbatches or stages.
        All that :func:`plan` raises.
    """
    dimensions = Dimensions.of(mesh_shape)
    orders = pipeline_orders(schedule, dimensions.pp, microbatches, stages_per_rank)
    if plan_options.get("reshard_after_forward") is not None:
        raise ValueError(
            "reshard_after_forward: ranks gather parameters once a step, for all microbatches; leave it out"
        )
    stages = [stage(index, dimensions.pp * stages_per_rank) for index in range(dimensions.pp * stages_per_rank)]
    options = {**plan_options, "mesh_shape": dimensions, "hardware": hardware, "parallelize": parallelize}
    plans: dict[Hashable, Plan] = {}
    for each in stages:
        if each.key not in plans:
            plans[each.key] = plan(each.model_fn, each.inputs, finalization=True, **options)
    known = {key: StageFigures.of(made) for key, made in plans.items()}
    made = [plans[each.key] for each in stages]
    figures = [known[each.key] for each in stages]
    cost = made[0].traced.context.cost
    assert cost is not None
    sends = {i: cost.send_seconds(s.received, dimensions.stage_ranks) for i, s in enumerate(figures) if i}
    given = schedule, microbatches, orders, figures, made, made[0].tokens, sends, made[0].conditions
    return PipelinePlan(dimensions, made[0].hardware, *given)
