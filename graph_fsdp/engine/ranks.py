"""``Schedules`` holds what the ranks of a model have in common: plans, agreements, and the order of programs."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist

from graph_fsdp.passes import Graph, PassContext, PassPipeline, Plan
from graph_fsdp.passes.context import as_compared
from graph_fsdp.passes.ir.agreed_order import COMMUNICATES
from graph_fsdp.passes.ir.dialect import STARTS, reduce_payloads
from graph_fsdp.passes.ir.operands import arguments
from graph_fsdp.passes.ir.settings import Settings
from graph_fsdp.runtime.comm.collectives import Pending
from graph_fsdp.runtime.ranks import agreement
from graph_fsdp.runtime.ranks.agreement import RankDisagreement, RunnableProgram, agree, is_shared, publish, receive
from graph_fsdp.runtime.ranks.failure import raised_instead
from graph_fsdp.runtime.ranks.lockstep import Runnable, lockstep_of

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine
    from graph_fsdp.parameters.sharded import ShardedParameter


class OtherPlan(BaseException):  # AOTAutograd retells every Exception as one of its own
    """Says that the ranks have another plan for graphs than those have been made under."""


Made: TypeAlias = Callable[[], None]  # is called when the passes have run, before ranks agree on the graphs


def nothing() -> None:
    """Do nothing: the ``Made`` of graphs that are not kept."""


_COMMUNICATION = (*COMMUNICATES, *STARTS, reduce_payloads)  # before the passes, and after them

# Models compiled so far per mesh: its ranks count alike, whatever else each of them compiles or plans by itself.
_models_of_ranks: Counter[tuple[int, ...]] = Counter()


class Schedules:
    """Holds the plans of one model, whose class has this ``name``, and what its ranks have agreed to. ``engine``: a
    weak proxy."""

    def __init__(self, engine: Engine, ranks: tuple[int, ...], name: str) -> None:
        self._engine, self.ranks, self.name = engine, ranks, name
        self._numbers = _numbers(_models_of_ranks[ranks])  # of the model, among those of these ranks, and of its copies
        self.index = next(self._numbers)  # by which the ranks know the model; "" of a copy that they do not know yet
        self.lockstep = lockstep_of(ranks) if is_shared(ranks) else None
        self._timeout = agreement.TIMEOUT_SECONDS
        if self.lockstep is not None:
            _models_of_ranks[ranks] += 1
            spec = engine.spec
            groups = [name for mesh in (spec.mesh, *spec.own_meshes) for name in mesh.groups]
            self.lockstep.runs_on([*groups, *filter(None, [spec.reshard_group])], engine.storage.device)
            self._timeout = max(self._timeout, self.lockstep.timeout)
        self.plans: dict[str, Plan] = {}  # by kind of graph
        self._plans_made = 0
        self._agreed: set[tuple[str, ...]] = set()  # collectives that all ranks run
        self._agreements = 0
        self._facts_agreed = False
        self.is_announced = False  # that this rank compiles a graph, on which the ranks have not agreed yet

    def be_of_a_copy(self, model: Schedules) -> None:
        """Have the model be known to the ranks as a copy of another ``model``. It takes its number when the ranks meet:
        one rank may copy by itself, and all other models and copies have the same numbers on all ranks."""
        if self.lockstep is not None:
            _models_of_ranks[self.ranks] -= 1
        self._numbers, self.index = model._numbers, ""

    @property
    def is_first(self) -> bool:
        """Say whether this rank decides what others follow."""
        return self.lockstep is None or dist.get_rank() == self.ranks[0]

    def meet(self) -> bool:
        """Agree with the other ranks on what they have to have in common, before the model's first graph is compiled.
        Say whether it was now."""
        if self.lockstep is None or self._facts_agreed:
            return False
        self.lockstep.compiling()
        self.is_announced = True
        self.index = self.index or next(self._numbers)
        agree(f"model{self.index}", _facts(self._engine), self.ranks, self._timeout, self.lockstep.check_refused)
        self._facts_agreed = True
        return True

    def tell(self, what: str, said: str) -> None:
        """On the first rank, say something of the model's first graph to the others."""
        publish(f"model{self.index}/{what}", said, self.ranks)

    def told(self, what: str, patience: float) -> str | None:
        """On another rank, return what the first one says; None where it has not for ``patience`` seconds. Raises
        RankFailure if a rank has ended meanwhile."""
        assert self.lockstep is not None
        check = functools.partial(self.lockstep.check_refused, is_late=False)
        return agreement.poll(f"model{self.index}/{what}", self.ranks, patience, check)

    def run(
        self,
        graphs: list[Graph],
        context: PassContext,
        kind: str,
        kept: list[str] | None = None,
        passes: Callable[[list[Graph], PassContext], None] | None = None,
        made: Made = nothing,
    ) -> None:
        """Run the passes under the plan for graphs of this kind; where there is none yet, the first rank makes it. Then
        agree with the other ranks on new collectives. ``kept``: the buckets that an earlier plan has these graphs
        keep. ``passes``: instead of the pipeline's, for graphs that have been through them. ``made``: called once they
        have run, before the ranks agree."""
        shared = self.lockstep is not None
        passes = passes or self._engine.pipeline.run
        refused = self.lockstep.check_refused if self.lockstep is not None else None
        if self._may_be_alone(context.settings) and not any(graph.calls_of(_COMMUNICATION) for graph in graphs):
            self.plans.setdefault(kind, Plan())
        else:
            self.meet()
        plan, key = self.plans.get(kind), f"model{self.index}/plan{self._plans_made}"
        is_new, failed = plan is None, False
        if self.lockstep is not None and is_new:
            self.lockstep.compiling(again=self.is_announced)
        is_announced, self.is_announced = self.is_announced or is_new, False
        if is_new:  # ranks meet new kinds in the same order, so this key is theirs too
            self._plans_made += 1
            if not self.is_first:
                found = json.loads(receive(key, self.ranks, self._timeout, refused))
                failed = found["kind"] is None
                plan = Plan.from_json(found["plan"]) if found["kind"] == kind else None
        context.plan = Plan(kept=kept) if plan is None else copy.deepcopy(plan)
        try:
            passes(graphs, context)
        except OtherPlan:
            assert plan is not None
            self.plans[kind], self.is_announced = plan, is_announced  # what is received and announced once
            raise
        except Exception:
            if is_new and self.is_first and shared:
                # The others meet the same error, or say that they did not.
                publish(key, json.dumps({"kind": None}), self.ranks)
            raise
        if failed:
            raise RankDisagreement(f"rank {self.ranks[0]} failed to schedule {key!r}, this rank did not: see its error")
        if plan is None:
            plan = Plan({graph.phase: graph.collectives for graph in graphs}, context.plan.kept)
        if is_new and self.is_first and shared:
            publish(key, json.dumps({"kind": kind, "plan": plan.to_json()}), self.ranks)
        made()
        self.agree(graphs, context, is_announced=is_announced)
        self.plans[kind] = plan

    def agree(self, graphs: list[Graph], context: PassContext, *, is_announced: bool = False) -> None:
        """Agree with the other ranks on the collectives of graphs, if there was no agreement on the same before.
        ``is_announced``: the ranks know that this one compiles."""
        fingerprint = tuple(_fingerprint(graphs, self._engine.pipeline, context))
        is_alone = self._may_be_alone(context.settings) and not fingerprint
        if not is_alone and fingerprint not in self._agreed:
            if self.lockstep is not None:
                self.lockstep.compiling(again=is_announced)
                self._agreements += 1  # also where it fails: ranks that go on must not find what they said before
                key = f"model{self.index}/collectives{self._agreements}"
                agree(key, fingerprint, self.ranks, self._timeout, self.lockstep.check_refused)
            self._agreed.add(fingerprint)
        if self.lockstep is not None:
            self.lockstep.compiled()

    def in_step(self, run: Runnable, program: Any, graph: Graph, context: PassContext) -> Runnable:
        """Return ``run``, which runs the program of ``graph``, so that it begins when all ranks are about to run it.
        Of ``program`` is the place where a rank waits or fails."""
        collectives = tuple(_fingerprint([graph], self._engine.pipeline, context))
        if self.lockstep is None or not collectives:
            return run
        known = self.lockstep.know(RunnableProgram(self._model, graph.phase, collectives))
        return self.lockstep.around(run, program, known)

    def begin(self, phase: str, what: str, collectives: Sequence[str] = ()) -> None:
        """Keep the ranks in step before they run ``collectives`` that are in no graph, or make a process group."""
        if self.lockstep is not None:
            program = RunnableProgram(self._model, phase, tuple(collectives), what)
            self.lockstep.begin(self.lockstep.know(program))

    def wait(self, pending: Pending) -> None:
        """Wait for a collective that followed ``begin``."""
        with self.telling():
            pending.finish()

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which collectives outside of graphs are waited for, as ``begin`` has said."""
        return self.lockstep.telling() if self.lockstep is not None else contextlib.nullcontext()

    def failures_told(self, method: str) -> contextlib.AbstractContextManager[None]:
        """Tell the other ranks, which may wait for this one, if a forward or another method raises. Raises RankFailure
        instead if the store is lost."""
        if (lockstep := self.lockstep) is None:
            return contextlib.nullcontext()
        return raised_instead(lambda error: lockstep.failed_outside(error, f"{method} of {self._model}"))

    def is_alone(self, settings: Settings, parameters: Iterable[ShardedParameter]) -> bool:
        """Say whether a graph of these parameters may be one that this rank alone has: none is gathered or has a
        gradient."""
        has_gradients = torch.is_grad_enabled()
        return self._may_be_alone(settings) and not any(
            p.spec.unit not in settings.unsharded or (has_gradients and p.shard.requires_grad) for p in parameters
        )

    def _may_be_alone(self, settings: Settings) -> bool:
        """Say whether a graph without collectives may be one that this rank alone has: a piece of the model, as Python
        code between pieces may differ by rank, or a forward of parameters that are whole on each rank."""
        return not self._engine.fullgraph or bool(settings.unsharded)

    @property
    def _model(self) -> str:
        return f"model {self.index or 'that is a copy'} ({self.name})"


def _numbers(number: int) -> Iterator[str]:
    """Yield the number of a model, and those of its copies and theirs: 3, 3.0, 3.1, …"""
    yield str(number)
    yield from (f"{number}.{copy}" for copy in itertools.count())


def _facts(engine: Engine) -> list[str]:
    """Return what the ranks of a model must have in common before anything is planned, a line each."""
    spec = engine.spec
    lines = [f"torch {torch.__version__}", f"backend {engine.backend.name}"]
    lines.append(f"regions {'whole' if engine.whole else 'cut'}")
    lines += ["CUDA graphs"] if engine.cuda_graphs is not None else []
    lines.append(f"reshard_after_forward {engine.reshard_after_forward}")
    lines.append(f"mesh of {spec.mesh.replicas} replicas of {spec.mesh.world_size} ranks")
    for mesh in spec.own_meshes:
        names = [name for name, p in spec.parameters.items() if p.mesh == mesh]
        lines.append(f"{', '.join(names)} on mesh {mesh.name}, {mesh.replicas} replicas of {mesh.world_size} ranks")
    if spec.offload is not None:
        device, pinned = spec.offload.device.type, spec.offload.pin_memory
        lines.append(f"shards on the {'pinned ' if pinned else ''}CPU, computed with on {device}")
    if spec.reshard_size:
        lines.append(f"resharded to {spec.reshard_size} ranks")
    lines += [f"pass {as_compared(p)}" for p in engine.pipeline]
    for bucket in spec.buckets:
        lines.append(f"bucket {bucket.name} in {len(bucket.messages) or 1} messages {list(bucket.messages)}")
    for name, p in spec.parameters.items():
        dtypes = " ".join(str(d).removeprefix("torch.") for d in (p.dtype, p.param_dtype, p.reduce_dtype))
        dtypes += f" sent as {p.sent_as}".replace("torch.", "") if p.sent_as else ""
        frozen = "" if p.trainable else " frozen"
        dim = f" sharded on dimension {p.shard_dim}" if p.shard_dim else ""
        layout = f" {found.layout}" if (found := engine.storage.parameters[name]).layout else ""
        lines.append(f"parameter {p.name} {list(p.shape)} of unit {p.unit or 'root'} {dtypes}{frozen}{dim}{layout}")
    payloads = (p for gather in engine.extensions.values() for p in gather.payloads)
    return [*lines, *(f"payload {p.name} {list(p.shape)} {p.dtype}" for p in payloads)]


def _fingerprint(graphs: list[Graph], pipeline: PassPipeline, context: PassContext) -> list[str]:
    """Return every collective in order, with its size and the pass that put it there, and the settings that change its
    group or the divisor of gradients."""
    lines = []
    for graph in graphs:
        schedules = (p.name for p in pipeline if "scheduled" in p.provides and graph.phase in p.runs_in())
        by = f", scheduled by pass {next(schedules, 'bucket')}"
        for node in graph.fx_graph.nodes:
            record = node.meta.get("fsdp")
            if record is not None and (node.target in STARTS or node.target is reduce_payloads):
                dtype = node.meta["val"].dtype
                given = arguments(node)
                sent = f" sent as {given.sent_as}" if getattr(given, "sent_as", None) else ""
                by_user = ", by the user's own collective" if getattr(given, "custom", False) else ""
                lines.append(
                    f"{graph.phase} {record.role.value} {record.bucket} {record.nbytes} bytes {dtype}{sent} "
                    f"of {', '.join(record.params)}{by}{by_user}"
                )
        if graph.absent is not None and graph.absent.agrees_on:
            lines.append(f"backward agrees whether there are gradients of {', '.join(graph.absent.agrees_on)}")
        if context.settings.registered_memory == "symmetric" and graph.slots:  # ranks allocate them together
            lines.append(f"{graph.phase} slots of {graph.slots} bytes")
    changed = context.settings.key()
    return [*lines, f"settings {changed}"] if lines and changed else lines
