"""Attention whose mask says what ``is_causal`` says, or nothing, is called without the mask.

Kernels of attention skip what lies above the diagonal only where they are told, and the fastest of them take no mask.
A model that looks at its inputs to do without one cannot look while it is traced: transformers' causal models look for
several sequences in one row, and have a mask in every graph that has no cache.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graph_fsdp.compat import CHECKPOINT
from graph_fsdp.passes.analysis.affine import Affine, Value, is_always_true, is_causal
from graph_fsdp.passes.analysis.positions import positions, sample_of, written_by_index
from graph_fsdp.passes.context import GraphPass, PassContext
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.operands import operand

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # those that may be given by place
FULL = "graph_fsdp_full_mask"  # in the metadata of an input that is True, or 1, everywhere in each run of the graph
_WIDEST = 256  # elements of a head for which kernels on GPUs take fewer heads of keys and values than of queries


class CausalAttention(GraphPass):
    """Calls ``scaled_dot_product_attention`` with ``is_causal=True`` in the place of a mask that is the lower triangle,
    and with neither in the place of one that is True everywhere. The mask must be computed of indices alone
    (``analysis/positions.py``), and of inputs that are marked as ``FULL``: attention masks that mask nothing. Keys and
    values that are repeated for it, one for each head of a group of queries, are given as they are, with
    ``enable_gqa=True``, as transformers gives them where it has no mask.

    Leave it out (``default_pipeline().remove("causal_attention")``) to keep the kernels that take the mask.
    """

    name = "causal_attention"
    phases = ("capture",)
    requires = ("captured",)
    provides = ("unmasked",)

    def run(self, graph: Graph, context: PassContext) -> str:
        inputs: dict[fx.Node, Value] = {}
        for node in graph.placeholders:
            if FULL in node.meta:
                inputs[node] = frozenset() if node.meta["example_value"].dtype == torch.bool else Affine(1)
        written = set().union(*map(written_by_index, _with_bodies(graph.fx_graph)))
        return f"{_leave_out_masks(graph.fx_graph, inputs, written)} masks of attention left out"


def _with_bodies(graph: fx.Graph) -> Iterator[fx.Graph]:
    yield graph
    for node in graph.find_nodes(op="call_function", target=CHECKPOINT):
        yield from _with_bodies(_body(node))


def _body(checkpoint: fx.Node) -> fx.Graph:
    body: fx.Graph = getattr(checkpoint.graph.owning_module, str(operand(checkpoint).target)).graph
    return body


def _leave_out_masks(graph: fx.Graph, inputs: Mapping[fx.Node, Value], written: Collection[int]) -> int:
    """Edit a graph and those of its checkpoints. ``inputs``: what is known of placeholders. ``written``: storages that
    may change. Return how many masks were left out."""
    attentions = [node for node in graph.nodes if node.target is _ATTENTION]
    checkpoints = [node for node in graph.nodes if node.target is CHECKPOINT]
    if not attentions and not checkpoints:
        return 0
    known = positions(graph, inputs, written)
    unread = set(known)
    changed = 0
    for node in attentions:
        given = _given(node)
        says = _what_mask_says(given, known)
        if says is not None:
            unread |= _call_without_mask(node, given, causal=says)
            changed += 1
    bodies: dict[fx.Graph, list[list[Value]]] = {}  # what is known of the operands of each call
    for node in checkpoints:
        _, *given_to_body = node.args
        bodies.setdefault(_body(node), []).append([known.get(argument) for argument in given_to_body])
    for body, calls in bodies.items():
        taken = zip((node for node in body.nodes if node.op == "placeholder"), *calls, strict=False)
        changed += _leave_out_masks(body, {own: values[0] for own, *values in taken if len(set(values)) == 1}, written)
    if changed:
        for node in reversed(graph.nodes):
            if node in unread and not node.users and node.op != "placeholder":
                graph.erase_node(node)
    return changed


def _given(node: fx.Node) -> dict[str, Any]:
    return {"attn_mask": None, "is_causal": False, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}


def _what_mask_says(given: Mapping[str, Any], known: Mapping[fx.Node, Value]) -> bool | None:
    """Return True of a mask that is the lower triangle, False of one that is True everywhere, and else None."""
    mask = given["attn_mask"]
    value = known.get(mask)
    if not isinstance(value, frozenset) or given["is_causal"]:
        return None
    shape, queries = _shape(mask), _shape(given["query"])
    if shape is None or queries is None or not _adds_nothing(shape[:-2], queries[:-2]):
        return None
    if is_always_true(value, shape):
        return False
    return True if is_causal(value, shape) else None


def _shape(node: Any) -> tuple[Any, ...] | None:
    sample = sample_of(node)
    return None if sample is None else tuple(sample.shape)


def _adds_nothing(mask: tuple[Any, ...], queries: tuple[Any, ...]) -> bool:
    """Say whether queries of this batch keep its shape beside a mask: it has no more rows than they have."""
    pairs = zip(reversed(mask), reversed(queries), strict=False)
    return len(mask) <= len(queries) and all(str(size) in ("1", str(own)) for size, own in pairs)


def _call_without_mask(node: fx.Node, given: dict[str, Any], causal: bool) -> set[fx.Node]:
    """Return the nodes that repeated keys and values, which nothing may read any longer."""
    keys, values = (_repeated(given[name]) for name in ("key", "value"))
    widths = [shape[-1] for name in ("key", "value") if (shape := _shape(given[name])) is not None]
    is_grouped = bool(keys and values) and len(widths) == 2 and widths[0] == widths[1] <= _WIDEST
    if is_grouped:
        given |= {"key": keys[-1], "value": values[-1], "enable_gqa": True}
    given |= {"attn_mask": None, "is_causal": causal}
    node.args = tuple(given.pop(name) for name in ("query", "key", "value"))
    node.kwargs = given
    return {*keys[:-1], *values[:-1]} if is_grouped else set()


def _repeated(node: Any) -> list[fx.Node]:
    """Return what repeats each head of ``[batch, heads, tokens, width]`` as often as the next, the last first, and then
    what it repeats; nothing where it is something else."""
    whole = slice(None)
    chain = [node]
    for target in ("reshape", "expand", operator.getitem):
        if not isinstance(node, fx.Node) or node.target != target or _shape(node) is None:
            return []
        last, node = node, operand(node)
        chain.append(node)
    was, now = (list(map(str, _shape(end) or ())) for end in (node, chain[0]))
    _, index = last.args
    is_new = index == (whole, whole, None, whole, whole) and len(was) == len(now) == 4
    return chain if is_new and (was[0], was[2:]) == (now[0], now[2:]) else []
