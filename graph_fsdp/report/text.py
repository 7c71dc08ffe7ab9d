"""A report is printed as tables of rich, which are plain text of one width unless a terminal shows them."""

from __future__ import annotations

import io
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graph_fsdp.report.data import Data

Cell: TypeAlias = str | Text

WIDTH = 120  # of the plain text; names that do not fit go on in the next line
_UNLIMITED = 10_000
_SHOWN = 40  # rows of a table; of a longer one its first and last are printed
_LAST = 8
_KIND_STYLES = {"gather": "cyan", "kept": "blue", "reduce": "magenta", "replicate": "magenta", "keep": "blue"}
_HEADER = ("bucket", "kind", "params", "bytes", "start", "wait", "first use", "free")
_PREDICTED = ("slots", "ahead", "takes ms", "exposed ms")


class Printed:
    """Prints ``parts()`` of rich: in the terminal's width and colours by ``rich.print``, else as plain text."""

    def parts(self) -> Iterable[RenderableType]:
        raise NotImplementedError

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self.parts()

    def __str__(self) -> str:
        return plain_text(self.parts())

    def __repr__(self) -> str:
        return str(self)


def plain_text(parts: Iterable[RenderableType], width: int = WIDTH) -> str:
    """Print without colours, the same wherever it is made."""
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], texts: int) -> str:
    """Return a table as plain text of any width. The first ``texts`` columns are text, the others numbers."""
    return plain_text([_table(header, rows, texts)], _UNLIMITED)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3f}"


def report_parts(data: Data) -> Iterator[RenderableType]:
    ranks = f"{data['world_size']} rank{'s' if data['world_size'] != 1 else ''}"
    over = f"{data['replicas']} replicas of {ranks}" if data["replicas"] > 1 else ranks
    title = f"graph_fsdp: {data['parameters']} parameters in {data['buckets']} buckets over {over}"
    yield Text(title, style="bold")
    failed = data["error"]
    if failed is not None:
        yield Text(f"\n{failed}", style="bold red")
    elif data["whole"]:
        yield Text(f"captured graphs: {len(data['captures'])}; compiled whole: {data['compiled_regions']}")
    else:
        compiled = f"compute regions: {data['regions']}, compiled {data['compiled_regions']}"
        gathered = f"most bytes gathered at once: {data['peak_gathered_bytes']:,}"
        yield Text(f"captured graphs: {len(data['captures'])}; {compiled}; {gathered}")
    if data["kept_nbytes"]:
        yield Text(f"gradients that are not reduced yet: {data['kept_nbytes']:,} bytes")
    if data["units"]:
        yield Text("")
        yield _unit_table(data["units"])
    for capture in data["captures"]:
        if failed is None:
            yield from _capture_parts(capture)
        else:
            passes = (f"{graph['phase']} graph after {', '.join(graph['passes'])}" for graph in capture["graphs"])
            yield from map(Text, ["", *passes])
    if data.get("step"):  # files that an earlier version has written have none
        yield from map(Text, ["", *data["step"]])


def _capture_parts(capture: Data) -> Iterator[RenderableType]:
    if capture["cause_kind"] != "first":
        yield Text(f"\ngraph {capture['index']} was captured because {capture['cause']}", style="yellow")
    for graph in capture["graphs"]:
        if graph["nodes"]:
            yield Text(f"\ngraph {capture['index']}, {graph['phase']}: {graph['nodes']} nodes", style="bold")
            yield from graph_parts(graph)


def graph_parts(graph: Data) -> Iterator[RenderableType]:
    yield _bucket_table(graph["buckets"]) if graph["buckets"] else Text("  nothing gathered or reduced")
    yield from (Text(f"  {line}") for line in [*graph["lines"], f"passes: {', '.join(graph['passes'])}"])


def _unit_table(units: Sequence[Data]) -> RenderableType:
    """Show units in a row that are alike as one line."""
    rows = []
    for sizes, alike in itertools.groupby(units, operator.itemgetter("parameters", "numel", "nbytes", "shard_nbytes")):
        first, *others = [unit["name"] for unit in alike]
        name = f"{first} to {others[-1]}: {len(others) + 1} units, each" if others else first
        rows.append([name, *(f"{n:,}" for n in sizes)])
    return _table(("unit", "params", "elements", "bytes", "bytes of a rank"), rows, texts=1, shown=_SHOWN)


def bucket_lines(buckets: Iterable[Data]) -> str:
    """Say in plain lines when each bucket is gathered, used, freed or reduced."""
    return columns(_HEADER, [_bucket_cells(b)[: len(_HEADER)] for b in buckets], texts=2)


def _bucket_cells(b: Data) -> list[str]:
    free = "kept" if b["escapes"] else b["free"]
    slots = ", ".join(map(str, b["slots"])) or None
    sizes = [str(len(b["parameters"])), f"{b['nbytes']:,}"]
    places = ["-" if n is None else str(n) for n in (b["start"], b["wait"], b["first_use"], free, slots, b["ahead"])]
    return [b["name"], b["kind"], *sizes, *places, milliseconds(b["seconds"]), milliseconds(b["exposed"])]


def _bucket_table(buckets: Sequence[Data]) -> RenderableType:
    rows = []
    for b in buckets:
        row = [*map(Text, _bucket_cells(b))]
        row[1].stylize(_KIND_STYLES.get(b["kind"], ""))
        row[-1].stylize("bold red" if b["exposed"] else "")
        rows.append(row)
    return _table((*_HEADER, *_PREDICTED), rows, texts=2, shown=_SHOWN)


def _table(header: Sequence[str], rows: Iterable[Sequence[Cell]], texts: int, shown: int | None = None) -> Padding:
    """Make a table whose first ``texts`` columns are text, the others numbers, of at most ``shown`` rows."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for n, name in enumerate(header):
        if n < texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    found = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    if shown is not None and len(found) > shown:
        hidden = len(found) - shown
        found[-hidden - _LAST : -_LAST] = [[Text(f"… {hidden} more", style="dim")]]
    for row in found:
        table.add_row(*row)
    return Padding(table, (0, 0, 0, 2), expand=False)
