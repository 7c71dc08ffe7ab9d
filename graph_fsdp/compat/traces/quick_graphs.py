"""FX graphs are built and copied without checks of what is known to hold."""

from __future__ import annotations

import contextlib
import functools
import types
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._functorch import compile_utils, partitioners
from torch._guards import TracingContext
from torch.fx import graph as fx_graph
from torch.fx.immutable_collections import immutable_list
from torch.utils import _pytree as pytree
from torch.utils._pytree import tree_flatten

from graph_fsdp.compat.traces.quick_extraction import Extractions
from graph_fsdp.compat.traces.quick_nodes import parts_of

# From torch 2.13 on each new node looks through the leaves of its arguments for symbolic sizes, to warn whoever has put
# them there: here that is torch's own tracer. What ``torch.fx.graph`` knows of trees, but for such leaves.
_TREES: Any = getattr(fx_graph, "pytree", None)
_WITHOUT_LEAVES = _TREES and types.SimpleNamespace(**{**vars(_TREES), "tree_iter": lambda *_, **__: ()})


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
    reads, loses those inputs and is the backward graph."""
    eliminate = torch.fx.Graph.eliminate_dead_code
    extracted = Extractions(partitioners._extract_graph_with_inputs_outputs)

    def eliminated(graph: torch.fx.Graph, is_impure_node: Callable[[torch.fx.Node], bool] | None = None) -> bool:
        if is_impure_node is not None:
            return eliminate(graph, is_impure_node)
        draws = torch._inductor.config.fallback_random if TracingContext.try_get() else True  # as torch has it there
        return eliminate(graph, lambda node: bool(node.users) or node.is_impure(draws))

    def copied(graph: torch.fx.Graph, node: torch.fx.Node, to: Callable[[torch.fx.Node], Any] = lambda n: n) -> Any:
        op, target, args, kwargs, name, meta = parts_of(node)
        if node in extracted.unread:
            _take_name(graph, name)
            return node
        made = _made(graph, name, op, target, torch.fx.map_arg(args, to), torch.fx.map_arg(kwargs, to), node.type)
        made.meta.update(meta)
        return made

    def operators() -> Any:
        types = default_operators()
        for name in ("is_fusible", "is_compute_intensive", "is_random", "is_view", "is_recomputable"):
            setattr(types, name, _asked_once(getattr(types, name), _identity_of_target))
        return types

    default_operators = partitioners.get_default_op_list
    tagged = ("_must_be_in_forward", "_must_be_in_backward")
    with (
        unittest.mock.patch.multiple(
            partitioners,
            config=_ReadOnce(partitioners.config),
            get_default_op_list=operators,
            get_aten_target=_asked_once(partitioners.get_aten_target, _identity_of_target),
            **{name: _asked_once(getattr(partitioners, name), _identity_of_target_and_tag) for name in tagged},
        ),
        unittest.mock.patch.object(
            compile_utils, "get_aten_target", _asked_once(compile_utils.get_aten_target, _identity_of_target)
        ),
        unittest.mock.patch.object(partitioners, "_extract_graph_with_inputs_outputs", extracted),
        unittest.mock.patch.object(compile_utils, "tree_flatten", flattened),
        unittest.mock.patch.object(partitioners, "pytree", _QUICK_LEAVES),
        unittest.mock.patch.object(torch.fx.Graph, "node_copy", copied),
        unittest.mock.patch.object(torch.fx.Graph, "eliminate_dead_code", eliminated),
        unittest.mock.patch.object(torch.fx.Graph, "lint", lambda self: None),
    ):
        yield


class _ReadOnce:
    """Reads each attribute of ``of`` once, and keeps its value: torch's settings are slow to read."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        value = self.__dict__[name] = getattr(self._of, name)
        return value


def _asked_once(ask: Callable[[torch.fx.Node], Any], identity: Callable[[torch.fx.Node], Any]) -> Any:
    """Return ``ask``, which is called once for nodes of one ``identity``. The nodes are kept, and what they call."""
    known: dict[Any, tuple[torch.fx.Node, Any]] = {}

    def asked(node: torch.fx.Node) -> Any:
        key = identity(node)
        found = known.get(key)
        if found is None:
            found = known[key] = node, ask(node)
        return found[1]

    return asked


def _identity_of_target(node: torch.fx.Node) -> int:
    """Say what a node calls, by identity: to hash an operator is a call of Python's."""
    return id(node.target)


def _identity_of_target_and_tag(node: torch.fx.Node) -> tuple[int, Any]:
    return id(node.target), node.meta.get("partitioner_tag")


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
    name = _take_name(graph, name)
    made = torch.fx.Node(graph, name, *described)
    graph._graph_namespace._obj_to_name[made] = name
    graph._insert(made)
    graph._find_nodes_lookup_table.insert(made)
    graph._len += 1
    return made


def _take_name(graph: torch.fx.Graph, name: str) -> str:
    """Do what the namespace's ``create_name`` does for such a name."""
    names = graph._graph_namespace
    base, _, number = name.rpartition("_")
    if not (base and number.isdecimal()) or name in names._used_names:
        return names.create_name(name, None)
    names._used_names.add(name)
    names._base_count[base] = int(number)
    return name


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
