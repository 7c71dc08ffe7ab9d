"""Gathers, reductions and shard inputs of the traced graph get their typed records."""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.dialect import NodeRecord, Role
from graph_fsdp.passes.ir.graph import Graph, nbytes
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.transforms.payloads import ancestors


class Annotate(GraphPass):
    """AOTAutograd traces anew and keeps no metadata of ours: the operators' own ``param`` argument says what each
    node is for, and this pass writes it down once for all passes after it."""

    name = "annotate"
    phases = ("joint", "inference")
    requires = ("traced",)
    provides = ("annotated",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        reduced: list[str] = []
        gathers = 0
        for node in graph.nodes:
            if node.target is dialect.gather_param:
                gathers += 1
                shard, name = operand(node), dialect.parameter_of(node)
                self._record(node, Role.GATHER, name, context)
                is_payload = name in context.model.payloads
                self._record(shard, Role.PAYLOAD if is_payload else Role.SHARD, name, context)
                if is_payload:
                    self._record_inputs(shard, name.rpartition("#")[0], context)
            elif node.target is dialect.reduce_payloads:
                dialect.set_record(node, NodeRecord(Role.PAYLOAD_REDUCE, "", "payloads", (), nbytes(node.meta["val"])))
            elif node.target is dialect.reduce_grad:
                name = dialect.parameter_of(node)
                reduced.append(name)
                self._record(node, Role.REDUCE, name, context)
        for node in graph.placeholders[context.tangents]:
            dialect.set_record(node, NodeRecord(Role.TANGENT, "", "", (), nbytes(node.meta.get("val"))))
        context.reduced = frozenset(reduced)
        return f"{gathers} gathers, {len(reduced)} reductions"

    @classmethod
    def _record_inputs(cls, payload: fx.Node, name: str, context: PassContext) -> None:
        for node in {source for inner in ancestors([payload]) for source in inner.all_input_nodes}:
            if node.op == "placeholder":
                cls._record(node, Role.SHARD, name, context)

    @staticmethod
    def _record(node: fx.Node, role: Role, name: str, context: PassContext) -> None:
        parameter = context.model.spec_of(name)
        bucket = context.model.bucket_of.get(name)
        label = bucket.name if bucket else ""
        dialect.set_record(node, NodeRecord(role, parameter.unit, label, (name,), nbytes(node.meta.get("val"))))
