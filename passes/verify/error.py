"""The verifier's error says which pass broke which invariant, at which node, and of which parameters."""

from __future__ import annotations

from torch import fx

from graph_fsdp.passes.ir.dialect import record
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.graph import Graph


class VerificationError(RuntimeError):
    """A pass left a graph that breaks an invariant. Names the pass, the invariant, the node and the parameters: those
    that the node's record names, or else those that it is computed from most directly."""

    def __init__(
        self,
        pass_name: str,
        graph: Graph,
        invariant: str,
        node: fx.Node | None,
        detail: str,
        parameters: tuple[str, ...] = (),
    ) -> None:
        self.pass_name, self.invariant, self.phase = pass_name, invariant, graph.phase
        self.node = node.name if node is not None else None
        self.parameters = parameters or (_parameters(node) if node is not None else ())
        where = f"\n  node: {node.name}: {node.format_node()}" if node is not None else ""
        params = f"\n  parameters: {', '.join(self.parameters)}" if self.parameters else ""
        super().__init__(
            f"pass {pass_name!r} broke the {graph.phase} graph: {detail}\n  invariant: {invariant}{where}{params}"
        )


def _parameters(node: fx.Node) -> tuple[str, ...]:
    """The parameters of the node's record, or of the records that are the fewest operators above it; views are none."""
    level = [node] if node.op != "output" else []
    seen: set[fx.Node] = set()
    while level:
        names: list[str] = []
        above: list[fx.Node] = []
        for current in level:  # grows
            if current in seen:
                continue
            seen.add(current)
            found = record(current)
            if found is not None and found.params:
                names += found.params
            elif is_view(current):
                level += current.all_input_nodes
            else:
                above += current.all_input_nodes
        if names:
            return tuple(dict.fromkeys(names))
        level = above
    return ()
