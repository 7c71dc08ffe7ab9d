"""A graph whose outputs are DTensors returns their DeviceMesh too.

Since torch 2.13 AOTAutograd passes the mesh of a DTensor through graphs as an object of its own: one that comes out is
an output, and its gradient brings the mesh again. Where both are one mesh, AOTAutograd takes the gradient's for the
output, which the forward graph does not have: "Node tangents_2 was invalid, but is output". And where a gradient's mesh
is a part of one that comes in, it is computed in the graph, by an operator that Inductor does not know.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh


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
    for node in list(joint.graph.nodes):
        if node.op == "call_function" and isinstance(_object(node), DeviceMesh):
            node.replace_all_uses_with(_constant(joint, f"_{node.name}", node))
            joint.graph.erase_node(node)


def _object(node: fx.Node) -> Any:
    """Return what a node stands for, if that is an object and no tensor."""
    value = node.meta.get("val")
    return getattr(value, "real_obj", value)


def _constant(joint: fx.GraphModule, name: str, like: fx.Node) -> fx.Node:
    """Return a node for the object that ``like`` stands for."""
    setattr(joint, name, _object(like))
    with joint.graph.inserting_after(joint.graph.find_nodes(op="placeholder")[-1]):
        node = joint.graph.create_node("get_attr", name)
    node.meta = {key: like.meta[key] for key in ("val", "desc") if key in like.meta}
    return node
