"""Compute regions: what lies between two communication nodes, compiled once per distinct shape of computation.

Two regions are equal when their graphs are the same up to the names of nodes: same operators, constants, shapes,
strides, dtypes and devices, same inputs and outputs. Layers of one class give equal regions, so compile time does
not grow with depth.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from graph_fsdp.passes import dialect
from graph_fsdp.passes.compat import free_symbols
from graph_fsdp.passes.graph import Graph, aliased_inputs, iterate_tensors

Compiled = Callable[[list[Any]], Sequence[Any]]


@dataclass
class Region:
    """``inputs`` and ``outputs`` are nodes of the whole graph; ``module`` takes and returns them in that order."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]
    module: fx.GraphModule

    @property
    def is_view_only(self) -> bool:
        """Nothing but views: no kernel to compile."""
        return all(aliased_inputs(n) or n.op == "get_attr" for n in self.nodes)


Step = Region | fx.Node  # a region, or a node that the executor runs itself


def cut(graph: Graph) -> list[Step]:
    """The graph as steps in its own order: regions, and the communication nodes between them."""
    symbols = _symbol_inputs(graph.placeholders)
    steps: list[list[fx.Node] | fx.Node] = []
    region_of: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.fx_graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.op == "get_attr":  # constants are copied into each region that reads them
            continue
        if node.target in dialect.EXECUTED:
            steps.append(node)
            continue
        if node.target is operator.getitem and node.args[0] in region_of:
            region = region_of[node.args[0]]  # a region returns tensors, not tuples of them
        elif steps and isinstance(steps[-1], list):
            region = steps[-1]
        else:
            steps.append(region := [])
        region.append(node)
        region_of[node] = region
    return [step if isinstance(step, fx.Node) else _region(step, graph.module, symbols) for step in steps]


def _region(nodes: list[fx.Node], owner: fx.GraphModule, symbols: dict[Any, fx.Node]) -> Region:
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    constants: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                constants[source] = None
            elif source not in inside:
                inputs[source] = None
    # The compiler of a region reads its symbolic sizes from its inputs: each symbol must be one of them.
    for node in [*nodes, *inputs]:
        for symbol in _symbols(node.meta.get("val")):
            if symbol in symbols:
                inputs[symbols[symbol]] = None
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    region_graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(inputs):
        copies[node] = region_graph.placeholder(f"arg_{index}")
        copies[node].meta = dict(node.meta)
    for node in [*constants, *nodes]:
        copies[node] = region_graph.node_copy(node, copies.__getitem__)
    region_graph.output(tuple(copies[node] for node in outputs))
    return Region(nodes, list(inputs), outputs, fx.GraphModule(owner, region_graph))


def _symbols(value: Any) -> set[Any]:
    found: set[Any] = set()
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        found |= free_symbols(value)
    for tensor in iterate_tensors(value):
        found |= free_symbols(tensor)
    return found


def _symbol_inputs(placeholders: list[fx.Node]) -> dict[Any, fx.Node]:
    """Symbol → the graph input that is exactly that symbol."""
    found = {}
    for node in placeholders:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
            found[value.node.expr] = node
    return found


def region_key(region: Region, kind: str) -> Hashable:
    """Equal for regions that one compiled function can serve."""
    names: dict[fx.Node, int] = {}
    parts: list[Any] = [kind]
    for node in region.module.graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda n: _Name(names[n]))  # type: ignore[arg-type,return-value]
        if node.op == "get_attr":
            target: Any = id(_attribute(region.module, str(node.target)))
        elif node.op == "placeholder":
            target = None
        else:
            target = node.target
        parts.append((node.op, target, repr(args), _value_key(node.meta.get("val"))))
        names[node] = len(names)
    return tuple(parts)


class _Name:
    def __init__(self, index: int) -> None:
        self.index = index

    def __repr__(self) -> str:
        return f"%{self.index}"


def _attribute(module: fx.GraphModule, target: str) -> Any:
    value: Any = module
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _value_key(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        layout = (tuple(map(str, value.shape)), tuple(map(str, value.stride())), str(value.storage_offset()))
        return (*layout, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return tuple(_value_key(v) for v in value)
    return str(value)


class RegionCache:
    """Compiled regions of one model, over all its graphs. ``regions`` counts calls, ``compiled`` compilations."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.regions = 0
        self.compiled = 0
        self._cache: dict[Hashable, tuple[Compiled, Any]] = {}

    def compile(self, region: Region, kind: Literal["forward", "backward", "inference"]) -> Compiled:
        self.regions += 1
        key = region_key(region, kind)
        if key not in self._cache:
            self.compiled += 1
            compiled = run_as_graph(region.module) if region.is_view_only else self.backend.compile_region(region, kind)
            self._cache[key] = (compiled, region.module)  # the module keeps what the key knows by id alive
        return self._cache[key][0]

    def compile_whole(self, module: fx.GraphModule, kind: Literal["forward", "backward", "inference"]) -> Compiled:
        """A graph that is not cut: no other is equal to it."""
        self.regions += 1
        self.compiled += 1
        return self.backend.compile_whole(module, kind)


def run_as_graph(module: fx.GraphModule) -> Compiled:
    """The region as FX runs it, operator by operator, inputs dropped at their last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


class _BoxedCodeGen(fx.graph.CodeGen):
    """Generated code that takes its inputs in a list and empties it. As arguments, the caller's own references would
    keep them alive to the end of the call."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        unpack = f"    {', '.join(free_vars)}, = inputs\n" if free_vars else ""
        return f"def forward(self, inputs){maybe_return_annotation}:\n{unpack}    inputs.clear()"
