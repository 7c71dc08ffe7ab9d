"""Dynamo's graph: a full-shape parameter input becomes a shard input and a gather."""

from __future__ import annotations

from graph_fsdp.passes import dialect
from graph_fsdp.passes.graph import Graph
from graph_fsdp.passes.pipeline import GraphPass, PassContext


class InsertGathers(GraphPass):
    """Every parameter input is retyped to the local shard; ``gather_param`` makes the full parameter of it.

    The gathers stand together before the graph's first operator: where they run is for later passes to say.
    """

    name = "insert_gathers"
    phases = ("capture",)
    requires = ("captured",)
    provides = ("gathered",)

    def run(self, graph: Graph, context: PassContext) -> str | None:
        after_inputs = graph.placeholders[-1].next if graph.placeholders else graph.output
        for node, (parameter, shard) in context.shard_inputs.items():
            full = node.meta["example_value"]
            with graph.fx_graph.inserting_before(after_inputs):
                gather = graph.fx_graph.call_function(
                    dialect.gather_param,
                    (
                        node,
                        list(parameter.shape),
                        parameter.param_dtype,
                        parameter.reduce_dtype,
                        parameter.name,
                        context.model.group,
                        *([context.model.replicate_group] if context.model.replicas > 1 else []),
                    ),
                )
            for user in [user for user in node.users if user is not gather]:
                user.replace_input_with(node, gather)
            gather.meta["example_value"] = full
            node.meta = {**node.meta, "example_value": shard}  # torch 2.9: the inputs of torch.cond's branches share it
        return f"{len(context.shard_inputs)} parameters gathered"
