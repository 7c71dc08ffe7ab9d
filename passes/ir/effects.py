"""Effects say what an operator does besides computing: views of its inputs, writes to them, random numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.operands import arguments

# A list of views (split, chunk, unbind): its schema annotates the list's elements, which Python does not see, and says
# of the input, ``Tensor(a -> *)``, that its memory goes into a container.
_IN_LIST = "*"
# Views whose schemas do not say so.
_UNANNOTATED_VIEWS = frozenset({torch.ops.aten._unsafe_view.default, operator.getitem})


_Places = tuple[tuple[int, str], ...]  # (position, name) of arguments
_Effects = tuple[_Places, _Places]
_ANYWHERE: _Places = ((-1, ""),)  # in any argument: of a higher-order operator


_KNOWN: dict[int, tuple[Any, _Effects]] = {}  # by identity: to hash an operator is a call of Python's


def memory_effects(target: Any) -> _Effects:
    """Return the arguments whose memory an operator's value may share, and those that it writes to (cached)."""
    known = _KNOWN.get(id(target))
    if known is None:
        known = _KNOWN[id(target)] = target, _memory_effects(target)  # held: its identity stays its own
    return known[1]


def _memory_effects(target: Any) -> _Effects:
    if target in _UNANNOTATED_VIEWS:
        return ((0, ""),), ()
    if isinstance(target, compat.HigherOrderOperator):
        return _ANYWHERE, ()
    schema = getattr(target, "_schema", None)
    if schema is None:
        return (), ()
    returned = {name for r in schema.returns if r.alias_info for name in r.alias_info.before_set}
    annotated = [((index, a.name), a.alias_info) for index, a in enumerate(schema.arguments) if a.alias_info]
    aliased = (place for place, alias in annotated if alias.before_set & returned or _IN_LIST in alias.after_set)
    return tuple(aliased), tuple(place for place, alias in annotated if alias.is_write)


def _nodes_at(node: fx.Node, places: _Places) -> list[fx.Node]:
    found: list[fx.Node] = []
    if not places:
        return found
    args = node.args
    for index, name in places:
        value = args[index] if index < len(args) else node.kwargs.get(name)
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [v for v in value if isinstance(v, fx.Node)]
    return found


def aliased_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs whose memory the value may share, by the schema; all of a higher-order operator."""
    if node.op != "call_function":
        return []
    aliased = memory_effects(node.target)[0]
    if not aliased:
        return []
    return node.all_input_nodes if aliased is _ANYWHERE else _nodes_at(node, aliased)


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the inputs that the node writes to, by its schema. A wait and a free write to their buffer."""
    return _nodes_at(node, memory_effects(node.target)[1]) if node.op == "call_function" else []


def is_view(node: fx.Node) -> bool:
    """Say whether the value is memory of an input, and nothing is computed."""
    if node.op != "call_function":
        return False
    aliased, mutated = memory_effects(node.target)
    if not aliased or aliased is _ANYWHERE or not _nodes_at(node, aliased):
        return False
    return not mutated or not _nodes_at(node, mutated) or node.target in dialect.WAITS


def is_cheap(node: fx.Node) -> bool:
    """Say whether a call costs next to nothing and fuses into its neighbours: views, casts, pointwise operators."""
    if node.op != "call_function" or node.target in dialect.EXECUTED:
        return False
    return bool(aliased_inputs(node)) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def is_random(node: fx.Node) -> bool:
    """Say whether torch tags the operator of a call as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def draws(node: fx.Node) -> bool:
    """Say whether a call draws random numbers. Attention, which torch tags so, has an argument for it."""
    return is_random(node) and getattr(arguments(node), "dropout_p", None) != 0
