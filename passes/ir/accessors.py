"""Buckets as a pass wants them: what belongs to one gather or one reduction, found in one walk of the graph.

For graphs that are bucketed (the bucket pass has run) and that the verifier accepts, which every graph is that a pass
is given. The objects say how the graph was when they were made; ask the graph again after an edit.
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
    """One gathered bucket of one graph.

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
        """The parameters, as views of the buffer."""
        return tuple(node for node in self.reads if dialect.has_role(node, Role.UNPACK))

    @property
    def uses(self) -> tuple[fx.Node, ...]:
        """What computes with the parameters: ``reads`` without views."""
        return tuple(node for node in self.reads if not is_view(node))


@dataclass(frozen=True)
class Reduction:
    """One bucket of gradients in the backward graph.

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
    """What a graph does with one bucket."""

    gather: Gather | None
    reduction: Reduction | None


def find_gathers(graph: Graph) -> list[Gather]:
    """The gathered buckets in the order in which they start, those received from forward first. Linear."""
    roots = graph.alias_roots()
    buffers = graph.with_role(Role.KEPT, Role.GATHER_START)
    reads: dict[fx.Node, list[fx.Node]] = {buffer: [] for buffer in buffers}
    waits: dict[fx.Node, fx.Node] = {}
    frees: dict[fx.Node, fx.Node] = {}
    escaping: set[fx.Node] = set()
    for node in graph.fx_graph.nodes:
        for root in {root for source in node.all_input_nodes for root in roots[source]} & reads.keys():
            if node.target is dialect.all_gather_wait:
                waits[root] = node
            elif node.target is dialect.free:
                frees[root] = node
            elif node.op == "output":
                escaping.add(root)
            else:
                reads[root].append(node)
    return [
        Gather(
            *_labels(buffer),
            start=None if dialect.has_role(buffer, Role.KEPT) else buffer,
            wait=waits.get(buffer),
            buffer=waits.get(buffer, buffer),
            reads=tuple(reads[buffer]),
            free=frees.get(buffer),
            escapes=buffer in escaping,
        )
        for buffer in buffers
    ]


def find_reductions(graph: Graph) -> list[Reduction]:
    """The reduced buckets in the order in which they start. Linear."""
    starts: list[fx.Node] = []
    others: dict[tuple[str, Role], fx.Node] = {}
    results: dict[str, fx.Node] = {}
    for node in graph.fx_graph.nodes:
        record = dialect.record(node)
        if record is None:
            continue
        if record.role is Role.REDUCE_START:
            starts.append(node)
        elif record.role is Role.SHARD_GRAD:
            results[record.params[0]] = node
        elif record.role in (Role.REDUCE_WAIT, Role.REPLICATE_START, Role.REPLICATE_WAIT):
            others[record.bucket, record.role] = node
    found = []
    for start in starts:
        labels = _labels(start)
        found.append(
            Reduction(
                *labels,
                gradients=tuple(dialect.argument(start, "grads")),
                start=start,
                wait=others[labels[0], Role.REDUCE_WAIT],
                replicate_start=others.get((labels[0], Role.REPLICATE_START)),
                replicate_wait=others.get((labels[0], Role.REPLICATE_WAIT)),
                results=tuple(results[name] for name in labels[2] if name in results),
            )
        )
    return found


def find_buckets(graph: Graph) -> dict[str, BucketNodes]:
    """Bucket → its gather and its reduction in the graph, None where there is none: gathers in order, then reductions
    of what is not gathered (scalars)."""
    gathers = {gather.bucket: gather for gather in find_gathers(graph)}
    reductions = {reduction.bucket: reduction for reduction in find_reductions(graph)}
    return {name: BucketNodes(gathers.get(name), reductions.get(name)) for name in {**gathers, **reductions}}


def _labels(node: fx.Node) -> tuple[str, str, tuple[str, ...], int]:
    record: NodeRecord = node.meta["fsdp"]
    return record.bucket, record.unit, record.params, record.nbytes
