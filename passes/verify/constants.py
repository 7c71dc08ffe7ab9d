"""A tensor that a pass makes is a node that computes it, or a tensor that the graph's module has: ``run`` is called
where tensors are fake, and a program that had one of these would fail when it runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.passes.ir.graph import Graph

_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
_CURE = "add a node that computes it, as torch.ops.aten.arange.default, or make the tensor outside of the pass' run()"


def broken_constant(graph: Graph, node: fx.Node) -> str:
    """Say what is wrong with the tensors that a node names; "" where nothing is."""
    if node.op == "get_attr":
        owner = graph.fx_graph.owning_module
        try:
            value = operator.attrgetter(str(node.target))(owner)
        except AttributeError as error:
            return f"{node} reads {node.target!r}, which the graph's module does not have ({error})"
        if isinstance(value, compat.FakeTensor):
            return f"{node} reads a fake tensor: {_CURE}"
        if isinstance(value, Tensor) and (users := [user for user in node.users if user.target not in _LIFTS]):
            return f"{node} is read by {users[0]}; Inductor reads constants by torch.ops.aten.lift_fresh_copy.default"
        return ""
    if any(_tensors((node.args, node.kwargs.values()))):
        return f"{node} has a tensor among its arguments: {_CURE}"
    return ""


def _tensors(values: Iterable[Any]) -> Iterator[bool]:
    for value in values:
        if isinstance(value, Tensor):
            yield True
        elif isinstance(value, (list, tuple, type({}.values()))):
            yield from _tensors(value)
