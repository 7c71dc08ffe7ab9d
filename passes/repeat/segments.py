"""Segments are parts of Dynamo's graph; of equal ones ``repeat.py`` has one traced.

A segment runs from the first use of a unit's parameters to that of the next unit's, and takes the gathers that nothing
else reads. Two are equal when operators, constants and all metadata of values are, up to names.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.canonical_form import NotDescribed, canonical_form, describe_value
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.passes.ir.spec import ModelSpec

log = logging.getLogger(__name__)

WORTH = 3  # equal segments: to trace one by itself costs about what it costs within the model

_SET_GRAD = compat.set_grad_enabled
# Without a value, and without effect on how the operators that follow are traced. Anything else might have one.
_WITHOUT_EFFECT = frozenset({compat.log_api_usage})


class NotRepeatable(BaseException):  # AOTAutograd retells every Exception as one of its own
    """Says why a layer does not repeat another's trace; ``layer``: its index, if it is a single one."""

    def __init__(self, reason: str, layer: int | None = None) -> None:
        super().__init__(reason)
        self.layer = layer


@dataclass
class Segment:
    """Holds nodes of Dynamo's graph, in its order; ``inputs`` in the order of their first use."""

    unit: str
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)

    @property
    def parameters(self) -> list[str]:
        """Name the parameters that are gathered in it, in the order of their gathers."""
        return [dialect.parameter_of(node) for node in self.nodes if node.target is dialect.gather_param]

    @property
    def all_nodes(self) -> Iterator[fx.Node]:
        """Yield its nodes, and those of the graphs of its checkpoints."""
        for node in self.nodes:
            yield node
            if node.op == "get_attr":
                yield from getattr(node.graph.owning_module, str(node.target)).graph.nodes


def find_repeats(graph: fx.Graph, model: ModelSpec) -> list[list[Segment]]:
    """Find groups of equal segments, large enough to be worth it, after gathers were inserted. Linear."""
    segments = _segments(graph, model)
    positions = {node: index for index, node in enumerate(graph.nodes)}
    groups: dict[Hashable, list[Segment]] = {}
    for segment in segments:
        _complete(segment)
        try:
            _check_gradients(segment, positions)
            groups.setdefault(_key(segment), []).append(segment)
        except (NotRepeatable, NotDescribed) as reason:
            log.info("%s is traced by itself: %s", segment.unit, reason)
    found = [group for group in groups.values() if len(group) >= WORTH]
    if not found:
        log.info("no %d of %d layers are equal: each is traced by itself", WORTH, len(segments))
    return found


def _segments(graph: fx.Graph, model: ModelSpec) -> list[Segment]:
    """Divide a graph into segments. A node that is traced otherwise than as an operator on tensors ends one."""
    found: list[Segment] = []
    seen: set[str] = set()
    current: Segment | None = None
    ambient = as_here = torch.is_grad_enabled()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node.target is dialect.gather_param:
            continue
        gathers = (source for source in node.all_input_nodes if source.target is dialect.gather_param)
        units = {model.spec_of(dialect.parameter_of(gather)).unit for gather in gathers}  # the root is ""
        if units - seen or "" in units:
            current = None
            if as_here == ambient and len(units) == 1 and "" not in units:
                current = Segment(next(iter(units)))
                found.append(current)
        seen |= units
        if node.target is _SET_GRAD:
            as_here = node.args[0]
            current = None
        elif next(iterate_tensors(node.meta.get("example_value")), None) is None:
            current = None
            if node.target not in _WITHOUT_EFFECT:
                log.info("from %s on, layers are traced one by one: it has no tensor as its value", node)
                break
        elif node.op == "call_module" or (
            isinstance(node.target, compat.HigherOrderOperator) and node.target is not compat.CHECKPOINT
        ):
            log.info("%s is traced by itself: it is no operator", node)
            current = None
        elif current is not None:
            current.nodes.append(node)
    return [segment for segment in found if segment.nodes]


def _complete(segment: Segment) -> None:
    """Add the gathers, and graphs of checkpoints, that nothing else reads, and find what goes in and comes out."""
    inside = set(segment.nodes)
    sources = [source for node in segment.nodes for source in node.all_input_nodes]
    own = [s for s in sources if s.target is dialect.gather_param or s.op == "get_attr"]
    added = {source: None for source in own if inside.issuperset(source.users)}
    segment.nodes = [*added, *segment.nodes]
    inside.update(added)
    sources = [source for node in segment.nodes for source in node.all_input_nodes]
    segment.inputs = list(dict.fromkeys(source for source in sources if source not in inside))
    segment.outputs = [node for node in segment.nodes if not inside.issuperset(node.users)]


def _check_gradients(segment: Segment, positions: dict[fx.Node, int]) -> None:
    """Refuse a segment where a value is used behind it too. Gradients of a value are added up in the reverse order of
    its uses, those of a segment by themselves: sums of floating-point numbers would differ."""
    inside, end = set(segment.nodes), positions[segment.nodes[-1]]
    for node in segment.inputs:
        if not any(tensor.requires_grad for tensor in iterate_tensors(node.meta.get("example_value"))):
            continue
        for user in node.users:
            if positions[user] > end and user not in inside:
                raise NotRepeatable(f"it reads {node}, which is read again behind it, by {user}")


def _key(segment: Segment) -> Hashable:
    """Return what equal segments have in common.

    Raises:
        NotRepeatable, NotDescribed: there is more to a value of it than a key says.
    """
    parts, index = canonical_form(segment.inputs, segment.nodes, _value, _target)
    for node in segment.outputs:
        if not isinstance(node.meta.get("example_value"), torch.Tensor):
            raise NotRepeatable(f"{node}, which is read outside, is no tensor")
    return parts, tuple(index[node] for node in segment.outputs)


def _value(node: fx.Node) -> Hashable:
    return None if node.op in ("get_attr", "output") else describe_value(node.meta.get("example_value"))


def _target(node: fx.Node) -> Hashable:
    """Return what a node calls; of the graph of a checkpoint, what it computes, and under which contexts."""
    if node.op != "get_attr":
        return node.target
    body = getattr(node.graph.owning_module, str(node.target))
    if not isinstance(body, fx.GraphModule) or any(user.target is not compat.CHECKPOINT for user in node.users):
        raise NotRepeatable(f"{node} is no graph of a checkpoint")
    placeholders = body.graph.find_nodes(op="placeholder")
    rest = [inner for inner in body.graph.nodes if inner.op != "placeholder"]
    if any(isinstance(inner.target, compat.HigherOrderOperator) or inner.op == "call_module" for inner in rest):
        raise NotRepeatable(f"{node} has something in it that is no operator")
    parts, _ = canonical_form(placeholders, rest, _value, _target)
    return parts, _contexts(body.meta.get("_checkpoint_context_fn"))


def _contexts(made_by: Any) -> Hashable:
    """Return what functions that make the same contexts have in common: torch 2.9 makes each layer a ``partial`` of its
    own."""
    if isinstance(made_by, functools.partial):
        keywords = tuple((name, _contexts(value)) for name, value in sorted(made_by.keywords.items()))
        return functools.partial, made_by.func, _contexts(made_by.args), keywords
    if isinstance(made_by, (list, tuple)):
        return type(made_by), tuple(map(_contexts, made_by))
    try:
        hash(made_by)
    except TypeError:
        raise NotRepeatable(f"a checkpoint of it has contexts by {made_by!r}, which cannot be compared") from None
    found: Hashable = made_by
    return found
