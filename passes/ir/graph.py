"""Graphs, as passes see them, are FX graphs with a phase, typed accessors, dependencies and reordering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import networkx as nx
import torch
from torch import fx

from graph_fsdp.compat import HigherOrderOperator
from graph_fsdp.passes.ir import accessors, dialect
from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_random, mutated_inputs
from graph_fsdp.passes.ir.fake_values import VALUES, iterate_tensors

if TYPE_CHECKING:
    from graph_fsdp.passes.analysis.cost import CostModel

Phase = Literal["capture", "joint", "forward", "backward", "inference"]
PHASES: tuple[Phase, ...] = ("capture", "joint", "forward", "backward", "inference")
# What a graph of each phase is before any pass of that phase has run.
GIVEN: dict[Phase, frozenset[str]] = {
    "capture": frozenset({"captured"}),
    "joint": frozenset({"traced"}),
    "forward": frozenset({"traced", "annotated", "partitioned"}),
    "backward": frozenset({"traced", "annotated", "partitioned"}),
    "inference": frozenset({"traced"}),
}

_WAIT = torch.ops._c10d_functional.wait_tensor.default


class Graph:
    """Wraps one FX graph on its way through the passes.

    ``phase`` says which: ``"capture"`` (Dynamo's), ``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``.
    ``cost``: the model by which ``dependencies`` tells the seconds of nodes; set by whoever has one.

    What passes find:
    ``facts`` that hold now; ``order``: that of the collectives, once it is fixed.
    ``slots``: bytes of each slot that gathered buffers lie in, once they are assigned.
    ``recomputes_activations`` (joint): whether backward does, by the user's checkpoints or by an option.
    ``activation_memory_budget`` (joint): what the partitioner may save, from 0, inputs only, to 1, all it wants.
    ``unsharded``: parameters that are inputs, whole, behind the other inputs.
    ``taken``: buckets that an earlier piece of the model has gathered: inputs behind those; ``given``: bucket → what a
    later piece is given, an output behind the others.
    ``kept`` (forward): bucket → what backward receives of it: the gathered buffer, or a shard for a smaller group.
    ``offloaded`` (forward): place among the saved tensors → the copy on the CPU that backward receives.
    ``absent`` (backward): the runtime's ``AbsentGradients``, where a loss may leave outputs out that have parameters of
    their own.
    """

    def __init__(self, module: fx.GraphModule, phase: Phase) -> None:
        self.module = module
        self.phase: Phase = phase
        self.cost: CostModel | None = None
        self.facts = GIVEN[phase]
        self.order: list[tuple[str, str]] | None = None
        self.slots: tuple[int, ...] = ()
        self.recomputes_activations = False
        self.activation_memory_budget = 1.0
        self.unsharded: list[str] = []
        self.taken: list[str] = []
        self.given: dict[str, fx.Node] = {}
        self.kept: dict[str, fx.Node] = {}
        self.offloaded: dict[int, fx.Node] = {}
        self.absent: Any = None

    @property
    def fx_graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.fx_graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.fx_graph.nodes if node.op == "placeholder"]

    @property
    def output(self) -> fx.Node:
        found: fx.Node = next(node for node in reversed(self.fx_graph.nodes) if node.op == "output")
        return found

    @property
    def outputs(self) -> list[Any]:
        """The values that the graph returns."""
        values = self.output.args[0]
        return list(values) if isinstance(values, (list, tuple)) else [values]

    def with_role(self, *roles: Role) -> list[fx.Node]:
        """Return the nodes of these roles, in graph order."""
        return [node for node in self.fx_graph.nodes if dialect.has_role(node, *roles)]

    @property
    def starts(self) -> list[fx.Node]:
        """The nodes that start collectives, in graph order."""
        return [node for node in self.fx_graph.nodes if node.target in dialect.STARTS]

    @property
    def collectives(self) -> list[tuple[str, str]]:
        """The (role, bucket) of each collective in the order in which they start, on which ranks must agree."""
        return [(record.role.value, record.bucket) for record in (start.meta["fsdp"] for start in self.starts)]

    @property
    def gathers(self) -> list[accessors.Gather]:
        """The gathered buckets of a bucketed graph, in the order in which they start; received ones first. Linear."""
        return accessors.find_gathers(self)

    @property
    def reductions(self) -> list[accessors.Reduction]:
        """The reduced buckets of a bucketed graph, in the order in which they start. Linear."""
        return accessors.find_reductions(self)

    @property
    def buckets(self) -> dict[str, accessors.BucketNodes]:
        """Bucket → its gather and its reduction in a bucketed graph, None where there is none: gathers in order, then
        reductions of what is not gathered (scalars). Linear."""
        gathers = {gather.bucket: gather for gather in self.gathers}
        reductions = {reduction.bucket: reduction for reduction in self.reductions}
        return {n: accessors.BucketNodes(gathers.get(n), reductions.get(n)) for n in {**gathers, **reductions}}

    def positions(self) -> dict[fx.Node, int]:
        """Return the place of each node in the graph."""
        return {node: index for index, node in enumerate(self.fx_graph.nodes)}

    def next_communication(self) -> dict[fx.Node, fx.Node]:
        """Find for each node the next start or wait behind it, or the output: where compute regions are cut anyway."""
        found: dict[fx.Node, fx.Node] = {}
        upcoming = self.output
        for node in reversed(self.fx_graph.nodes):
            found[node] = upcoming
            if node.target in dialect.STARTS or node.target in dialect.WAITS:
                upcoming = node
        return found

    def alias_roots(self) -> dict[fx.Node, frozenset[fx.Node]]:
        """Find for each node those that allocated the memory which its value may lie in. Linear in the graph."""
        roots: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.fx_graph.nodes:
            found = [roots[source] for source in aliased_inputs(node)]
            # What a call without a schema returns may also lie in memory of its own.
            if not found or isinstance(node.target, HigherOrderOperator):
                found.append(frozenset({node}))
            roots[node] = found[0] if len(found) == 1 else frozenset().union(*found)
        return roots

    def dependencies(self, cost: CostModel | None = None) -> nx.DiGraph:
        """Build the dependency DAG: an edge from a node to each node that must come after it.

        Besides data: a write to memory (a wait, a free, an in-place copy) comes after every earlier use of that
        memory through any alias and before every later one, collectives keep their order among themselves, and so
        do operators that draw random numbers and the model's own collectives (of tensor parallelism). Edges carry
        ``kind``: "data", "memory", "collective", "random" or "model_collective", and
        ``nbytes``: of the value that flows on a "data" edge, 0 on the others.

        Nodes carry ``nbytes`` (of their value) and ``seconds``: of compute, or of the collective that a node starts,
        by ``cost``, which is the graph's own where it is not given; 0.0 without one.
        """
        cost = cost or self.cost
        seconds = cost.node_seconds(self) if cost is not None else {}
        dag = nx.DiGraph()
        roots = self.alias_roots()
        last_write: dict[fx.Node, fx.Node] = {}
        uses_since: dict[fx.Node, list[fx.Node]] = {}
        previous: dict[str, fx.Node] = {}
        sizes: dict[fx.Node, int] = {}

        def edge(before: fx.Node, after: fx.Node, kind: str) -> None:
            if before is not after and not dag.has_edge(before, after):
                dag.add_edge(before, after, kind=kind, nbytes=sizes[before] if kind == "data" else 0)

        for node in self.fx_graph.nodes:
            sizes[node] = nbytes(node.meta.get("val"))
            dag.add_node(node, seconds=seconds.get(node, 0.0), nbytes=sizes[node])
            for source in node.all_input_nodes:
                edge(source, node, "data")
            written = {root for n in mutated_inputs(node) for root in roots[n]}
            for root in {root for n in node.all_input_nodes for root in roots[n]}:
                if root in last_write:
                    edge(last_write[root], node, "memory")
                if root in written:
                    for use in uses_since.pop(root, ()):
                        edge(use, node, "memory")
                    last_write[root] = node
                else:
                    uses_since.setdefault(root, []).append(node)
            kind = _ordered_kind(node)
            if kind is not None:
                if kind in previous:
                    edge(previous[kind], node, kind)
                previous[kind] = node
            if node.op == "output":  # what nothing reads (frees, in-place updates) still comes before it
                for sink in [n for n, degree in dag.out_degree if degree == 0 and n is not node]:
                    edge(sink, node, "memory")
        return dag

    def reorder(self, order: Sequence[fx.Node]) -> None:
        """Put the nodes into this order (all of them, placeholders first, output last). Linear."""
        if len(order) != len(self.fx_graph.nodes) or set(order) != set(self.fx_graph.nodes):
            raise ValueError(
                f"order: {len(order)} nodes for a graph of {len(self.fx_graph.nodes)}; give each node of the graph once"
            )
        previous = None
        for node in order:
            if previous is not None and previous.next is not node:
                previous.append(node)
            elif previous is None and node is not next(iter(self.fx_graph.nodes)):
                next(iter(self.fx_graph.nodes)).prepend(node)
            previous = node

    def replace(self, new: Mapping[fx.Node, fx.Node]) -> None:
        """Make each use of a key one of its value, and erase the keys. Linear, also where one node (the output) uses
        thousands of them: ``Node.replace_all_uses_with`` goes through all its arguments for each."""
        for user in dict.fromkeys(user for node in new for user in node.users):
            user.args = fx.map_arg(user.args, lambda node: new.get(node, node))
            user.kwargs = fx.map_arg(user.kwargs, lambda node: new.get(node, node))
        for node in new:
            self.fx_graph.erase_node(node)

    def call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        name: str | None = None,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """Insert a call at the current insertion point, with its fake value and the metadata of ``like`` (stack
        trace, module path), so that a line of the graph still leads to a line of the model. ``name`` is for readers
        of the printed graph only."""
        node = self.fx_graph.create_node("call_function", target, args, kwargs, name=name)
        if like is not None:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "partitioner_tag"):
                if key in like.meta:
                    node.meta[key] = like.meta[key]
        node.meta["val"] = VALUES.of(node)
        return node


def nbytes(value: Any) -> int:
    """Count the bytes of the tensors in a node's value; 0 where a size is symbolic."""
    sizes = (tensor.numel() * tensor.dtype.itemsize for tensor in iterate_tensors(value))
    return sum(size for size in sizes if isinstance(size, int))


def _ordered_kind(node: fx.Node) -> str | None:
    """Return the kind of a node that keeps its order among those of its kind, None for all others."""
    if node.target in dialect.STARTS or node.target is dialect.reduce_payloads:
        return "collective"
    if getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not _WAIT:
        return "model_collective"
    return "random" if is_random(node) else None
