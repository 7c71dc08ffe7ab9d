"""Shards and gradients on the CPU: the copies between it and the device, as nodes of the graph.

FSDP2's ``CPUOffloadPolicy``. A bucket's shards are copied to the device before they are gathered (``fetch_start``,
``fetch_wait``: one flat tensor, one copy), and what a reduction yields is copied to the CPU (``offload_start``,
``offload_wait``), where the gradients of the shards are views of the copy. What is used without a gather (scalars, and
everything where nothing is sharded) is fetched too, and its gradients are offloaded.

The bucket pass inserts each pair where it is needed at once. A schedule lifts the fetches out of its way, moves
collectives as if they were not there, and then places the copies (``lift_fetches``, ``place_copies``):

- A fetch is waited for right before its gather starts, and starts behind the gathers that start before: the copy runs
  while those are under way. What it brings is held for that long: one rank's part of a bucket or two.
- Gradients are waited for at the graph's end, by the host: the CPU reads them next.

Copies are no collectives: ranks need not agree on their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, has_role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.spec import BucketSpec, ParameterSpec

aten = torch.ops.aten
prims = torch.ops.prims

HOST = torch.device("cpu")


@dataclass(frozen=True)
class Transfer:
    """A copy between the CPU and the device. ``kind``: "fetch" of shards or "offload" of gradients. ``nbytes``: of
    what is copied."""

    kind: Literal["fetch", "offload"]
    bucket: str
    params: tuple[str, ...]
    nbytes: int
    start: fx.Node
    wait: fx.Node


def find_transfers(graph: Graph) -> list[Transfer]:
    """The copies of a bucketed graph, in the order in which they start. Linear."""
    found = []
    for start in graph.with_role(Role.FETCH_START, Role.OFFLOAD_START):
        record = start.meta["fsdp"]
        kind: Literal["fetch", "offload"] = "fetch" if record.role is Role.FETCH_START else "offload"
        found.append(Transfer(kind, record.bucket, record.params, record.nbytes, start, dialect.wait_of(start)))
    return found


# What the bucket pass inserts


def fetch_shards(graph: Graph, name: str, gathers: Sequence[fx.Node], parameters: Sequence[ParameterSpec],
                 bucket: BucketSpec | None, device: torch.device) -> None:  # fmt: skip
    """What is used without a gather is fetched: ``gathers`` are the ``gather_param`` nodes of ``parameters``, of one
    bucket or, with None, of none. They are replaced."""
    positions = graph.positions()
    first_use = min((user for node in gathers for user in node.users), key=positions.__getitem__)
    shards: list[fx.Node] = [operand(node) for node in gathers]
    if bucket is None:
        *offsets, length = itertools.accumulate((p.shard_numel for p in parameters), initial=0)
    else:
        offsets, length = [bucket.offsets[p.name] for p in parameters], bucket.shard_numel
    record = NodeRecord(Role.FETCH_START, parameters[0].unit, name, tuple(p.name for p in parameters))
    with graph.fx_graph.inserting_before(first_use):
        flat = fetch(graph, shards, offsets, length, device, record)
        for node, p, begin in zip(gathers, parameters, offsets, strict=True):
            value = graph.call(aten.slice.Tensor, (flat, 0, begin, begin + p.shard_numel), name=p.name, like=node)
            value = graph.call(aten.view.default, (value, list(p.stored_shape)), name=p.name, like=node)
            if p.param_dtype is not p.dtype:
                value = graph.call(prims.convert_element_type.default, (value, p.param_dtype), like=node)
            node.replace_all_uses_with(value)
            graph.fx_graph.erase_node(node)


def fetch(
    graph: Graph, shards: list[fx.Node], offsets: list[int], length: int, device: torch.device, of: NodeRecord
) -> fx.Node:
    """Insert a copy of a bucket's ``length`` elements on ``device``, with ``shards`` at ``offsets``, at the current
    insertion point."""
    start = graph.call(dialect.fetch_start, (shards, offsets, length, device), name=f"fetch_{of.bucket}")
    size = nbytes(start.meta["val"])
    set_record(start, NodeRecord(Role.FETCH_START, of.unit, of.bucket, of.params, size))
    wait = graph.call(dialect.fetch_wait, (start,), name=f"fetched_{of.bucket}")
    return set_record(wait, NodeRecord(Role.FETCH_WAIT, of.unit, of.bucket, of.params, size))


def offload(graph: Graph, values: list[fx.Node], pin_memory: bool, of: NodeRecord) -> fx.Node:
    """Insert a copy of ``values``, one behind the other, on the CPU, at the current insertion point."""
    start = graph.call(dialect.offload_start, (values, pin_memory), name=f"offload_{of.bucket}")
    size = nbytes(start.meta["val"])
    set_record(start, NodeRecord(Role.OFFLOAD_START, of.unit, of.bucket, of.params, size))
    wait = graph.call(dialect.offload_wait, (start,), name=f"offloaded_{of.bucket}")
    return set_record(wait, NodeRecord(Role.OFFLOAD_WAIT, of.unit, of.bucket, of.params, size))


def drop_unread_fetches(graph: Graph) -> None:
    """Fetches whose gather is gone, because backward received the bucket, go too."""
    for wait in graph.with_role(Role.FETCH_WAIT):
        if not wait.users:
            start = operand(wait)
            graph.fx_graph.erase_node(wait)
            graph.fx_graph.erase_node(start)


# When copies run


def lift_fetches(graph: Graph) -> None:
    """Put the fetches of gathers right behind the inputs, in their order."""
    fetched = list(filter(None, map(_fetched_by, graph.with_role(Role.GATHER_START))))
    anchor = graph.placeholders[-1] if fetched else None  # shards are inputs
    for wait in fetched:
        for node in (wait.args[0], wait):
            assert isinstance(anchor, fx.Node) and isinstance(node, fx.Node)
            anchor.append(node)
            anchor = node


def place_copies(graph: Graph) -> None:
    """See the module. Linear."""
    runs: list[list[fx.Node]] = []  # what reads a fetch, or waits for it, without a computation in between
    previous: fx.Node | None = None
    positions = graph.positions()
    for node in graph.with_role(Role.GATHER_START, Role.FETCH_WAIT):
        if has_role(node, Role.GATHER_START):
            wait = _fetched_by(node)
            if wait is None:
                continue
            node.prepend(wait)
        elif any(has_role(user, Role.GATHER_START) for user in node.users):
            continue
        adjacent = previous is not None and positions[node] - positions[previous] == 1
        if adjacent and has_role(node, Role.GATHER_START):
            runs[-1].append(node)
        else:
            runs.append([node])
        previous = node
    for index, run in enumerate(runs):
        waits = [_fetched_by(node) or node for node in run]
        anchor = runs[index - 1][-1] if index else None
        for wait in waits:
            start = wait.args[0]
            assert isinstance(start, fx.Node)
            if anchor is None:
                waits[0].prepend(start)
            else:
                anchor.append(start)
                anchor = start
    for wait in graph.with_role(Role.OFFLOAD_WAIT):
        for node in [wait, *_results(wait)]:
            graph.output.prepend(node)


def _results(wait: fx.Node) -> list[fx.Node]:
    """What is computed of a copy: gradients, as views of it."""
    found, frontier = [], [wait]
    while frontier:
        frontier = list(dict.fromkeys(u for node in frontier for u in node.users if u.op != "output"))
        found += frontier
    return found


def _fetched_by(gather: fx.Node) -> fx.Node | None:
    """The copy that a gather reads; None where it reads shards, or is none."""
    if not has_role(gather, Role.GATHER_START):
        return None
    source = dialect.argument(gather, "shards")[0]
    return source if has_role(source, Role.FETCH_WAIT) else None


# What the verifier asks


def wrong_fetch(gather: fx.Node, bucket: BucketSpec) -> str | None:
    """What is wrong with the copy that a gather reads."""
    wait = _fetched_by(gather)
    assert wait is not None
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    found = [shard.meta["fsdp"].params[0] for shard in dialect.argument(start, "shards")]
    offsets, length = dialect.argument(start, "offsets"), dialect.argument(start, "length")
    if [bucket.offsets.get(name) for name in found] != list(offsets) or length != bucket.shard_numel:
        return f"shards of {', '.join(found)} are said to lie at {offsets} of {length} elements"
    if (list(dialect.argument(gather, "offsets")), dialect.argument(gather, "length")) != (list(offsets), length):
        return f"{gather} reads {dialect.argument(gather, 'offsets')} of a copy with shards at {offsets}"
    numels = [p.shard_numel for name in found for p in bucket.parameters if p.name == name]
    if list(dialect.argument(gather, "numels")) != numels:
        return f"{gather} reads {dialect.argument(gather, 'numels')} elements of shards of {numels}"
    return None
