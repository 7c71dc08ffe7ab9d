"""What was proven of a graph's nodes holds until they are edited."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from graph_fsdp.passes.ir.fake_values import kind
from graph_fsdp.passes.ir.stage import Entry


class Proven:
    """Remembers each node as it was when something was proven of it: at first as it is in ``entries``."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = {entry[0]: entry for entry in entries}
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
    if now[6].get("val") is not before[6].get("val") or now[2] != before[2]:
        return True
    return now[3] != before[3] or now[4] != before[4]
