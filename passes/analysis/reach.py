"""The joint graph says which gradients are computed from which outputs' gradients.

A loss that leaves outputs out has no gradient for the parameters that only those outputs are made of. The graph of
backward is one for all losses: it computes them of zeros. Which parameters these are is read off the joint graph,
before buckets tie their reductions together.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph


@dataclass(frozen=True)
class Reach:
    """Per gradient that a joint graph returns: ``tangents``, a bit for each tangent that it is computed of; and
    ``parameters``, the name of the sharded parameter that it belongs to, "" for another input."""

    tangents: tuple[int, ...]
    parameters: tuple[str, ...]
    number_of_tangents: int

    @property
    def uncertain(self) -> tuple[int, ...]:
        """The places of gradients that some uses of the outputs have none of."""
        everything = (1 << self.number_of_tangents) - 1
        return tuple(index for index, bits in enumerate(self.tangents) if bits not in (0, everything))

    @property
    def uncertain_parameters(self) -> tuple[str, ...]:
        return tuple(self.parameters[index] for index in self.uncertain if self.parameters[index])


def find_reach(joint: Graph, forward_outputs: int) -> Reach:
    """Of a joint graph that the bucket pass has not seen. Linear in the graph."""
    given = joint.with_role(Role.TANGENT)
    bits: dict[fx.Node, int] = {node: 1 << index for index, node in enumerate(given)}
    reduced: dict[fx.Node, str] = {}
    for node in joint.fx_graph.nodes:
        if node.op == "placeholder":
            continue
        found, name = 0, ""
        for source in node.all_input_nodes:
            found |= bits.get(source, 0)
            name = name or reduced.get(source, "")
        if found:
            bits[node] = found
            if has_role(node, Role.REDUCE):
                name = node.meta["fsdp"].params[0]
            reduced[node] = name
    gradients = joint.outputs[forward_outputs:]
    return Reach(
        tuple(bits.get(node, 0) if isinstance(node, fx.Node) else 0 for node in gradients),
        tuple(reduced.get(node, "") if isinstance(node, fx.Node) else "" for node in gradients),
        len(given),
    )
