"""Parameters that travel as something else: what is gathered of them is computed from their shards, in the graph.

FSDP2's tensor extensions. ``fsdp_pre_all_gather`` makes payloads of a shard (int8 values and scales, say), each of
which is gathered by a ``gather_param`` of its own; ``fsdp_post_all_gather`` makes the parameter of what was gathered.
Both are traced like the model, so compilers fuse what they compute with what is around it. The payloads of a unit are
in buckets of their own, by dtype; the parameter's shard stays in a bucket that is reduced and never gathered.

What is computed before a gather reads shards only. A schedule lifts it out of its way, and puts it right in front of
the gather again (``lift_payloads``, ``place_payloads``).
"""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.dialect import Role, has_role
from graph_fsdp.passes.graph import Graph


def ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """The nodes and all that they are computed from, without inputs of the graph."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found and node.op != "placeholder":
            found.add(node)
            stack += node.all_input_nodes
    return found


def lift_payloads(graph: Graph) -> None:
    """Put what computes payloads right behind the inputs."""
    payloads = graph.with_role(Role.PAYLOAD)
    if not payloads:
        return
    anchor = graph.placeholders[-1]
    for node in _in_order(graph, ancestors(payloads)):
        anchor.append(node)
        anchor = node


def place_payloads(graph: Graph) -> None:
    """Put what computes payloads right in front of the first gather that sends any of it."""
    payloads = graph.with_role(Role.PAYLOAD)
    if not payloads:
        return
    positions = graph.positions()
    placed: set[fx.Node] = set()
    for start in graph.with_role(Role.GATHER_START):
        sent = [s for s in dialect.argument(start, "shards") if has_role(s, Role.PAYLOAD)]
        for node in sorted(ancestors(sent) - placed, key=positions.__getitem__):
            start.prepend(node)
            placed.add(node)


def drop_unread_payloads(graph: Graph) -> None:
    """Payloads whose gather is gone, because backward received the bucket, go too, and what only they read."""
    stack = [node for node in graph.with_role(Role.PAYLOAD) if not node.users]
    while stack:
        node = stack.pop()
        if node.users or node.op == "placeholder":
            continue
        sources = list(node.all_input_nodes)
        graph.fx_graph.erase_node(node)
        stack += [s for s in sources if not s.users]


def _in_order(graph: Graph, nodes: set[fx.Node]) -> list[fx.Node]:
    return [node for node in graph.fx_graph.nodes if node in nodes] if nodes else []
