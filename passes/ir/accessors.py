"""Accessors find the nodes that belong to one gather or one reduction, in one walk of the graph.

They are for graphs that are bucketed (the bucket pass has run) and that the verifier accepts, which every graph is that
a pass is given. What they return says how the graph was; ask the graph again after an edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.effects import is_view

if TYPE_CHECKING:
    from graph_fsdp.passes.ir.graph import Graph


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
        """The nodes that are parameters, as views of the buffer."""
        return tuple(node for node in self.reads if dialect.has_role(node, Role.UNPACK))

    @property
    def uses(self) -> tuple[fx.Node, ...]:
        """The nodes that compute with the parameters: ``reads`` without views."""
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


def find_gathers(graph: Graph) -> list[Gather]:
    """Find the gathered buckets in the order in which they start, those received from forward first. Linear."""
    roots = graph.alias_roots()
    buffers = graph.with_role(Role.KEPT, Role.GATHER_START)
    reads: dict[fx.Node, list[fx.Node]] = {buffer: [] for buffer in buffers}
    escaping: set[fx.Node] = set()
    for node in graph.fx_graph.nodes:
        for root in {root for source in node.all_input_nodes for root in roots[source]} & reads.keys():
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


def find_reductions(graph: Graph) -> list[Reduction]:
    """Find the reduced buckets in the order in which they start. Linear."""
    results = {node.meta["fsdp"].params[0]: node for node in graph.with_role(Role.SHARD_GRAD)}
    found = []
    for start in graph.with_role(Role.REDUCE_START):
        labels, wait = _labels(start), dialect.wait_of(start)
        second = next((user for user in wait.users if dialect.has_role(user, Role.REPLICATE_START)), None)
        second_wait = dialect.wait_of(second) if second is not None else None
        shards = tuple(results[name] for name in labels[2] if name in results)
        gradients = tuple(dialect.argument(start, "grads"))
        found.append(Reduction(*labels, gradients, start, wait, second, second_wait, shards))
    return found


def _labels(node: fx.Node) -> tuple[str, str, tuple[str, ...], int]:
    record: NodeRecord = node.meta["fsdp"]
    return record.bucket, record.unit, record.params, record.nbytes
