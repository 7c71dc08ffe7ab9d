"""Read what an FX node says of itself, without a copy or a property."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

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
