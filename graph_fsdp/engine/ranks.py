"""The schedules of a model, which its ranks have in common: plans, agreements, and the order in which programs run."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator

import torch.distributed as dist

from graph_fsdp.passes import Graph, PassContext, PassPipeline, Plan
from graph_fsdp.passes.ir.dialect import STARTS, is_custom, reduce_payloads
from graph_fsdp.runtime.ranks.agreement import RankDisagreement, agree, is_shared, publish, receive
from graph_fsdp.runtime.ranks.failure import RankFailure
from graph_fsdp.runtime.ranks.in_step import InStep
from graph_fsdp.runtime.ranks.lockstep import lockstep_of
from graph_fsdp.runtime.ranks.runnable_program import Runnable, RunnableProgram

# Models compiled so far per mesh: its ranks count alike, whatever else each of them compiles.
_models_of_ranks: Counter[tuple[int, ...]] = Counter()


@contextlib.contextmanager
def models_not_counted() -> Iterator[None]:
    """What one rank plans for itself must not change how it counts the models that it shares with other ranks."""
    before = _models_of_ranks.copy()
    try:
        yield
    finally:
        _models_of_ranks.clear()
        _models_of_ranks.update(before)


class Schedules:
    """Of one model. ``name``: of its class."""

    def __init__(self, ranks: tuple[int, ...], name: str) -> None:
        self.ranks, self.name = ranks, name
        self.index = _models_of_ranks[ranks]  # of the model, among those of these ranks
        _models_of_ranks[ranks] += 1
        self.lockstep = lockstep_of(ranks) if is_shared(ranks) else None
        self.plans: dict[str, Plan] = {}  # by kind of graph
        self._plans_made = 0
        self._agreed: set[tuple[str, ...]] = set()  # collectives that all ranks run
        self._agreements = 0
        self._facts_agreed = False

    def run(
        self,
        pipeline: PassPipeline,
        graphs: list[Graph],
        context: PassContext,
        kind: str,
        facts: Callable[[], list[str]],
        kept: list[str] | None = None,
    ) -> None:
        """Run the passes under the plan for graphs of this kind; where there is none yet, the first rank makes it.
        Then agree with the other ranks on the collectives, where they are new. ``facts``: what ranks must have in
        common before anything is planned. ``kept``: what an earlier plan has decided that these graphs keep."""
        shared = is_shared(self.ranks)
        decides = not shared or dist.get_rank() == self.ranks[0]
        refused = self.lockstep.check_refused if self.lockstep is not None else None
        if self.lockstep is not None and (kind not in self.plans or not self._facts_agreed):
            self.lockstep.compiling()
        if shared and not self._facts_agreed:
            agree(f"model{self.index}", facts(), self.ranks, refused=refused)
            self._facts_agreed = True
        plan, key = self.plans.get(kind), f"model{self.index}/plan{self._plans_made}"
        is_new, failed = plan is None, False
        if is_new:  # ranks meet new kinds in the same order, so this key is theirs too
            self._plans_made += 1
            if not decides:
                found = json.loads(receive(key, self.ranks, refused=refused))
                failed = found["kind"] is None
                plan = Plan.from_json(found["plan"]) if found["kind"] == kind else None
        context.plan = Plan(kept=kept) if plan is None else plan.copy()
        try:
            pipeline.run(graphs, context)
        except Exception:
            if is_new and decides and shared:
                # The others meet the same error, or say that they did not.
                publish(key, json.dumps({"kind": None}), self.ranks)
            raise
        if failed:
            raise RankDisagreement(f"rank {self.ranks[0]} failed to schedule {key!r}, this rank did not: see its error")
        if plan is None:
            plan = Plan({graph.phase: graph.collectives for graph in graphs}, context.plan.kept, context.plan.slots)
        if is_new and decides and shared:
            publish(key, json.dumps({"kind": kind, "plan": plan.to_json()}), self.ranks)
        fingerprint = tuple(_fingerprint(graphs, pipeline, context))
        if self.lockstep is not None and fingerprint not in self._agreed:
            if not is_new:
                self.lockstep.compiling()
            self._agreements += 1  # also where it fails: ranks that go on must not find what they said before
            agree(f"model{self.index}/collectives{self._agreements}", fingerprint, self.ranks, refused=refused)
        self._agreed.add(fingerprint)
        self.plans[kind] = plan

    def in_step(self, program: Runnable, graph: Graph, pipeline: PassPipeline, context: PassContext) -> Runnable:
        """``program``, which runs ``graph``, begins when all ranks are about to run it."""
        collectives = tuple(_fingerprint([graph], pipeline, context))
        if self.lockstep is None or not collectives:
            return program
        known = self.lockstep.know(RunnableProgram(self._model, graph.phase, collectives))
        return InStep(program, self.lockstep, known)

    def begin_unshard(self, unit: str, gathers: list[str]) -> None:
        """Called before ``gathers`` that are in no graph start: they keep step as programs do."""
        if self.lockstep is not None and gathers:
            what = f"of unit {unit or 'root'!r}"
            self.lockstep.begin(self.lockstep.know(RunnableProgram(self._model, "unshard()", tuple(gathers), what)))

    def begin_reshard(self, gathers: list[str]) -> None:
        """Likewise, of what ``reshard()`` has freed between a forward and its backward."""
        if self.lockstep is not None:
            what = "of what reshard() has freed, before backward,"
            self.lockstep.begin(self.lockstep.know(RunnableProgram(self._model, "gather", tuple(gathers), what)))

    def begin_group(self, method: str) -> None:
        """Called by ``method`` before it makes a process group, which every rank has to come to."""
        if self.lockstep is not None:
            self.lockstep.begin(self.lockstep.know(RunnableProgram(self._model, f"{method}()", (), "call")))

    def failed_outside(self, error: BaseException, method: str) -> None:
        """A forward, or another method, raised ``error``. Other ranks may wait for this one."""
        if self.lockstep is not None:
            self.lockstep.failed_outside(error, f"{method} of {self._model}")

    def failed_unshard(self, error: BaseException) -> RankFailure | None:
        """Waiting for the gathers of ``begin_unshard`` raised ``error``; what to raise in its place, if anything."""
        return self.lockstep.failed(error) if self.lockstep is not None else None

    @property
    def _model(self) -> str:
        return f"model {self.index} ({self.name})"


def _fingerprint(graphs: list[Graph], pipeline: PassPipeline, context: PassContext) -> list[str]:
    """Every collective with its size and the pass that put it there, in order; and what the user has set, which says in
    which group they run and what gradients are divided by."""
    lines = []
    for graph in graphs:
        schedules = (p.name for p in pipeline if "scheduled" in p.provides and graph.phase in p.runs_in())
        by = f", scheduled by pass {next(schedules, 'bucket')}"
        for node in graph.fx_graph.nodes:
            record = node.meta.get("fsdp")
            if record is not None and (node.target in STARTS or node.target is reduce_payloads):
                dtype = node.meta["val"].dtype
                by_user = ", by the user's own collective" if is_custom(node) else ""
                lines.append(
                    f"{graph.phase} {record.role.value} {record.bucket} {record.nbytes} bytes {dtype} "
                    f"of {', '.join(record.params)}{by}{by_user}"
                )
        if graph.phase == "backward" and context.absent is not None and context.absent.agrees_on:
            lines.append(f"backward agrees whether there are gradients of {', '.join(context.absent.agrees_on)}")
    changed = context.settings.key()
    return [*lines, f"settings {changed}"] if lines and changed else lines
