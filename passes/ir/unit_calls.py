"""Which call of which unit a node belongs to: the user's code, as regions of the traced graph.

Dynamo writes the modules whose forward was running when an operator was called into ``nn_module_stack``, outermost
first, and numbers the calls of a module that is called again. AOTAutograd copies it to the operators of ATen. The
innermost unit on the stack is the node's; the root's own code has a line and no module. Operators that compilers put
in have neither: they belong to where what they read comes from, or else to where their own value is read.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.spec import ModelSpec

# A module as Dynamo names it: L['self'].blocks.0, and on torch 2.9 L['self']._modules['blocks']._modules['0'].
_PART = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]|\.?([^.\[\]]+)")
_NOT_MODULES = frozenset({"_modules", "L", "G"})


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit's forward. ``index`` counts calls as they begin in the graph, from 0."""

    unit: str
    index: int


def unit_calls(graph: Graph, model: ModelSpec) -> dict[fx.Node, UnitCall]:
    """Node → the call that it belongs to; nodes of the root are left out. Of gradients only those are in it whose
    stack says so. Linear."""
    units = _Units({p.unit for p in model.parameters.values() if p.unit})
    calls: dict[tuple[str, str], UnitCall] = {}
    found: dict[fx.Node, UnitCall] = {}
    unknown: list[fx.Node] = []
    unit_of_value: dict[fx.Node, str] = {}  # of parameters, and of what is computed from them alone
    for node in graph.fx_graph.nodes:
        inputs = node.all_input_nodes
        if has_role(node, Role.GATHER, Role.SHARD, Role.UNPACK):
            unit_of_value[node] = node.meta["fsdp"].unit
        elif inputs and all(source in unit_of_value for source in inputs):
            unit_of_value[node] = unit_of_value[inputs[0]]
        if node.op != "call_function" or has_role(node, Role.GATHER, Role.REDUCE):
            continue
        stack = node.meta.get("nn_module_stack")
        if stack:
            key = units.innermost(stack)
            if key is not None:
                found[node] = calls.setdefault(key, UnitCall(key[0], len(calls)))
        if stack or "stack_trace" in node.meta:
            continue
        read = {unit_of_value[source] for source in inputs if source in unit_of_value}
        near = [found[s] for s in inputs if s in found and s not in unit_of_value]
        if near and (not read or near[-1].unit in read) and len(set(near)) == 1:
            found[node] = near[0]
        else:
            unknown.append(node)
    for node in reversed(unknown):
        users = {found.get(user) for user in node.users}
        if len(users) == 1 and (call := users.pop()) is not None:
            found[node] = call
    return found


class _Units:
    def __init__(self, names: Collection[str]) -> None:
        self._by_path = {tuple(name.split(".")): name for name in names}
        self._lengths = sorted({len(path) for path in self._by_path}, reverse=True)
        self._known: dict[str, str | None] = {}

    def innermost(self, stack: dict[str, tuple[str, type]]) -> tuple[str, str] | None:
        """(unit, which call of it)."""
        for key, (module, _) in reversed(stack.items()):
            if module not in self._known:
                self._known[module] = self._unit(module)
            unit = self._known[module]
            if unit is not None:
                return unit, key
        return None

    def _unit(self, module: str) -> str | None:
        """Below ``self``, the model, the unit of that name; else the unit whose name the module's ends with: a forward
        that was set on the instance reaches its model in another way."""
        path = module_path(module)
        if path[:1] == ("self",):
            return self._by_path.get(path[1:])
        return next((self._by_path[path[-n:]] for n in self._lengths if path[-n:] in self._by_path), None)


def module_path(module: str) -> tuple[str, ...]:
    """The variable that a module is in or below, and the names from there: ``("self", "blocks", "0")``."""
    parts = [first or second for first, second in _PART.findall(module)]
    return tuple(part for part in parts if part not in _NOT_MODULES)
