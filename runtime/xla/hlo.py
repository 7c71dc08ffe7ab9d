"""The program that XLA makes of a graph, and the collectives in it.

XLA decides itself what becomes of a graph's collectives: it merges, moves and replaces them. What it ran is therefore
read in its optimized program (HLO), after the partitioner and all of its own passes, as one device executes it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from graph_fsdp.passes import compat_xla_hlo

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")

# An instruction is "%name = shape opcode(operands), attributes". An asynchronous one has a start and a done; the done is
# no collective of its own.
_OPCODE = re.compile(rf"=\s+(?:\([^=]*\)|\S+)\s+(?P<kind>{'|'.join(KINDS)})(?:-start)?\(")


@dataclass(frozen=True)
class OptimizedHlo:
    """``text``: of the program that each device runs, in XLA's own notation."""

    text: str

    @cached_property
    def collectives(self) -> dict[str, int]:
        """Collectives by kind (``"all-gather"``), without the kinds that do not occur."""
        return count_collectives(self.text)

    def __str__(self) -> str:
        return self.text


def count_collectives(text: str) -> dict[str, int]:
    """Collective instructions in the text of an HLO module, by kind, in the order of ``KINDS``."""
    found = Counter(match["kind"] for match in _OPCODE.finditer(text))
    return {kind: found[kind] for kind in KINDS if found[kind]}


def optimized_hlo(function: Callable[..., Any], inputs: Sequence[Any]) -> OptimizedHlo:
    """Compile ``function`` of XLA tensors once more, without running it, and return XLA's optimized program.

    ``inputs``: only shapes, dtypes and shardings of tensors count. They are replaced by zeros of their own, one after
    the other as large as the inputs: a tensor that shares data with a live one would be a constant of the program.

    Raises:
        RuntimeError: XLA gave the program as it was before its passes; see ``compat_xla_hlo.optimized_text``.
    """
    return OptimizedHlo(compat_xla_hlo.optimized_text(function, compat_xla_hlo.fresh_inputs(inputs)))


def beside(collectives: dict[str, int], scheduled: dict[str, int]) -> str:
    """Two counts by kind as a table: what XLA runs beside what the schedule has."""
    kinds = [kind for kind in KINDS if kind in collectives or kind in scheduled]
    width = max(map(len, ["collective", *kinds]))
    lines = [f"{'collective':{width}}  {'scheduled':>9}  {'optimized':>9}"]
    lines += [f"{kind:{width}}  {scheduled.get(kind, 0):>9}  {collectives.get(kind, 0):>9}" for kind in kinds]
    return "\n".join(lines)
