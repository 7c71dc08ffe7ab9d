"""Operands are arguments by the names and types of an operator's schema; to FX itself an argument is anything."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from graph_fsdp.compat import OpOverload, schema_arguments


def define(
    library: torch.library.Library, schema: str, fake: Callable[..., Any], *tags: torch.Tag, **functions: Any
) -> OpOverload[..., Any]:
    """Define an operator. ``functions`` run it, by dispatch key; ``fake`` does so without values."""
    name = schema.partition("(")[0]
    library.define(schema, tags=tags)
    torch.library.register_fake(f"{library.ns}::{name}", fake, lib=library)
    for key, function in functions.items():
        library.impl(name, function, key)
    defined: OpOverload[..., Any] = getattr(getattr(torch.ops, library.ns), name).default
    return defined


def operand(node: fx.Node) -> fx.Node:
    """Return the first argument, a tensor."""
    found = node.args[0]
    assert isinstance(found, fx.Node), f"the first argument of {node} is {found!r}"
    return found


def first_operand(node: fx.Node) -> fx.Node | None:
    """Return the first argument where it is a node; None for a list, a number, or no argument."""
    found = node.args[0] if node.args else None
    return found if isinstance(found, fx.Node) else None


def operands(node: fx.Node) -> list[Any]:
    """Return the first argument, a list: of tensors, numbers, or of the values of a graph's output."""
    found = node.args[0]
    assert isinstance(found, (list, tuple)), f"the first argument of {node} is {found!r}"
    return list(found)


def item_of(node: fx.Node) -> Any:
    """Return which item a ``getitem`` takes."""
    return node.args[1]


@functools.cache
def defaults(operator: OpOverload[..., Any]) -> Mapping[str, Any]:
    """Return an operator's arguments by name, in order, with their defaults or None (cached)."""
    return {described.name: described.default_value for described in schema_arguments(operator)}


def by_name(operator: OpOverload[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names, those that are not given with their defaults."""
    known = defaults(operator)
    return {**known, **dict(zip(known, args, strict=False)), **kwargs}


def arguments(node: fx.Node) -> Any:
    """Return the arguments of a node's call as attributes of their names."""
    assert isinstance(node.target, OpOverload), f"{node} calls {node.target!r}"
    return SimpleNamespace(**by_name(node.target, node.args, node.kwargs))


def argument(node: fx.Node, name: str) -> Any:
    """Return the argument of this name. Raises AttributeError where the operator has none."""
    return getattr(arguments(node), name)


def function(node: fx.Node) -> Callable[..., Any]:
    """Return what a ``call_function`` node calls."""
    assert callable(node.target), f"{node} calls {node.target!r}"
    return node.target
