"""torchtitan's program in a planned step: which part of it is compiled, and what FSDP2 does when.

The plan's graphs are those of the whole model. torchtitan compiles block by block, and runs what lies between with
PyTorch's own kernels: the embedding, the last norm, the output and, before April 2025, the loss. So a plan of the eager
backend is taken, whose operators are PyTorch's, and a node of a compiled part is fused as the cost model fuses.

FSDP2 (``torch/distributed/fsdp/_fully_shard``) runs collectives of its own around the same compute:

- forward gathers the root first. The copy of a gathered unit into its parameters, on the compute stream, lets the
  gather of the unit after the next one begin;
- backward gathers a unit when the one before it has been copied. Gradients are copied, in the dtype they are reduced
  in, into the input of a reduction, which begins when the reduction before it has ended;
- the embedding, the last norm and the output are the root's until the middle of 2025: one unit, which stays gathered
  from the start of forward to the end of backward and is reduced last; the last block stays gathered for backward.
  Later the embedding is a unit, and the norm and the output are one, which stays gathered instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from published_llama import is_block, module_of
from torch import fx

from graph_fsdp.passes.analysis.cost import CostModel
from graph_fsdp.passes.analysis.kernels import Kind, graph_work
from graph_fsdp.passes.analysis.simulate import Simulation, Task
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.planning import Plan

ROOT = ""
LANE = "collectives"  # those of one process group run one after the other
Units = dict[str, list[ParameterSpec]]


@dataclass(frozen=True)
class Compiled:
    """Which parts of the model are compiled: the blocks, the loss. ``loss`` names the module that computes it."""

    blocks: bool
    loss: bool
    loss_module: str = "loss"

    def nodes(self, graph: Graph, units: Units) -> set[fx.Node]:
        """Find the nodes of compiled parts. What autograd added belongs to the part of the node before it."""
        roots = [name for name in units if is_block(name)] if self.blocks else []
        roots += [self.loss_module] if self.loss else []
        found: set[fx.Node] = set()
        inside = False
        for node in graph.nodes:
            path = module_of(node)
            if path is not None:
                inside = any(path == name or path.startswith(f"{name}.") for name in roots)
            if inside:
                found.add(node)
        return found

    def fused_away(self, graph: Graph, units: Units) -> set[fx.Node]:
        """Find what compiled kernels compute and never write."""
        compiled = self.nodes(graph, units)
        work = graph_work(graph, fused=True)
        return {node for node in compiled if work[node].kind is Kind.FUSIBLE and not work[node].written}

    def seconds(self, graph: Graph, units: Units, cost: CostModel) -> dict[fx.Node, float]:
        """Return the compute seconds of each node, fused where its part is compiled."""
        compiled = self.nodes(graph, units)
        fused, alone = (
            CostModel(cost.hardware, cost.groups, measured=cost.measured, fused=f).graph_seconds(graph)
            for f in (True, False)
        )
        return {node: (fused if node in compiled else alone)[node] for node in graph.nodes}


def units_of(spec: ModelSpec) -> Units:
    """Unit → its parameters, the root, if it has any, last."""
    units: Units = {}
    for parameter in spec.parameters.values():
        units.setdefault(parameter.unit, []).append(parameter)
    root = {ROOT: units.pop(ROOT)} if ROOT in units else {}
    return {**units, **root}


def positions(graph: Graph, role: Role, choose: Callable[[Iterable[int]], int]) -> dict[str, int]:
    """Unit → the position of the first (``min``) or last (``max``) node of a role."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        record = node.meta.get("fsdp")
        if record is not None and record.role is role:
            found.setdefault(record.unit, []).append(index)
    return {unit: choose(indices) for unit, indices in found.items()}


def forward_begins(graph: Graph, units: Units) -> dict[str, int]:
    """Return where each unit is needed in forward, in order of use: the root first."""
    begins = {**positions(graph, Role.GATHER_WAIT, min), ROOT: 0}
    return {name: begins[name] for name in sorted(units, key=lambda name: (begins[name], name))}


def backward_ends(graph: Graph, units: Units) -> dict[str, int]:
    """Return where the gradients of each unit are complete, in order: the root last."""
    ends = {**positions(graph, Role.REDUCE_START, max), ROOT: len(graph.nodes) - 1}
    return {name: ends[name] for name in sorted(units, key=lambda name: (ends[name], -len(name)))}


def kept_units(order: Iterable[str]) -> set[str]:
    """Return what stays gathered between forward and backward, of all units in order of use: the root and the unit
    used last."""
    names = list(order)
    return {names[-1]} | ({ROOT} & set(names))


def full_nbytes(parameters: list[ParameterSpec], *, reduced: bool = False) -> int:
    """Count the bytes of whole parameters as they are gathered, or of their gradients as they are reduced."""
    dtypes = [p.reduce_dtype if reduced else p.param_dtype for p in parameters]
    return sum(p.world_size * p.shard_numel * d.itemsize for p, d in zip(parameters, dtypes, strict=True))


# Time


class _Collectives:
    """Makes the tasks of gathers, reductions and their copies."""

    def __init__(self, plan: Plan, units: Units, cost: CostModel) -> None:
        self.units, self.cost, self.group = units, cost, plan.traced.context.model.group
        self.levels = cost.levels(self.group) if plan.conditions.contention else frozenset()

    def gather(self, unit: str) -> Task:
        """The shard is cast, and copied into its place, on the gathers' stream first."""
        parameters = self.units[unit]
        shard = sum(p.shard_numel * (p.dtype.itemsize + 3 * p.param_dtype.itemsize) for p in parameters)
        seconds = self.cost.all_gather_seconds(full_nbytes(parameters), self.group)
        return Task(self.cost.copy_seconds(shard // 2) + seconds, LANE, levels=self.levels)

    def copy_out(self, unit: str) -> Task:
        return Task(self.cost.copy_seconds(full_nbytes(self.units[unit])))

    def copy_in(self, unit: str) -> Task:
        both = full_nbytes(self.units[unit]) + full_nbytes(self.units[unit], reduced=True)
        return Task(self.cost.copy_seconds(both // 2))

    def reduction(self, unit: str) -> Task:
        nbytes = full_nbytes(self.units[unit], reduced=True)
        return Task(self.cost.all_gather_seconds(nbytes, self.group), LANE, levels=self.levels)


def forward_tasks(
    graph: Graph, seconds: dict[fx.Node, float], begins: dict[str, int], collectives: _Collectives
) -> list[Task]:
    order = list(begins)
    gathers = {name: collectives.gather(name) for name in order}
    tasks = [gathers[name] for name in order[:2]]
    for index, node in enumerate(graph.nodes):
        for place, name in enumerate(order):
            if begins[name] == index:
                tasks += [Task(waits_for=gathers[name]), collectives.copy_out(name)]
                tasks += [gathers[after] for after in order[place + 2 : place + 3]]
        tasks.append(Task(seconds[node]))
    return tasks


def backward_tasks(
    graph: Graph, seconds: dict[fx.Node, float], ends: dict[str, int], collectives: _Collectives
) -> list[Task]:
    """The first unit is still gathered, and so is the root."""
    order = list(ends)
    gathers = {name: collectives.gather(name) for name in order[1:] if name != ROOT}
    reductions: list[Task] = []
    tasks = [gathers[name] for name in order[1:2] if name in gathers]
    for index, node in enumerate(graph.nodes):
        tasks.append(Task(seconds[node]))
        for place, name in enumerate(order):
            if ends[name] != index:
                continue
            tasks += [Task(waits_for=before) for before in reductions[-1:]]
            reductions.append(collectives.reduction(name))
            tasks += [collectives.copy_in(name), reductions[-1]]
            if (after := dict(enumerate(order)).get(place + 1)) in gathers:
                tasks += [Task(waits_for=gathers[after]), collectives.copy_out(after)]
                tasks += [gathers[later] for later in order[place + 2 : place + 3] if later in gathers]
    return [*tasks, *(Task(waits_for=last) for last in reductions[-1:])]


def fsdp2_seconds(plan: Plan, compiled: Compiled) -> dict[str, float]:
    """Return the seconds of forward, backward and the optimizer in torchtitan's program, with the plan's conditions."""
    units = units_of(plan.traced.context.model)
    found: dict[str, float] = {}
    for phase, graph in plan.traced.graphs.items():
        assert graph.cost is not None
        seconds = compiled.seconds(graph, units, graph.cost)
        collectives = _Collectives(plan, units, graph.cost)
        if phase == "forward":
            tasks = forward_tasks(graph, seconds, forward_begins(graph, units), collectives)
        else:
            tasks = backward_tasks(graph, seconds, backward_ends(graph, units), collectives)
        found[phase] = Simulation(tasks, plan.conditions, graph.cost.hardware.interference).run()
    return {**found, "optimizer": plan.optimizer_seconds}
