"""Tables of results, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column is left-aligned. ``note``: a line below."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def text(self) -> str:
        lines = [list(self.header), *map(list, self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]
        formatted = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]
        return "\n".join([*(line.rstrip() for line in formatted), *filter(None, [self.note])])

    def markdown(self) -> str:
        lines = [self.header, ["---", *["---:"] * (len(self.header) - 1)], *self.rows]
        formatted = ["| " + " | ".join(line) + " |" for line in lines]
        return "\n".join([*formatted, *(["", self.note] if self.note else [])])


def quartile_cell(quartiles: Sequence[float], scale: float, digits: int) -> str:
    """The median, and in brackets the first and third quartile."""
    low, median, high = (f"{value * scale:,.{digits}f}" for value in quartiles)
    return f"{median} [{low}, {high}]"


def bytes_cell(nbytes: int | None) -> str:
    """In units of 10⁶ bytes."""
    return "" if nbytes is None else f"{nbytes / 1e6:,.1f}"


def machine_line(result: dict[str, object]) -> str:
    """What a table's figures were measured on."""
    machine = result["machine"]
    assert isinstance(machine, dict)
    device = machine["accelerator"] or f"{machine['cores']} CPU cores ({machine['cpu']}), no accelerator"
    return f"{machine['ranks']} ranks, {machine['process_group']}, {device}, torch {machine['torch']}"
