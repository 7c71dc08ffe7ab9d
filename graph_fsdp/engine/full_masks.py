"""A graph may take it for granted that an attention mask masks nothing; where one does, there is another graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, fx

from graph_fsdp import compat
from graph_fsdp.engine.recompilation import Call
from graph_fsdp.passes import CausalAttention, PassPipeline
from graph_fsdp.passes.transforms.causal_attention import FULL

_NAME = "attention_mask"  # and names that end with it, as transformers calls them


def look_for_masks(pipeline: PassPipeline, backend: str) -> Callable[[Mapping[str, Any]], frozenset[str]]:
    """Return what looks for masks that mask nothing, where a pass makes use of them. On XLA, where attention is no
    kernel, it would run what is pending."""
    is_used = backend != "xla" and any(isinstance(p, CausalAttention) for p in pipeline)
    return full_masks if is_used else lambda _: frozenset()


def full_masks(kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of attention masks of ``[rows, tokens]``, of booleans or integers, that are True, or 1,
    everywhere. The host waits for their values, as in a model of transformers that is not traced, which looks at them
    too."""
    return frozenset(
        name
        for name, value in kwargs.items()
        if name.endswith(_NAME) and type(value) is Tensor and value.dim() == 2 and not value.is_meta
        if not value.is_floating_point() and bool((value == 1).all())
    )


def mark_full_masks(module: fx.GraphModule, names: frozenset[str], call: Call | None) -> None:
    """Mark the inputs of a graph that Dynamo has just traced which are these masks, for the passes."""
    masks = {id(call.kwargs[name]) for name in names} if call is not None else set()
    for node in module.graph.find_nodes(op="placeholder") if masks else ():
        if id(compat.example_of(node)) in masks:
            node.meta[FULL] = True
