"""The partitioner leaves each draw of random numbers in its graph."""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch._functorch import compile_utils


@contextlib.contextmanager
def draws_apart(graph: torch.fx.Graph, draws: Callable[[torch.fx.Node], bool]) -> Iterator[None]:
    """Let the partitioner make one of equal calls in a graph only where ``draws`` is false of them. Torch's own rule is
    a list of operators, which lacks ``randn_like``, ``uniform_``, ``normal_``, ``exponential_`` and others: two draws
    of the same shape would be the same numbers."""
    found = dict.fromkeys(node.target.overloadpacket for node in graph.nodes if draws(node))
    with unittest.mock.patch.object(compile_utils, "rand_ops", [*compile_utils.rand_ops, *found]):
        yield
