"""The table of a graph's buckets: when each is gathered, used, freed or reduced, and how far ahead of its use."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph

ROW_KINDS = {
    Role.GATHER_START: "gather",
    Role.KEPT: "kept",  # received from forward
    Role.REDUCE_START: "reduce",
    Role.REPLICATE_START: "replicate",  # reduced again over replicas
    Role.ACCUMULATE: "keep",  # gradients, for a later graph
    Role.FETCH_START: "fetch",  # shards, from the CPU
    Role.OFFLOAD_START: "offload",  # gradients, to the CPU
}


@dataclass(frozen=True)
class BucketRow:
    """One gathered or reduced bucket of one graph. Positions are indices of nodes in the scheduled graph; None
    where the event is not in this graph. ``nbytes``: of the gathered buffer, or of the reduced shard. ``unit``: ""
    is the root. ``kind``: one of ``ROW_KINDS``. ``slots``: that its buffer and its landing buffer lie in."""

    name: str
    kind: str
    parameters: tuple[str, ...]
    nbytes: int
    start: int | None = None
    wait: int | None = None
    first_use: int | None = None
    free: int | None = None
    escapes: bool = False
    unit: str = ""
    slots: tuple[int, ...] = ()


def bucket_rows(graph: Graph) -> list[BucketRow]:
    """In the order of the graph. Gradients of one bucket that are kept for a later graph are one row."""
    positions = graph.positions()
    gathers = {gather.start or gather.buffer: gather for gather in graph.gathers}
    rows: dict[fx.Node | str, list[fx.Node]] = {}
    for node in graph.with_role(*ROW_KINDS):
        kept = has_role(node, Role.ACCUMULATE)
        rows.setdefault(node.meta["fsdp"].bucket if kept else node, []).append(node)

    def row(nodes: list[fx.Node]) -> BucketRow:
        node, records = nodes[0], [node.meta["fsdp"] for node in nodes]
        record, kind = records[0], ROW_KINDS[records[0].role]
        events: dict[str, fx.Node | None] = {"start": node}
        gather = gathers.get(node)
        if gather is not None:
            first_use = next(iter(gather.reads), None)
            events = {"start": gather.start, "wait": gather.wait, "first_use": first_use, "free": gather.free}
        elif kind != "keep":
            wait = wait_of(node)
            uses = (user for user in wait.users if user.op != "output")
            events |= {"wait": wait, "first_use": min(uses, key=positions.__getitem__, default=None)}
        return BucketRow(
            record.bucket,
            kind,
            tuple(name for r in records for name in r.params),
            sum(r.nbytes for r in records),
            escapes=gather is not None and gather.escapes and kind == "gather",
            unit=record.unit,
            slots=tuple(slot for slot in (record.slot, record.landing_slot) if slot is not None),
            **{name: positions[event] for name, event in events.items() if event is not None},
        )

    return [row(nodes) for nodes in rows.values()]


def wait_of(start: fx.Node) -> fx.Node:
    """The node that waits for a collective or a copy; the start itself if none does."""
    waits = (user for user in start.users if user.target in dialect.TRANSFER_WAITS and user.args[0] is start)
    return next(waits, start)


def prefetch_distances(rows: list[BucketRow]) -> list[int | None]:
    """Per row: how many buckets are used for the first time while it is under way, between its start and its wait. Of
    a gather that is how many units ahead of its use it starts; None of what is not waited for."""
    uses = sorted(row.first_use for row in rows if row.kind in ("gather", "kept") and row.first_use is not None)
    return [
        None if row.start is None or row.wait is None else bisect_left(uses, row.wait) - bisect_left(uses, row.start)
        for row in rows
    ]
