"""Calls of units are regions of the traced graph: the user's code says which call of which unit a node belongs to.

Dynamo writes the modules whose forward was running into ``nn_module_stack``, outermost first, and numbers repeated
calls; AOTAutograd copies it to the operators of ATen. The innermost unit on the stack is the node's; the root's own
code has a line and no module. Operators that compilers put in have neither: they belong to where what they read comes
from, or else to where their own value is read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from graph_fsdp.passes.ir.dialect import Role, has_role
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.portable import class_name
from graph_fsdp.passes.ir.spec import ModelSpec

_PART = re.compile(r"[^\[\]'\".]+")


@dataclass(frozen=True)
class UnitCall:
    """Names one call of a unit's forward. ``index`` counts calls as they begin in the graph, from 0."""

    unit: str
    index: int


def unit_calls(graph: Graph, model: ModelSpec) -> dict[fx.Node, UnitCall]:
    """Find the call of each node, but for the root's and for gradients whose stack does not say. Linear."""
    unit_of = _unit_of({p.unit for p in model.parameters.values() if p.unit})
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
        for key, (module, _) in reversed((stack or {}).items()):
            if (unit := unit_of(module)) is not None:
                found[node] = calls.setdefault((unit, key), UnitCall(unit, len(calls)))
                break
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


def _unit_of(names: Collection[str]) -> Callable[[str], str | None]:
    """Return what finds the unit of a module of a stack: the unit of the name below ``self``, the model; else the unit
    whose name the module's ends with, as of a forward that was set on the instance."""
    by_path = {tuple(name.split(".")): name for name in names}
    lengths = sorted({len(path) for path in by_path}, reverse=True)

    @functools.cache
    def find(module: str) -> str | None:
        path = module_path(module)
        if path[:1] == ("self",):
            return by_path.get(path[1:])
        return next((by_path[path[-n:]] for n in lengths if path[-n:] in by_path), None)

    return find


def innermost_module(node: fx.Node) -> tuple[str, str] | None:
    """Return name ("" for the model) and class of the innermost module that a node, or the node that it differentiates,
    was traced in; None where its metadata names none."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path, kind = next(reversed(stack.values()))
    return ".".join(module_path(path)[1:]), class_name(kind).rpartition(".")[2]


def module_path(module: str) -> tuple[str, ...]:
    """Split Dynamo's name of a module into the variable that holds the model and the names of modules.
    ``L['self'].blocks.0``, on torch 2.9 ``L['self']._modules['blocks']._modules['0']``, gives ("self", "blocks", "0").
    A model that a function around it holds is the last ``__self__``."""
    parts = [part for part in _PART.findall(module) if part != "_modules"]
    if "__self__" in parts:
        return tuple(parts[len(parts) - 1 - parts[::-1].index("__self__") :])
    return tuple(parts[1:] if parts[:1] in (["L"], ["G"]) else parts)
