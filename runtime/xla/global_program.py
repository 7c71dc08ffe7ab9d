"""A graph of the global view as a program: its inputs are sharded as XLA's partitioner left them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.compat import xla_hlo as compat_xla_hlo
from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.runtime.regions.region_cache import RegionCache
from graph_fsdp.runtime.slots import GatheredBytes
from graph_fsdp.runtime.xla import random
from graph_fsdp.runtime.xla.host_fallbacks import OnHostFallback
from graph_fsdp.runtime.xla.lower import Lowered
from graph_fsdp.runtime.xla.placement import Placement
from graph_fsdp.runtime.xla.program import XlaProgram


class GlobalProgram(XlaProgram):
    """Inputs are taken as they are sharded at the first run. Parameters and what forward saves always are; what comes
    from the user is sharded that way first, where it is not."""

    can_run_on_host = True

    def __init__(
        self,
        graph: Graph,
        module: fx.GraphModule,
        cache: RegionCache,
        counter: GatheredBytes,
        each: Placement,
        on_host_fallback: OnHostFallback = "error",
    ) -> None:
        lowered, entries = _with_returns(module), [None] * len(graph.placeholders)
        super().__init__(graph, lowered, entries, cache, counter, each=each, on_host_fallback=on_host_fallback)
        own = {n.name for n in graph.placeholders if has_role(n, Role.SHARD)}
        if graph.phase == "backward":  # of what it receives only the gradients of outputs are new to the program
            own = {n.name for n in graph.placeholders if not has_role(n, Role.TANGENT)}
            own |= {n.name for n in module.graph.nodes if has_role(n, Role.KEPT)}
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        self._from_user = [place for place, node in enumerate(placeholders) if node.name not in own]
        self.like: list[Any] = []  # of inputs, how they were sharded at the first run

    def _seeds(self) -> Tensor:
        """One number, from the CPU's generator: what is drawn is drawn for the global batch."""
        return torch.randint(2**31 - 1, (), dtype=torch.int32).to(compat_xla.device())

    def fresh_inputs(self, inputs: Sequence[Any]) -> list[Any]:
        self.like = compat_xla_hlo.descriptions(inputs)
        return compat_xla_hlo.fresh_inputs(self.like)

    def _placed(self, inputs: list[Any]) -> list[Any]:
        places = [place for place in self._from_user if isinstance(inputs[place], Tensor)]
        for place, spec in zip(places, compat_xla.sharding_specs([inputs[place] for place in places]), strict=True):
            like = self.like[place]
            if spec != like.spec:
                inputs[place] = compat_xla_hlo.annotated(inputs[place], like.sharding)
        if compat_xla.pending([value for value in inputs if isinstance(value, Tensor)]):
            compat_xla.sync(wait=True)
        return inputs


def _with_returns(module: fx.GraphModule) -> Lowered:
    """The graph with each result once, and without what it only hands on; a seed that it draws from is its last
    input."""
    output = next(node for node in reversed(module.graph.nodes) if node.op == "output")
    places = {node: place for place, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder")}
    results: dict[fx.Node, int] = {}
    returns: list[tuple[str, Any]] = []
    for value in output.args[0]:
        if not isinstance(value, fx.Node):
            returns.append(("constant", value))
        elif value in places:
            returns.append(("input", places[value]))
        else:
            returns.append(("result", results.setdefault(value, len(results))))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in places:
        copies[node] = graph.node_copy(node)
    seeds = [node for node in module.graph.nodes if node.target is random.seed]
    if seeds:
        seed = graph.placeholder("seed")
        seed.meta = dict(seeds[0].meta)
        copies.update(dict.fromkeys(seeds, seed))
    graph.graph_copy(module.graph, copies)
    graph.output(tuple(copies[value] for value in results))
    graph.eliminate_dead_code()
    return Lowered(fx.GraphModule(module, graph), tuple(returns), bool(seeds))
