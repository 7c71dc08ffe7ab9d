"""FX graphs are built and copied without checks of what is known to hold."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import unittest.mock
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch._functorch import compile_utils, partitioners
from torch._guards import TracingContext
from torch.fx import graph as fx_graph
from torch.fx.immutable_collections import immutable_list
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten

# From torch 2.13 on each new node looks through the leaves of its arguments for symbolic sizes, to warn whoever has put
# them there: here that is torch's own tracer. What ``torch.fx.graph`` knows of trees, but for such leaves.
_TREES: Any = getattr(fx_graph, "pytree", None)
_WITHOUT_LEAVES = _TREES and types.SimpleNamespace(**{**vars(_TREES), "tree_iter": lambda *_, **__: ()})

# Returns the nodes that a node reads, in order, as ``all_input_nodes`` does, without a copy: not while it is changed.
inputs_of: Callable[[torch.fx.Node], Collection[torch.fx.Node]] = operator.attrgetter("_input_nodes")

# Returns a node's ``args`` and ``kwargs``.
arguments_of: Callable[[torch.fx.Node], tuple[tuple[Any, ...], dict[str, Any]]] = operator.attrgetter(
    "_args", "_kwargs"
)

# Returns a node's operation, target, ``args``, ``kwargs``, name and metadata.
parts_of: Callable[[torch.fx.Node], tuple[str, Any, tuple[Any, ...], dict[str, Any], str, dict[str, Any]]] = (
    operator.attrgetter("op", "target", "_args", "_kwargs", "name", "meta")
)


@contextlib.contextmanager
def arguments_unsearched() -> Iterator[None]:
    """Let new nodes not look through their arguments for symbolic sizes, which takes half of their time."""
    if _TREES is None:
        yield
        return
    before = fx_graph.pytree
    fx_graph.pytree = _WITHOUT_LEAVES  # type: ignore[assignment]
    try:
        yield
    finally:
        fx_graph.pytree = before


@contextlib.contextmanager
def quick_copies() -> Iterator[None]:
    """Let copies of a graph be taken for sound, and ask whether a node has an effect only where nothing reads it. The
    partitioner makes several copies of a joint graph, and checks each twice. A new node's metadata is filled in place:
    to give it other takes as long as to make the node. The backward graph, which the partitioner makes to see what it
    reads, is made again only if it is to read less."""
    eliminate = torch.fx.Graph.eliminate_dead_code
    extract = partitioners._extract_graph_with_inputs_outputs
    extractions: list[tuple[Any, torch.fx.Graph]] = []

    def extracted(*args: Any, **kwargs: Any) -> torch.fx.Graph:
        given = args, kwargs
        made = next((graph for before, graph in extractions if before == given), None)
        if made is None:
            made = extract(*args, **kwargs)
            extractions.append((given, made))
        return made

    def eliminated(graph: torch.fx.Graph, is_impure_node: Callable[[torch.fx.Node], bool] | None = None) -> bool:
        if is_impure_node is not None:
            return eliminate(graph, is_impure_node)
        draws = torch._inductor.config.fallback_random if TracingContext.try_get() else True  # as torch has it there
        return eliminate(graph, lambda node: bool(node.users) or node.is_impure(draws))

    def copied(graph: torch.fx.Graph, node: torch.fx.Node, to: Callable[[torch.fx.Node], Any] = lambda n: n) -> Any:
        op, target, args, kwargs, name, meta = parts_of(node)
        made = _made(graph, name, op, target, torch.fx.map_arg(args, to), torch.fx.map_arg(kwargs, to), node.type)
        made.meta.update(meta)
        return made

    with (
        unittest.mock.patch.object(partitioners, "_extract_graph_with_inputs_outputs", extracted),
        unittest.mock.patch.object(compile_utils, "tree_flatten", flattened),
        unittest.mock.patch.object(partitioners, "pytree", _QUICK_LEAVES),
        unittest.mock.patch.object(torch.fx.Graph, "node_copy", copied),
        unittest.mock.patch.object(torch.fx.Graph, "eliminate_dead_code", eliminated),
        unittest.mock.patch.object(torch.fx.Graph, "lint", lambda self: None),
    ):
        yield


# Types of arguments that are no trees.
_LEAVES = {torch.fx.Node, bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout}


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """Do what torch's ``tree_flatten`` does, quickly for a tuple of leaves and lists of them, and for no keywords, as
    most arguments are."""
    if type(tree) is not tuple:
        return ([], _empty(type(tree))) if isinstance(tree, (tuple, dict)) and not tree else tree_flatten(tree)
    leaves: list[Any] = []
    lengths = []
    for argument in tree:
        if type(argument) in _LEAVES:
            leaves.append(argument)
            lengths.append(-1)
        elif type(argument) is immutable_list and _LEAVES.issuperset(map(type, argument)):
            leaves += argument
            lengths.append(len(argument))
        else:
            return tree_flatten(tree)
    return leaves, _spec(*lengths)


def _made(graph: torch.fx.Graph, name: str, *described: Any) -> torch.fx.Node:
    """Do what torch's ``create_node`` does for a name that a graph has given and this one may have free, described by
    operation, target, args, kwargs and type."""
    names = graph._graph_namespace
    base, _, number = name.rpartition("_")
    if base and number.isdecimal() and name not in names._used_names:
        names._used_names.add(name)
        names._base_count[base] = int(number)
    else:
        name = names.create_name(name, None)
    made = torch.fx.Node(graph, name, *described)
    names._obj_to_name[made] = name
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


def leaves_of(*args: Any, **kwargs: Any) -> list[Any]:
    """Do what torch's ``arg_tree_leaves`` does, quickly for leaves and lists of them, as most arguments are."""
    found: list[Any] = []
    for argument in (*args, *kwargs.values()):
        if type(argument) in _LEAVES:
            found.append(argument)
        elif type(argument) is immutable_list and _LEAVES.issuperset(map(type, argument)):
            found += argument
        else:
            found.extend(pytree.tree_iter(argument))
    return found


# What the partitioner knows of trees, but for the leaves of a node's arguments.
_QUICK_LEAVES = types.SimpleNamespace(**{**vars(pytree), "arg_tree_leaves": leaves_of})


@functools.cache
def _spec(*lengths: int) -> Any:
    """Return the structure of a tuple of leaves, -1, and of lists of so many leaves."""
    return tree_flatten(tuple(None if length < 0 else immutable_list([None] * length) for length in lengths))[1]


@functools.cache
def _empty(kind: type) -> Any:
    return tree_flatten(kind())[1]
