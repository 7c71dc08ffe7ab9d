"""The table of a graph's buckets: when each is gathered, used, freed or reduced, and how far ahead of its use."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir.dialect import Role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.transforms.edits import wait_of

ROW_KINDS = {
    Role.GATHER_START: "gather",
    Role.KEPT: "kept",
    Role.REDUCE_START: "reduce",
    Role.REPLICATE_START: "replicate",
}
_HEADER = ("bucket", "kind", "params", "bytes", "start", "wait", "first use", "free")


@dataclass(frozen=True)
class BucketRow:
    """One gathered or reduced bucket of one graph. Positions are indices of nodes in the scheduled graph; None
    where the event is not in this graph. ``nbytes``: of the gathered buffer, or of the reduced shard. ``unit``: ""
    is the root. ``slots``: that its buffer and its landing buffer lie in."""

    name: str
    kind: str  # "gather", "kept" (received from forward), "reduce" or "replicate" (reduced again over replicas)
    parameters: tuple[str, ...]
    nbytes: int
    start: int | None
    wait: int | None
    first_use: int | None
    free: int | None
    escapes: bool
    unit: str = ""
    slots: tuple[int, ...] = ()


def bucket_rows(graph: Graph) -> list[BucketRow]:
    """In the order of the graph."""
    positions = graph.positions()

    def at(node: fx.Node | None) -> int | None:
        return None if node is None else positions[node]

    def first_use(wait: fx.Node) -> int | None:
        return min((positions[user] for user in wait.users if user.op != "output"), default=None)

    rows: dict[int, BucketRow] = {}
    for g in graph.gathers:
        kind = "kept" if g.start is None else "gather"
        times = (at(g.start), at(g.wait), at(next(iter(g.reads), None)), at(g.free))
        escapes = g.escapes and kind == "gather"
        node = g.start or g.buffer
        record = node.meta["fsdp"]
        slots = tuple(slot for slot in (record.slot, record.landing_slot) if slot is not None)
        rows[positions[node]] = BucketRow(g.bucket, kind, g.params, g.nbytes, *times, escapes, record.unit, slots)
    for r in graph.reductions:
        stages = {"reduce": (r.start, r.wait), "replicate": (r.replicate_start, r.replicate_wait)}
        for kind, (start, wait) in stages.items():
            if start is not None and wait is not None:
                record = start.meta["fsdp"]
                times = (positions[start], positions[wait], first_use(wait), None)
                rows[positions[start]] = BucketRow(r.bucket, kind, r.params, record.nbytes, *times, False, record.unit)
    kept: dict[str, list[fx.Node]] = {}
    for node in graph.with_role(Role.ACCUMULATE):
        kept.setdefault(node.meta["fsdp"].bucket, []).append(node)
    for bucket, nodes in kept.items():
        params = tuple(node.meta["fsdp"].params[0] for node in nodes)
        nbytes = sum(node.meta["fsdp"].nbytes for node in nodes)
        times = (positions[nodes[0]], None, None, None)
        unit = nodes[0].meta["fsdp"].unit
        rows[positions[nodes[0]]] = BucketRow(bucket, "keep", params, nbytes, *times, False, unit)
    for start in graph.with_role(Role.FETCH_START, Role.OFFLOAD_START):
        record, wait = start.meta["fsdp"], wait_of(start)
        kind = record.role.value.removesuffix("_start")
        times = (positions[start], positions[wait], first_use(wait), None)
        rows[positions[start]] = BucketRow(
            record.bucket, kind, record.params, record.nbytes, *times, False, record.unit
        )
    return [rows[position] for position in sorted(rows)]


def prefetch_distances(rows: list[BucketRow]) -> list[int | None]:
    """Per row: how many buckets are used for the first time while it is under way, between its start and its wait. Of
    a gather that is how many units ahead of its use it starts; None of what is not waited for."""
    uses = sorted(row.first_use for row in rows if row.kind in ("gather", "kept") and row.first_use is not None)
    return [
        None if row.start is None or row.wait is None else bisect_left(uses, row.wait) - bisect_left(uses, row.start)
        for row in rows
    ]


def plain_table(rows: list[BucketRow]) -> str:
    """As lines of text."""
    cells = [
        (
            row.name,
            row.kind,
            str(len(row.parameters)),
            f"{row.nbytes:,}",
            *("-" if v is None else str(v) for v in (row.start, row.wait, row.first_use)),
            "kept" if row.escapes else "-" if row.free is None else str(row.free),
        )
        for row in rows
    ]
    return _columns(_HEADER, cells)


def _columns(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    left = 2  # text columns; the others are numbers

    def line(row: tuple[str, ...]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  " + "  ".join(cells).rstrip()

    return "\n".join([line(header), *map(line, rows)])
