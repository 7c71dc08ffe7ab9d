"""Graphs, as passes see them, are FX graphs with a phase, typed accessors, dependencies and reordering."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import networkx as nx
from torch import fx

from graph_fsdp.compat import HigherOrderOperator
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.effects import aliased_inputs, is_random, is_view, mutated_inputs
from graph_fsdp.passes.ir.fake_values import VALUES, iterate_tensors
from graph_fsdp.passes.ir.operands import argument, operands

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


@dataclass(frozen=True)
class Gather:
    """A gather brings one bucket into one graph.

    ``nbytes``: of the gathered buffer. ``start`` and ``wait``: None where backward received the buffer from forward.
    ``buffer``: the node whose value is the gathered buffer, the wait or the input that received it. ``reads``: what
    reads the buffer through any alias, views too, in the graph's order. ``free``: None before the free pass, and where
    the buffer ``escapes``: the graph returns it, or a view of it.
    """

    bucket: str
    unit: str
    params: tuple[str, ...]
    nbytes: int
    start: fx.Node | None
    wait: fx.Node | None
    buffer: fx.Node
    reads: tuple[fx.Node, ...]
    free: fx.Node | None
    escapes: bool

    @property
    def views(self) -> tuple[fx.Node, ...]:
        """Return the nodes that are parameters, as views of the buffer."""
        return tuple(node for node in self.reads if dialect.has_role(node, Role.UNPACK))

    @property
    def uses(self) -> tuple[fx.Node, ...]:
        """Return the nodes that compute with the parameters: ``reads`` without views."""
        return tuple(node for node in self.reads if not is_view(node))


@dataclass(frozen=True)
class Reduction:
    """A reduction takes one bucket of gradients in the backward graph.

    ``nbytes``: of the reduced shard. ``gradients``: the full gradients that go in, and ``results``: the gradients of
    the shards that come out, both in the order of ``params``. On a mesh that also replicates, ``replicate_start`` and
    ``replicate_wait`` are the second stage, over the replicas; None elsewhere.
    """

    bucket: str
    unit: str
    params: tuple[str, ...]
    nbytes: int
    gradients: tuple[fx.Node, ...]
    start: fx.Node
    wait: fx.Node
    replicate_start: fx.Node | None
    replicate_wait: fx.Node | None
    results: tuple[fx.Node, ...]


class BucketNodes(NamedTuple):
    """Holds what a graph does with one bucket, None for what it does not."""

    gather: Gather | None
    reduction: Reduction | None


class Graph:
    """Wraps one FX graph on its way through the passes.

    ``phase`` says which: ``"capture"`` (Dynamo's), ``"joint"``, ``"forward"``, ``"backward"`` or ``"inference"``.
    ``cost``: the model by which ``dependencies`` tells the seconds of nodes; set by whoever has one. ``timed``: what a
    cost model has told of the graph as it was then.

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
    ``delayed`` (backward): buckets whose products follow the last reduction of the others.
    ``absent`` (backward): the runtime's ``AbsentGradients``, where a loss may leave outputs out that have parameters of
    their own.
    """

    def __init__(self, module: fx.GraphModule, phase: Phase) -> None:
        self.module = module
        self.phase: Phase = phase
        self.cost: CostModel | None = None
        self.timed: Any = None
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
        self.delayed: list[str] = []
        self.absent: Any = None

    def __repr__(self) -> str:
        return f"<Graph {self.phase}: {len(self.fx_graph.nodes)} nodes>"

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
        return self.fx_graph.output_node()

    @property
    def outputs(self) -> list[Any]:
        """Return the values that the graph returns."""
        return operands(self.output)

    def with_role(self, *roles: Role) -> list[fx.Node]:
        """Return the nodes of these roles, in graph order."""
        nodes, key = self.fx_graph.nodes, dialect.RECORD
        return [node for node in nodes if (record := node.meta.get(key)) is not None and record.role in roles]

    def calls_of(self, targets: Collection[Any]) -> list[fx.Node]:
        """Return the calls of these operators in graph order, without a walk of the graph."""
        find = self.fx_graph.find_nodes
        return sorted(node for target in targets for node in find(op="call_function", target=target, sort=False))

    @property
    def starts(self) -> list[fx.Node]:
        """Return the nodes that start collectives, in graph order."""
        return self.calls_of(dialect.STARTS)

    @property
    def collectives(self) -> list[tuple[str, str]]:
        """Return the (role, bucket) of each collective in the order in which they start, on which ranks must agree."""
        return [(record.role.value, record.bucket) for record in (start.meta["fsdp"] for start in self.starts)]

    @property
    def gathers(self) -> list[Gather]:
        """Return the gathered buckets of a bucketed graph in the order in which they start; received ones first. They
        are found in one walk, and say how the graph was: ask again after an edit."""
        buffers = self.with_role(Role.KEPT, Role.GATHER_START)
        reads: dict[fx.Node, list[fx.Node]] = {buffer: [] for buffer in buffers}
        escaping: set[fx.Node] = set()
        for node, uses in self.uses_of(reads).items():
            for root in uses:
                if node.op == "output":
                    escaping.add(root)
                elif node.target is not dialect.all_gather_wait and node.target is not dialect.free:
                    reads[root].append(node)
        found = []
        for buffer in buffers:
            start = None if dialect.has_role(buffer, Role.KEPT) else buffer
            wait = dialect.wait_of(start) if start is not None else None
            whole = wait or buffer
            free = next((user for user in whole.users if user.target is dialect.free), None)
            found.append(Gather(*_labels(buffer), start, wait, whole, tuple(reads[buffer]), free, buffer in escaping))
        return found

    @property
    def reductions(self) -> list[Reduction]:
        """Return the reduced buckets of a bucketed graph, in the order in which they start."""
        results = {node.meta["fsdp"].params[0]: node for node in self.with_role(Role.SHARD_GRAD)}
        found = []
        for start in self.with_role(Role.REDUCE_START):
            labels, wait = _labels(start), dialect.wait_of(start)
            second = next((user for user in wait.users if dialect.has_role(user, Role.REPLICATE_START)), None)
            second_wait = dialect.wait_of(second) if second is not None else None
            shards = tuple(results[name] for name in labels[2] if name in results)
            gradients = tuple(argument(start, "grads"))
            found.append(Reduction(*labels, gradients, start, wait, second, second_wait, shards))
        return found

    @property
    def buckets(self) -> dict[str, BucketNodes]:
        """Return each bucket's gather and reduction in a bucketed graph, None where there is none: gathers in order,
        then reductions of what is not gathered (scalars)."""
        gathers = {gather.bucket: gather for gather in self.gathers}
        reductions = {reduction.bucket: reduction for reduction in self.reductions}
        return {n: BucketNodes(gathers.get(n), reductions.get(n)) for n in {**gathers, **reductions}}

    def positions(self) -> dict[fx.Node, int]:
        """Return the place of each node in the graph."""
        return {node: index for index, node in enumerate(self.fx_graph.nodes)}

    def next_of(self, targets: Set[Any]) -> dict[fx.Node, fx.Node]:
        """Find for each node the next call of one of these operators behind it, or the output. Compute regions are cut
        at ``dialect.COMMUNICATION`` anyway."""
        found: dict[fx.Node, fx.Node] = {}
        upcoming, calls = self.output, set(self.calls_of(targets))
        for node in reversed(self.fx_graph.nodes):
            found[node] = upcoming
            if node in calls:
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

    def uses_of(self, buffers: Collection[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
        """Find for each node which of these buffers it reads, writes or returns, itself or a view of it; those that use
        one alone, in graph order. ``alias_roots`` of all values costs several times as much. Linear in the graph."""
        uses: dict[fx.Node, list[fx.Node]] = {}
        for buffer in buffers:
            if aliased_inputs(buffer) and not isinstance(buffer.target, HigherOrderOperator):
                continue  # it lies in what it is given
            held, seen = [buffer], {buffer}
            for node in held:  # which grows
                for user in node.users:
                    of_user = uses.setdefault(user, [])
                    if not of_user or of_user[-1] is not buffer:
                        of_user.append(buffer)
                    if user not in seen and node in aliased_inputs(user):
                        seen.add(user)
                        held.append(user)
        one = {buffer: frozenset({buffer}) for buffer in buffers}
        found = ((node, uses[node]) for node in self.fx_graph.nodes if node in uses)
        return {node: one[roots[0]] if len(roots) == 1 else frozenset(roots) for node, roots in found}

    def dependencies(self) -> nx.DiGraph:
        """Build the dependency DAG: an edge from a node to each node that must come after it.

        Besides data: a write to memory (a wait, a free, an in-place copy) comes after every earlier use of that memory
        through any alias and before every later one; collectives, operators that draw random numbers, and the model's
        own collectives (of tensor parallelism) keep their order among themselves. Edges carry ``kind``: "data",
        "memory", "collective", "random" or "model_collective", and ``nbytes`` of the value on a "data" edge, else 0.
        Nodes carry ``nbytes`` of their value and ``seconds`` of compute, or of the collective that they start, by
        ``cost``; 0.0 without one.
        """
        seconds = self.cost.node_seconds(self) if self.cost is not None else {}
        dag = nx.DiGraph()
        roots = self.alias_roots()
        last_write: dict[fx.Node, fx.Node] = {}
        uses_since: dict[fx.Node, list[fx.Node]] = {}
        previous: dict[str, fx.Node] = {}

        def edge(before: fx.Node, after: fx.Node, kind: str) -> None:
            if before is not after and not dag.has_edge(before, after):
                dag.add_edge(before, after, kind=kind, nbytes=dag.nodes[before]["nbytes"] if kind == "data" else 0)

        for node in self.fx_graph.nodes:
            dag.add_node(node, seconds=seconds.get(node, 0.0), nbytes=nbytes(node.meta.get("val")))
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
        """Put all nodes into this order, placeholders first, output last. Linear. Raises ValueError on other nodes."""
        nodes = self.nodes
        if len(order) != len(nodes) or set(order) != set(nodes):
            raise ValueError(f"order: {len(order)} nodes for a graph of {len(nodes)}; give each node of the graph once")
        first = nodes[0]
        if first is not order[0]:
            first.prepend(order[0])
        for previous, node in itertools.pairwise(order):
            if previous.next is not node:
                previous.append(node)

    def replace(self, new: Mapping[fx.Node, fx.Node]) -> None:
        """Make each use of a key one of its value, and erase the keys. Linear, also where one node uses many."""
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
        """Insert a call at the current insertion point, with its fake value and the metadata of ``like`` (stack trace,
        module path). ``name`` is for readers of the printed graph only."""
        node = self.fx_graph.create_node("call_function", target, args, kwargs, name=name)
        if like is not None:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "partitioner_tag"):
                if key in like.meta:
                    node.meta[key] = like.meta[key]
        node.meta["val"] = VALUES.of(node)
        return node


def _labels(node: fx.Node) -> tuple[str, str, tuple[str, ...], int]:
    record: NodeRecord = node.meta["fsdp"]
    return record.bucket, record.unit, record.params, record.nbytes


def nbytes(value: Any) -> int:
    """Count the bytes of the tensors in a node's value; 0 where a size is symbolic."""
    sizes = (tensor.numel() * tensor.dtype.itemsize for tensor in iterate_tensors(value))
    return sum(size for size in sizes if isinstance(size, int))


def _ordered_kind(node: fx.Node) -> str | None:
    """Return the kind of a node that keeps its order among those of its kind, None for all others."""
    if node.target in dialect.STARTS or node.target is dialect.reduce_payloads:
        return "collective"
    if dialect.is_model_collective(node):
        return "model_collective"
    return "random" if is_random(node) else None
