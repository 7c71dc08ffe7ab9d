"""How a report is printed: tables of rich, which are plain text of one width unless a terminal shows them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from graph_fsdp.report.data import BucketData, CaptureData, GraphData, ReportData, UnitData

WIDTH = 120  # of the plain text; names that do not fit go on in the next line
_SHOWN = 40  # rows of a table; of a longer one its first and last are printed
_LAST = 8
_KIND_STYLES = {"gather": "cyan", "kept": "blue", "reduce": "magenta", "replicate": "magenta", "keep": "blue"}
_MILLI = 1e3


def plain_text(parts: Iterable[RenderableType]) -> str:
    """Without colours, and the same wherever it is made."""
    console = Console(
        file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False, _environ={}
    )
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def report_parts(data: ReportData) -> Iterator[RenderableType]:
    """What is printed of a report, from top to bottom."""
    ranks = _count(data["world_size"], "rank")
    over = f"{data['replicas']} replicas of {ranks}" if data["replicas"] > 1 else ranks
    yield _title(f"graph_fsdp: {data['parameters']} parameters in {data['buckets']} buckets over {over}")
    if data["error"] is not None:
        yield Text(f"\n{data['error']['kind']}: {data['error']['message']}", style="bold red")
    else:
        yield _line(f"captured graphs: {len(data['captures'])}; {_compiled(data)}")
    if data["kept_nbytes"]:
        yield _line(f"gradients that are not reduced yet: {data['kept_nbytes']:,} bytes")
    if data["units"]:
        yield Text("")
        yield _unit_table(data["units"])
    for capture in data["captures"]:
        yield from _capture_parts(capture) if data["error"] is None else _passes_run(capture)


def _compiled(data: ReportData) -> str:
    if data["whole"]:
        return f"compiled whole: {data['compiled_regions']}"
    return (
        f"compute regions: {data['regions']}, compiled {data['compiled_regions']}; "
        f"most bytes gathered at once: {data['peak_gathered_bytes']:,}"
    )


def _passes_run(capture: CaptureData) -> Iterator[RenderableType]:
    """Of a capture that failed."""
    yield Text("")
    for graph in capture["graphs"]:
        yield _line(f"{graph['phase']} graph after {', '.join(name for name, _ in graph['passes'])}")


def _capture_parts(capture: CaptureData) -> Iterator[RenderableType]:
    shown = [graph for graph in capture["graphs"] if graph["nodes"]]
    if capture["cause_kind"] != "first":
        yield Text(f"\ngraph {capture['index']} was captured because {capture['cause']}", style="yellow")
    for graph in shown:
        yield _title(f"\ngraph {capture['index']}, {graph['phase']}: {graph['nodes']} nodes")
        yield from graph_parts(graph)


def graph_parts(graph: GraphData) -> Iterator[RenderableType]:
    """What is printed of one graph."""
    yield _bucket_table(graph["buckets"]) if graph["buckets"] else _line("  nothing gathered or reduced")
    yield from (_line(f"  {line}") for line in graph["slots"])
    if graph["whole"]:
        yield _line("  compiled whole: the compiler allocates the buffers")
        yield from (_line(f"  {line}") for line in graph["compiled_by_xla"])
    elif graph["buckets"]:
        yield _line(f"  copied by packing and unpacking: {graph['copied_nbytes']:,} bytes")
    yield from (_line(f"  {line}") for line in [*graph["memory"], *graph["cuda_graphs"]])
    yield _line(f"  {predicted(graph)}")
    yield _line(f"  passes: {', '.join(name for name, _ in graph['passes'])}")


def predicted(graph: GraphData) -> str:
    """One line on the schedule."""
    found = graph["schedule"]
    if found is None:
        return "predicted: no cost model"
    return (
        f"predicted on {found['hardware']}: {found['seconds'] * _MILLI:.3f} ms, compute "
        f"{found['compute'] * _MILLI:.3f}, communication {found['communication'] * _MILLI:.3f}, of it exposed "
        f"{found['exposed'] * _MILLI:.3f}"
    )


def _unit_table(units: Sequence[UnitData]) -> RenderableType:
    """Units in a row that are alike are one line."""
    table = _table(("unit", "params", "elements", "bytes", "bytes of a rank"), texts=1)
    alike: list[list[UnitData]] = []
    for unit in units:
        if alike and _sizes(alike[-1][-1]) == _sizes(unit):
            alike[-1].append(unit)
        else:
            alike.append([unit])
    rows = []
    for group in alike:
        first, last = group[0], group[-1]
        name = first["name"] if first is last else f"{first['name']} to {last['name']}: {len(group)} units, each"
        rows.append((Text(name), *(Text(f"{n:,}") for n in _sizes(first))))
    return _filled(table, rows)


def _sizes(unit: UnitData) -> tuple[int, int, int, int]:
    return unit["parameters"], unit["numel"], unit["nbytes"], unit["shard_nbytes"]


_BUCKET_HEADER = (
    *("bucket", "kind", "params", "bytes", "start", "wait", "first use", "free"),
    *("slots", "ahead", "takes ms", "exposed ms"),
)


def _bucket_table(buckets: Sequence[BucketData]) -> RenderableType:
    rows = []
    for b in buckets:
        free = "kept" if b["kept"] else _number(b["free"])
        exposed = _milliseconds(b["exposed"])
        rows.append(
            (
                Text(b["name"]),
                Text(b["kind"], style=_KIND_STYLES.get(b["kind"], "")),
                Text(str(b["parameters"])),
                Text(f"{b['nbytes']:,}"),
                *(Text(_number(n)) for n in (b["start"], b["wait"], b["first_use"])),
                Text(free),
                Text(", ".join(map(str, b["slots"])) or "-"),
                Text(_number(b["ahead"])),
                Text(_milliseconds(b["seconds"])),
                Text(exposed, style="bold red" if b["exposed"] else ""),
            )
        )
    return _filled(_table(_BUCKET_HEADER, texts=2), rows)


def _filled(table: Table, rows: Sequence[tuple[Text, ...]]) -> RenderableType:
    hidden = len(rows) - _SHOWN if len(rows) > _SHOWN else 0
    for row in rows[: _SHOWN - _LAST] if hidden else rows:
        table.add_row(*row)
    if hidden:
        table.add_row(Text(f"… {hidden} more", style="dim"))
        for row in rows[-_LAST:]:
            table.add_row(*row)
    return Padding(table, (0, 0, 0, 2), expand=False)


def _table(header: Sequence[str], texts: int) -> Table:
    """The first ``texts`` columns are text, the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for n, name in enumerate(header):
        if n < texts:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _line(text: str) -> Text:
    return Text(text)


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * _MILLI:.3f}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n != 1 else ''}"
