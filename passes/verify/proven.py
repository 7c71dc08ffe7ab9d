"""What was proven of a graph's nodes holds until they are edited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from torch import fx

from graph_fsdp.passes.ir.dialect import record
from graph_fsdp.passes.ir.fake_values import kind
from graph_fsdp.passes.ir.stage import Entry


class Proven:
    """Remembers each node as it was when something was proven of it: at first as it is in ``entries``. ``inputs`` are
    those of the graph."""

    def __init__(self, entries: Iterable[Entry], inputs: Iterable[fx.Node]) -> None:
        self._entries = {entry[0]: entry for entry in entries}
        self._inputs = dict.fromkeys(inputs)
        self._kinds: dict[fx.Node, tuple[Any, Any]] = {}  # what was returned → its value, and that one's kind

    def edited(self, entries: Sequence[Entry]) -> set[fx.Node]:
        """Return the nodes that were edited since this was asked last, and those that read them. A snapshot has the
        very entry of the one before for a node that is as it was."""
        edited = set()
        for entry in entries:
            before = self._entries.get(entry[0])
            if before is not entry:
                if before is None or _is_edited(before, entry):
                    edited.add(entry[0])
                self._entries[entry[0]] = entry
        return edited.union(*(node.users for node in edited))

    def broken_inputs(self, entries: Iterable[Entry]) -> tuple[fx.Node | None, str] | None:
        """Find an input that a graph did not take at first, or not in that place, and say what is wrong; None if there
        is none. Inputs that the default passes add carry records, and their places are known."""
        inputs = [entry[0] for entry in entries if entry[1] == "placeholder"]
        own = [node for node in inputs if node in self._inputs or record(node) is None]
        first, due = next(((a, b) for a, b in zip_longest(own, self._inputs) if a is not b), (None, None))
        if first is None and due is None:
            return None
        if first is not None and first not in self._inputs:
            return first, f"nobody gives {first}, a new input"
        gone = [str(node) for node in self._inputs if node not in own]
        return (None, f"input {gone[0]} is gone") if gone else (first, f"input {first} stands where {due} stood")

    def kinds(self, outputs: Iterable[Any]) -> list[Any]:
        """Return the kinds of what a graph returns, each of which is found once for a value."""
        found = []
        for output in outputs:
            if not isinstance(output, fx.Node):
                found.append(output)
                continue
            value = output.meta.get("val")
            known = self._kinds.get(output)
            if known is None or known[0] is not value:
                known = self._kinds[output] = value, kind(value)
            found.append(known[1])
        return found


def _is_edited(before: Entry, now: Entry) -> bool:
    """Say whether a node calls something else than before, on other arguments, or has another value."""
    return now[6].get("val") is not before[6].get("val") or now[2:5] != before[2:5]
