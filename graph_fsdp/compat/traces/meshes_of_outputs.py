"""A graph whose outputs are DTensors returns their DeviceMesh too.

Since torch 2.13 AOTAutograd passes the mesh of a DTensor through graphs as an object of its own: one that comes out is
an output, and its gradient brings the mesh again. Where both are one mesh, AOTAutograd takes the gradient's for the
output, which the forward graph does not have: "Node tangents_2 was invalid, but is output".
"""

from __future__ import annotations

from typing import Any

from torch import fx


def take_meshes_from_forward(joint: fx.GraphModule, forward_inputs: int, forward_outputs: int) -> None:
    """Have forward return each mesh that a gradient brings as a constant of the graph. ``forward_inputs``,
    ``forward_outputs``: how many of the joint graph's there are, before those of backward."""
    tangents = set(joint.graph.find_nodes(op="placeholder")[forward_inputs:])
    (output,) = joint.graph.find_nodes(op="output")
    (returned,) = output.args
    values = list(returned)
    for place, node in enumerate(values[:forward_outputs]):
        if node in tangents and hasattr(node.meta.get("val"), "real_obj"):
            values[place] = _constant(joint, f"_mesh_of_output{place}", node)
    output.args = (type(returned)(values),)


def _constant(joint: fx.GraphModule, name: str, like: fx.Node) -> fx.Node:
    """Return a node for the object that ``like`` stands for."""
    value: Any = like.meta["val"]
    setattr(joint, name, value.real_obj)
    with joint.graph.inserting_after(joint.graph.find_nodes(op="placeholder")[-1]):
        node = joint.graph.create_node("get_attr", name)
    node.meta = {key: like.meta[key] for key in ("val", "desc") if key in like.meta}
    return node
