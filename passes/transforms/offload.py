"""Shards and gradients on the CPU: the copies between it and the device, as nodes of the graph.

FSDP2's ``CPUOffloadPolicy``. The bucket pass copies a bucket's shards to the device before they are gathered (one
flat tensor), and what a reduction yields to the CPU, where the gradients of the shards are views of the copy. What is
used without a gather (scalars, and everything where nothing is sharded) is copied too. A schedule lifts what feeds
gathers, fetches and payloads, out of its way (``lift``), moves collectives as if it were not there, and then places the
copies (``place_copies``):

- A fetch is waited for right before its gather starts, and starts behind the gathers that start before: the copy runs
  while those are under way. What it brings is held for that long: one rank's part of a bucket or two.
- Gradients are waited for at the graph's end, by the host: the CPU reads them next.

Copies are no collectives: ranks need not agree on their order.
"""

from __future__ import annotations

import torch
from torch import fx

from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand, operands
from graph_fsdp.passes.transforms.edits import ancestors, move_with_results, put_behind_inputs

HOST = torch.device("cpu")


def lift(graph: Graph) -> None:
    """Put what feeds gathers right behind the inputs."""
    sent = [shard for start in graph.with_role(Role.GATHER_START) for shard in operands(start)]
    put_behind_inputs(graph, ancestors([*sent, *graph.with_role(Role.PAYLOAD)]))


def place_copies(graph: Graph) -> None:
    """See the module. Linear."""
    runs: list[list[fx.Node]] = []  # what reads a fetch, or waits for it, without a computation in between
    previous: fx.Node | None = None
    for node in graph.with_role(Role.GATHER_START, Role.FETCH_WAIT):
        adjacent = node.prev is previous
        if has_role(node, Role.GATHER_START):
            if (wait := _fetched_by(node)) is None:
                continue
            node.prepend(wait)
        elif any(has_role(user, Role.GATHER_START) for user in node.users):
            continue
        if adjacent and has_role(node, Role.GATHER_START):
            runs[-1].append(node)
        else:
            runs.append([node])
        previous = node
    for index, run in enumerate(runs):
        starts = [operand(_fetched_by(node) or node) for node in run]
        if index:
            for start in reversed(starts):
                runs[index - 1][-1].append(start)
        else:
            for start in starts:
                (_fetched_by(run[0]) or run[0]).prepend(start)
    for wait in graph.with_role(Role.OFFLOAD_WAIT):
        move_with_results(wait, before=graph.output)


def _fetched_by(gather: fx.Node) -> fx.Node | None:
    """The copy that a gather reads; None where it reads shards, or is none."""
    if not has_role(gather, Role.GATHER_START):
        return None
    source: fx.Node = operands(gather)[0]
    return source if has_role(source, Role.FETCH_WAIT) else None
