"""Gathers come into the graphs: parameter inputs become shards with gathers, and AOTAutograd's graph gets records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.spec import ParameterSpec
from graph_fsdp.passes.transforms.edits import ancestors, without_defaults


class InsertGathers(GraphPass):
    """Retypes every parameter input to the local shard, of which ``gather_param`` makes the full parameter.

    The gathers stand together before the graph's first operator, and later passes move them; that of a DTensor, which
    is made by views of what is gathered, stands before its first use. A parameter that is sharded on another dimension
    than the first is gathered with that dimension first, and copied back to the strides of the model. What is gathered
    has a gradient also where its first use, in a block of ``torch.no_grad()``, has none, and where such a block calls a
    model that has one of ``torch.enable_grad()``.
    """

    name = "insert_gathers"
    phases = ("capture",)
    requires = ("captured",)
    provides = ("gathered",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        after_inputs = graph.placeholders[-1].next if graph.placeholders else graph.output
        positions, modes = graph.positions(), graph.calls_of([compat.set_grad_enabled])
        switches = modes if records(graph.module) else []
        for node, (parameter, shard) in context.inputs.shards.items():
            full = node.meta["example_value"]
            is_dtensor = node in context.inputs.as_used and node.users
            first = min(node.users, key=positions.__getitem__) if is_dtensor else after_inputs
            with graph.fx_graph.inserting_before(first), _recorded(switches, positions, first):
                gather = value = _gather(graph, node, parameter, context)
                if dim := parameter.shard_dim:
                    moved = graph.fx_graph.call_function(torch.movedim, (gather, 0, dim))
                    value = graph.fx_graph.call_method("contiguous", (moved,))
                if node in context.inputs.as_used:
                    value.meta["example_value"] = shard.new_empty(parameter.shape, dtype=parameter.param_dtype)
                    value = graph.fx_graph.call_function(context.inputs.as_used[node], (value,))
            for user in [user for user in node.users if user is not gather]:
                user.replace_input_with(node, value)
            value.meta["example_value"] = full
            node.meta = {**node.meta, "example_value": shard}  # torch 2.9: the inputs of torch.cond's branches share it
        return f"{len(context.inputs.shards)} parameters gathered"


def records(module: fx.GraphModule) -> bool:
    """Say whether autograd records anything of a graph that Dynamo has just traced: from its beginning, or from a
    ``torch.enable_grad()`` on."""
    parts = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    switches = [node for part in parts for node in part.find_nodes(op="call_function", target=compat.set_grad_enabled)]
    return torch.is_grad_enabled() or any(switch.args == (True,) for switch in switches)


@contextmanager
def _recorded(modes: list[fx.Node], positions: dict[fx.Node, int], place: fx.Node) -> Iterator[None]:
    """Insert nodes before ``place`` that autograd records. ``modes``: the graph's calls that switch autograd on or off,
    as ``with torch.no_grad()`` does; none if nothing is recorded; ``positions``: of its own nodes."""
    before = [mode.args for mode in modes if positions[mode] < positions[place]]
    switches = bool(modes) and (before or [(torch.is_grad_enabled(),)])[-1] == (False,)
    if switches:
        place.graph.call_function(compat.set_grad_enabled, (True,))
    yield
    if switches:
        place.graph.call_function(compat.set_grad_enabled, (False,))


def _gather(graph: Graph, shard: fx.Node, p: ParameterSpec, context: PassContext) -> fx.Node:
    if p.name in context.inputs.extensions:
        target = f"gather_{p.name.replace('.', '_')}"
        graph.module.add_submodule(target, context.inputs.extensions[p.name])
        return graph.fx_graph.call_module(target, (shard,))
    mesh, offload = p.mesh, context.model.offload
    replicate_group = mesh.replicate_group if mesh.replicas > 1 else ""
    device = offload.device if offload is not None else None
    dtypes = (p.param_dtype, p.reduce_dtype)
    arguments = (shard, list(p.stored_shape), *dtypes, p.name, mesh.group, replicate_group, device)
    return graph.fx_graph.call_function(dialect.gather_param, without_defaults(dialect.gather_param, arguments))


class Annotate(GraphPass):
    """Writes each node's record, by the operators' ``param``: AOTAutograd keeps no metadata of ours."""

    name = "annotate"
    phases = ("joint", "inference")
    requires = ("traced",)
    provides = ("annotated",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        def mark(node: fx.Node, role: Role, name: str) -> None:
            unit, bucket = context.model.spec_of(name).unit, context.model.bucket_of.get(name)
            size = nbytes(node.meta.get("val"))
            set_record(node, NodeRecord(role, unit, bucket.name if bucket else "", (name,), size))

        for node in graph.nodes:
            if node.target is dialect.gather_param:
                shard, name = operand(node), dialect.parameter_of(node)
                is_payload = name in context.model.payloads
                mark(node, Role.GATHER, name)
                mark(shard, Role.PAYLOAD if is_payload else Role.SHARD, name)
                for source in {i for inner in ancestors([shard]) for i in inner.all_input_nodes} if is_payload else ():
                    if source.op == "placeholder":
                        mark(source, Role.SHARD, name.rpartition("#")[0])
            elif node.target is dialect.reduce_payloads:
                set_record(node, NodeRecord(Role.PAYLOAD_REDUCE, "", "payloads", (), nbytes(node.meta["val"])))
            elif node.target is dialect.reduce_grad:
                mark(node, Role.REDUCE, dialect.parameter_of(node))
        return f"{len(graph.with_role(Role.GATHER))} gathers, {len(graph.with_role(Role.REDUCE))} reductions"


def mark_tangents(joint: Graph, first: int) -> None:
    """Say that the inputs from ``first`` on are gradients of outputs, which AOTAutograd alone knows, and that what
    backward reduces is reduced there, also a gradient that depends on none of them: it could be computed before."""
    for node in joint.placeholders[first:]:
        set_record(node, NodeRecord(Role.TANGENT, "", "", (), nbytes(node.meta.get("val"))))
    for node in joint.fx_graph.find_nodes(op="call_function", target=dialect.reduce_grad):
        if node.meta.get("partitioner_tag") == "is_backward":
            node.meta["partitioner_tag"] = "must_be_in_backward"
