"""The program that XLA makes of a graph, and the collectives in it.

XLA decides itself what becomes of a graph's collectives: it merges, moves and replaces them. What it ran is therefore
read in its optimized program (HLO), after the partitioner and all of its own passes, as one device executes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.graph import Graph
from graph_fsdp.passes.ir.layout import layout_of

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# An instruction is "%name = shape opcode(operands), attributes". An asynchronous one has a start and a done; the done
# is no collective of its own.
_OPCODE = re.compile(rf"=\s+(?:\([^=]*\)|\S+)\s+(?P<kind>{'|'.join(KINDS)})(?:-start)?\(")


@dataclass(frozen=True)
class OptimizedHlo:
    """``text``: of the program that each device runs, in XLA's own notation. ``scheduled``: messages of the scheduled
    graph's collectives, by kind."""

    text: str
    scheduled: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def collectives(self) -> dict[str, int]:
        """Collectives by kind (``"all-gather"``), without the kinds that do not occur."""
        return count_collectives(self.text)

    def table(self) -> str:
        """What XLA runs beside what the schedule has."""
        return beside(self.collectives, self.scheduled)

    def __str__(self) -> str:
        return self.text


def scheduled_collectives(graph: Graph) -> dict[str, int]:
    """Messages of a scheduled graph's collectives, by the kinds that XLA has for them."""
    found: Counter[str] = Counter()
    for node in graph.fx_graph.nodes:
        if node.target is dialect.all_gather_start:
            found["all-gather"] += len(layout_of(node).messages)
        elif node.target is dialect.reduce_scatter_start:
            found["reduce-scatter"] += len(dialect.argument(node, "messages")) or 1
        elif node.target in dialect.STARTS:
            found["all-reduce"] += 1
    return dict(found)


def count_collectives(text: str) -> dict[str, int]:
    """Collective instructions in the text of an HLO module, by kind, in the order of ``KINDS``."""
    found = Counter(match["kind"] for match in _OPCODE.finditer(text))
    return {kind: found[kind] for kind in KINDS if found[kind]}


def optimized_hlo(function: Callable[..., Any], inputs: Sequence[Any]) -> OptimizedHlo:
    """Compile ``function`` of XLA tensors once more, without running it, and return XLA's optimized program.

    ``inputs``: only shapes, dtypes and shardings of tensors count. They are replaced by zeros of their own, one after
    the other as large as the inputs: a tensor that shares data with a live one would be a constant of the program.

    Raises:
        RuntimeError: XLA gave the program as it was before its passes; see ``compat_xla.optimized_text``.
    """
    return OptimizedHlo(compat_xla.optimized_text(function, compat_xla.fresh_inputs(inputs)))


def beside(collectives: Mapping[str, int], scheduled: Mapping[str, int]) -> str:
    """Two counts by kind as a table: what XLA runs beside what the schedule has."""
    kinds = [kind for kind in KINDS if kind in collectives or kind in scheduled]
    width = max(map(len, ["collective", *kinds]))
    lines = [f"{'collective':{width}}  {'scheduled':>9}  {'optimized':>9}"]
    lines += [f"{kind:{width}}  {scheduled.get(kind, 0):>9}  {collectives.get(kind, 0):>9}" for kind in kinds]
    return "\n".join(lines)
