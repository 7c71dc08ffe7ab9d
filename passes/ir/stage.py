"""Stages show a graph as it was after one pass, printed as Python that runs.

``TORCH_LOGS="graph_fsdp"`` logs what each pass did, ``TORCH_LOGS="+graph_fsdp"`` the graph after each pass too. With
``TORCH_TRACE=DIR`` each stage is an artifact of its compilation, which ``tlparse`` shows.
"""

from __future__ import annotations

import logging
import operator
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from graph_fsdp import compat

log = logging.getLogger(__name__)

_TRACE = "TORCH_TRACE"  # torch reads it when it is imported

_PREAMBLE = """\
import operator

import torch
from torch import device, inf, nan

import graph_fsdp.api  # registers torch.ops.graph_fsdp
"""


class Snapshot:
    """Keeps a graph as it is now, and copies it when somebody looks at it: few stages are ever read.

    Arguments need no copy: FX holds them in immutable containers, and an edit of a node gives it new ones. Of a node
    that is as it was in the snapshot ``before``, both hold one entry.
    """

    def __init__(self, graph: fx.Graph, before: Snapshot | None = None) -> None:
        self.entries: list[Entry] = _entries(graph, before.entries if before is not None else ())

    def __len__(self) -> int:
        return len(self.entries)

    def copy(self) -> fx.Graph:
        """Make a graph of its own, with equal names and metadata and without Dynamo's annotations of inputs' types."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node, op, target, args, kwargs, name, meta in self.entries:
            copied: Any = fx.map_arg((args, kwargs), copies.__getitem__)
            copies[node] = graph.create_node(op, target, copied[0], copied[1], name)
            copies[node].meta.update(meta)
        return graph


Entry = tuple[fx.Node, str, Any, tuple[Any, ...], dict[str, Any], str, dict[str, Any]]


def _entries(graph: fx.Graph, before: Iterable[Entry]) -> list[Entry]:
    """Describe each node; one that is as it was ``before``, by that very entry."""
    known = {entry[0]: entry for entry in before}
    found = []
    for node in graph.nodes:
        entry = known.get(node)
        op, target, args, kwargs, name, now = compat.parts_of(node)
        if (
            entry is not None
            and (entry[3] is args and entry[4] is kwargs and entry[2] is target)
            and (name == entry[5] and op == entry[1] and _is_same(entry[6], now))
        ):
            found.append(entry)
            continue
        meta = now.copy()
        meta.pop("grapharg", None)  # Dynamo's weak reference to a tensor, which keeps swap_tensors from that tensor
        found.append((node, op, target, args, kwargs, name, meta))
    return found


def _is_same(meta: dict[str, Any], now: dict[str, Any]) -> bool:
    """Say whether what a node says of itself are the same objects as before. Tensors must not be compared by their
    values: of fake ones, whether they are equal is a symbol that the trace under way has no place for."""
    return [*meta] == [*now] and all(map(operator.is_, meta.values(), now.values()))


@dataclass
class Stage:
    """Says what one pass made of a graph.

    ``code`` is a Python module with one function ``forward`` that takes the graph's inputs (local shards, activations,
    batch) and runs it, collectives included; ``graph`` is a copy that later passes do not change. ``seconds`` is the
    pass alone, ``verify_seconds`` the verifier after it, ``snapshot_seconds`` the taking of the snapshot. ``text`` is
    that of a graph that a pass broke, which may not run.
    """

    name: str
    phase: str
    snapshot: Snapshot
    owner: fx.GraphModule  # holds the constants and subgraphs that the graph refers to
    seconds: float
    summary: str | None
    verify_seconds: float = 0.0
    snapshot_seconds: float = 0.0
    text: str | None = None

    @cached_property
    def graph(self) -> fx.Graph:
        return self.snapshot.copy()

    @property
    def title(self) -> str:
        return f"{self.phase} graph after pass {self.name!r} ({self.seconds * 1e3:.1f} ms)"

    @property
    def header(self) -> str:
        return "\n".join(f"# {line}" for line in [self.title, *(self.summary or "").splitlines()])

    @cached_property
    def code(self) -> str:
        return f"{self.header}\n{_PREAMBLE}\n\n{self.body}"

    @cached_property
    def body(self) -> str:
        """Return the function alone; ``self`` is a parameter only where the graph refers to constants or subgraphs."""
        return self.text if self.text is not None else readable(self.graph)

    def log(self) -> None:
        """Write the stage to the logs that ask for it."""
        log.info("%s, %d nodes%s", self.title, len(self.snapshot), f": {self.summary}" if self.summary else "")
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", self.code)
        if os.environ.get(_TRACE):
            compat.trace_artifact(f"graph_fsdp_{self.phase}_{self.name}", lambda: self.code)

    def __repr__(self) -> str:
        return f"Stage({self.name!r}, {self.phase}, {len(self.snapshot)} nodes)"


def readable(graph: fx.Graph) -> str:
    """Write a graph as one Python function, in a form for readers."""
    source = graph.python_code("self").src.strip()
    if not any(node.op in ("get_attr", "call_module") for node in graph.nodes):
        source = re.sub(r"def forward\(self(, )?", "def forward(", source, count=1)
    # FX lets go of each value after its last use; to a reader that is noise.
    lines = [re.sub(r";(  \w+( = \w+)*) = None$", "", line).rstrip() for line in source.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"
