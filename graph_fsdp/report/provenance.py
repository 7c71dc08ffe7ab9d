"""Nodes of graphs are traced back to their line and module, and parameters through their lives."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

import graph_fsdp
from graph_fsdp import passes
from graph_fsdp.passes.ir.dialect import Role, record
from graph_fsdp.passes.ir.effects import is_view
from graph_fsdp.passes.ir.graph import Graph, Phase
from graph_fsdp.passes.ir.operands import argument
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.passes.ir.unit_calls import innermost_module

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n[ \t]*(?P<code>[^\n]*)')
# Ours run as the model does where a graph breaks: what reads a parameter there.
_NOT_USERS = tuple(f"{Path(str(p.__file__)).parent}{os.sep}" for p in (torch, graph_fsdp, passes))

USE, GRADIENT = "use", "gradient"  # kinds of events, beside the roles of nodes
# Where the parameter's values are found under no other record.
_VALUES = (Role.UNPACK, Role.UNSHARDED, Role.SHARD)


# Nodes


@dataclass(frozen=True)
class SourceLine:
    """Names a line of the model. ``code`` is without indentation, and empty where the file could not be read."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}  {self.code}".rstrip()


def source_line(node: fx.Node) -> SourceLine | None:
    """Return the model's line that computes ``node``, or that it is the derivative of; None for what no line asked for
    (collectives). Of ``nn.Linear`` it is the line that calls the module, not torch's own."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    users = [match for match in frames if not match["file"].startswith(_NOT_USERS)]
    if not users:
        return None
    last = users[-1]
    return SourceLine(last["file"], int(last["line"]), last["function"], last["code"].strip())


def module_name(node: fx.Node) -> str | None:
    """Return the module that computes ``node``, or whose computation it differentiates: "layers.3.attn", and "" for the
    model itself. None for what belongs to no module."""
    if (found := innermost_module(node)) is not None:
        return found[0]
    if not (trace := node.meta.get("stack_trace")):
        return None
    # Sums of gradients have a line and no module: that of the gradient which the same line computed.
    same_line = (innermost_module(value) for value in node.all_input_nodes if value.meta.get("stack_trace") == trace)
    return next((name for name, _ in filter(None, same_line)), "")


# Parameters


@dataclass(frozen=True)
class LifeEvent:
    """Says what one node does with the parameter. ``kind`` is the role of a node of the dialect (``"gather_start"``),
    ``"use"`` where it computes with the parameter, or ``"gradient"`` where it computes the whole gradient. ``position``
    is the node's index in the graph after all passes; ``source`` is the model's line of a use or gradient."""

    graph: int
    phase: Phase
    position: int
    kind: str
    node: str
    source: SourceLine | None


@dataclass(frozen=True)
class ParameterLife:
    """Lists what happens to a parameter: graph by graph, in the order of each."""

    parameter: ParameterSpec
    bucket: str | None  # None where it is whole on every rank
    events: tuple[LifeEvent, ...]

    @property
    def about(self) -> str:
        """Describe the parameter in one line."""
        p = self.parameter
        dtype = str(p.dtype).removeprefix("torch.")
        where = f"in bucket {self.bucket}" if self.bucket is not None else "in no bucket"
        shards = f"{dtype}{list(p.shard_shape)} on each of {p.world_size} ranks"
        held = "whole on every rank" if p.replicated else shards
        return f"{p.name}: {dtype}{list(p.shape)} of unit {p.unit or 'root'} {where}, {held}"

    def __str__(self) -> str:
        lines = [self.about]
        if not self.events:
            lines += ["no graph that was captured uses it"]
        width = max((len(event.kind) for event in self.events), default=0)
        names = max((len(event.node) for event in self.events), default=0)
        for (graph, phase), events in itertools.groupby(self.events, lambda event: (event.graph, event.phase)):
            lines += ["", f"graph {graph}, {phase}"]
            for event in events:
                source = f"  {event.source}" if event.source is not None else ""
                lines += [f"  {event.position:>6}  {event.kind:<{width}}  {event.node:<{names}}{source}".rstrip()]
        return "\n".join(lines)


def not_there(parameter: str, known: Iterable[str]) -> str:
    """Say that a report has no such parameter, and which of those it has are like it."""
    close = difflib.get_close_matches(str(parameter), list(known), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(map(repr, close))}" if close else ""
    return f"name: the model has no sharded parameter {parameter!r}{hint} (a tied one has its first name)"


def lives(spec: ModelSpec, graphs: Iterable[tuple[int, Graph]], only: str | None = None) -> dict[str, ParameterLife]:
    """Return name → life, of all parameters or of one. One walk per graph."""
    names = spec.parameters if only is None else [only]
    events: dict[str, list[LifeEvent]] = {name: [] for name in names}
    for index, graph in graphs:
        positions = graph.positions()
        for name, kinds in _kinds(graph, events.keys()).items():
            for node in sorted(kinds, key=positions.__getitem__):
                source = source_line(node) if kinds[node] in (USE, GRADIENT) else None
                events[name].append(LifeEvent(index, graph.phase, positions[node], kinds[node], node.name, source))
    buckets = {name: bucket.name for bucket in spec.buckets for name in bucket.offsets}
    return {name: ParameterLife(spec.parameters[name], buckets.get(name), tuple(events[name])) for name in names}


def uses(graph: Graph | None, parameter: str) -> bool:
    """Say whether a graph takes or yields something of a parameter, and does not only gather it with its bucket."""
    if graph is None:
        return False
    own = graph.with_role(Role.SHARD) + graph.with_role(Role.UNPACK) + graph.with_role(Role.SHARD_GRAD)
    return any(parameter in node.meta["fsdp"].params for node in own)


def _kinds(graph: Graph, names: Collection[str]) -> dict[str, dict[fx.Node, str]]:
    kinds: dict[str, dict[fx.Node, str]] = {name: {} for name in names}
    for node in graph.fx_graph.nodes:
        found = record(node)
        if found is None:
            continue
        for name in kinds.keys() & found.params:
            kinds[name][node] = found.role.value
            if found.role in _VALUES:
                kinds[name].update({use: USE for use in _computing_users(node)})
            if found.role is Role.REDUCE_START:
                gradient = _computed(argument(node, "grads")[found.params.index(name)])
                kinds[name].setdefault(gradient, GRADIENT)
    return kinds


def _computing_users(value: fx.Node) -> Iterable[fx.Node]:
    """Yield what computes with a value or with a view of it."""
    for user in value.users:
        if user.op == "output" or record(user) is not None:
            continue
        if is_view(user):
            yield from _computing_users(user)
        else:
            yield user


def _computed(gradient: fx.Node) -> fx.Node:
    while is_view(gradient) and gradient.all_input_nodes:
        gradient = gradient.all_input_nodes[0]
    return gradient
