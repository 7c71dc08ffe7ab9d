"""Arguments of nodes with the types that an operator's schema gives them; to FX itself an argument is anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from graph_fsdp.compat import OpOverload, schema_arguments


def operand(node: fx.Node, index: int = 0) -> fx.Node:
    """An argument that is a tensor."""
    found = node.args[index]
    assert isinstance(found, fx.Node), f"argument {index} of {node} is {found!r}"
    return found


def operands(node: fx.Node, index: int = 0) -> list[Any]:
    """An argument that is a list: of tensors, numbers, or of the values of a graph's output."""
    found = node.args[index]
    assert isinstance(found, (list, tuple)), f"argument {index} of {node} is {found!r}"
    return list(found)


def overload(node: fx.Node) -> OpOverload[..., Any]:
    assert isinstance(node.target, OpOverload), f"{node} calls {node.target!r}"
    return node.target


def has_argument(node: fx.Node, name: str) -> bool:
    """Whether the schema of the operator that a node calls has an argument of this name."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.name == name for argument in schema.arguments)


def argument(node: fx.Node, name: str) -> Any:
    """The argument that the schema of the operator calls ``name``, or the default that it has there."""
    for index, described in enumerate(schema_arguments(overload(node))):
        if described.name == name:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(name)
            return described.default_value if value is None else value
    raise KeyError(f"{node.target} has no argument {name!r}")


def function(node: fx.Node) -> Callable[..., Any]:
    """What a ``call_function`` node calls."""
    assert callable(node.target), f"{node} calls {node.target!r}"
    return node.target


def replaced(args: Any, kwargs: Any, of: Callable[[fx.Node], Any]) -> Any:
    """The arguments of a node, with what ``of`` says of each node in the place of the node."""
    return fx.map_arg((args, kwargs), of)
