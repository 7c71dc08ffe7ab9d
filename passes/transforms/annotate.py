"""Gathers, reductions and shard inputs of the traced graph get their typed records."""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role, set_record
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.transforms.edits import ancestors


class Annotate(GraphPass):
    """AOTAutograd traces anew and keeps no metadata of ours: the operators' own ``param`` argument says what each
    node is for, and this pass writes it down once for all passes after it."""

    name = "annotate"
    phases = ("joint", "inference")
    requires = ("traced",)
    provides = ("annotated",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        def mark(node: fx.Node, role: Role, name: str) -> None:
            unit, bucket = context.model.spec_of(name).unit, context.model.bucket_of.get(name)
            size = nbytes(node.meta.get("val"))
            set_record(node, NodeRecord(role, unit, bucket.name if bucket else "", (name,), size))

        gathers = reductions = 0
        for node in graph.nodes:
            if node.target is dialect.gather_param:
                gathers += 1
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
                reductions += 1
                mark(node, Role.REDUCE, dialect.parameter_of(node))
        return f"{gathers} gathers, {reductions} reductions"


def mark_tangents(joint: Graph, first: int) -> None:
    """Say that the inputs from ``first`` on are gradients of outputs, which AOTAutograd alone knows."""
    for node in joint.placeholders[first:]:
        set_record(node, NodeRecord(Role.TANGENT, "", "", (), nbytes(node.meta.get("val"))))
