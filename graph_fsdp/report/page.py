"""``GraphReport.save``: the report as one page that needs no network.

The page's data is JSON, deflated and in base64: texts of graphs repeat themselves, and a model of a thousand layers
has millions of lines in all its stages. A stage is kept as its difference to the one before. The page's own script
(``html/``) draws what is looked at.
"""

from __future__ import annotations

import base64
import functools
import json
import zlib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import jinja2
from torch import fx

from graph_fsdp.passes.analysis.memory import MemoryProfile
from graph_fsdp.passes.analysis.storages import CATEGORIES
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.operands import operand
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.data import BucketData, ReportData
from graph_fsdp.report.parameter_life import ParameterLife, lives
from graph_fsdp.report.source_lines import module_name, source_line
from graph_fsdp.report.trace_events import ScheduledGraph, lane_of

FORMAT = 2  # of the data; a script reads its own
_SCRIPTS = ("data.js", "timeline.js", "stages.js", "page.js")
_MICROSECONDS = 1e6

Schedule = dict[str, Any]
"""What the page draws of the graphs of one capture, as ``schedule_data`` makes it."""


def schedule_data(spec: ModelSpec, capture: int, graphs: Sequence[ScheduledGraph]) -> Schedule:
    """The timeline, the memory and the parameters of ``graphs``, all of one capture, after all passes."""
    data = _Data(spec)
    begins = [sum(s.timeline.seconds for s in graphs[:n]) * _MICROSECONDS for n in range(len(graphs))]
    return {
        "capture": capture,
        "hardware": graphs[0].cost.hardware.name,
        "graphs": [data.graph(s, begin) for s, begin in zip(graphs, begins, strict=True)],
        "lives": data.lives(lives(spec, [(capture, s.graph) for s in graphs])),
        "strings": list(data.strings),
    }


def html_page(report: ReportData, schedule: Schedule | None) -> str:
    """The page. ``report`` has stages. Without a ``schedule`` it shows what the passes left behind."""
    timed = schedule or {"capture": -1, "hardware": None, "graphs": [], "lives": {}, "strings": []}
    of_timeline = {graph["phase"]: graph for graph in timed["graphs"]}
    graphs, sources = [], []
    for capture in report["captures"]:
        title = f"graph {capture['index']}, " if len(report["captures"]) > 1 else ""
        for graph in capture["graphs"]:
            named = {"phase": graph["phase"], "title": f"{title}{graph['phase']}", "stages": graph["stages"]}
            if capture["index"] == timed["capture"] and graph["phase"] in of_timeline:
                rows = [_row(bucket) for bucket in graph["buckets"]]
                graphs.append({**of_timeline[graph["phase"]], **named, "rows": rows})
            elif graph["stages"]:
                sources.append({**named, "cause": capture["cause"]})
    page = {
        "format": FORMAT,
        "hardware": timed["hardware"],
        "ranks": report["world_size"] * report["replicas"],
        "parameters": report["parameters"],
        "buckets": report["buckets"],
        "error": None if report["error"] is None else f"{report['error']['kind']}: {report['error']['message']}",
        "captures": [[capture["index"], capture["cause"]] for capture in report["captures"]],
        "graphs": graphs,
        "sources": sources,
        "lives": timed["lives"],
        "strings": timed["strings"],
    }
    packed = base64.b64encode(zlib.compress(json.dumps(page, separators=(",", ":")).encode(), 6)).decode()
    return _template().render(
        title=f"graph_fsdp: {page['parameters']} parameters on {page['ranks']} ranks",
        style=_asset("report.css"),
        script="\n".join(map(_asset, _SCRIPTS)),
        data=packed,
    )


def _row(bucket: BucketData) -> list[Any]:
    free = "kept" if bucket["kept"] else bucket["free"]
    return [
        *(bucket["name"], bucket["kind"], bucket["parameters"], bucket["nbytes"], bucket["start"], bucket["wait"]),
        *(bucket["first_use"], free, bucket["ahead"], bucket["seconds"], bucket["exposed"]),
    ]


class _Data:
    """Makes plain lists of graphs. ``strings``: each text once; elsewhere stands its number, -1 for none."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.strings: dict[str, int] = {}

    def string(self, text: str | None) -> int:
        return -1 if text is None else self.strings.setdefault(text, len(self.strings))

    def graph(self, scheduled: ScheduledGraph, begin: float) -> dict[str, Any]:
        graph, timeline = scheduled.graph, scheduled.timeline
        nodes = graph.nodes
        seconds = scheduled.cost.graph_seconds(graph)
        position = {node: index for index, node in enumerate(nodes)}
        events = {event.node: event for event in timeline.events}
        starts = [begin + timeline.starts[node] * _MICROSECONDS for node in nodes]
        compute, waits = [], []
        for index, node in enumerate(nodes):
            if node.target in dialect.TRANSFER_WAITS:
                waited = events[operand(node)].exposed
                if waited:
                    waits.append([index, starts[index], waited * _MICROSECONDS])
            elif node not in events and seconds[node]:
                compute.append([index, starts[index], seconds[node] * _MICROSECONDS])
        return {
            "phase": graph.phase,
            "begin": begin,
            "seconds": timeline.seconds,
            "compute_seconds": timeline.compute,
            "communication_seconds": timeline.communication,
            "exposed_seconds": timeline.exposed,
            "names": [node.name for node in nodes],
            "operators": [self.string(_operator(node)) for node in nodes],
            "modules": [self.string(module_name(node)) for node in nodes],
            "sources": [self.string(_source(node)) for node in nodes],
            "compute": _rounded(compute),
            "waits": _rounded(waits),
            "communication": [
                [
                    position[event.node],
                    self.string(lane_of(event.node, self.spec)),
                    round(begin + event.begin * _MICROSECONDS, 3),
                    round((event.end - event.begin) * _MICROSECONDS, 3),
                    round(event.exposed * _MICROSECONDS, 3),
                ]
                for event in timeline.events
            ],
            "records": {index: self.record(node) for index, node in enumerate(nodes) if dialect.record(node)},
            "memory": _memory(scheduled.memory, starts) if scheduled.memory is not None else None,
        }

    def record(self, node: fx.Node) -> list[Any]:
        found = dialect.record(node)
        assert found is not None
        return [found.role.value, found.unit or "root", found.bucket, found.nbytes, len(found.params)]

    def lives(self, found: dict[str, ParameterLife]) -> dict[str, Any]:
        """Parameter → what it is, and (graph, position, kind) of each event: which graph of the page, by phase."""
        return {
            name: [str(life).split("\n", 1)[0], [[e.phase, e.position, self.string(e.kind)] for e in life.events]]
            for name, life in found.items()
        }


def _memory(memory: MemoryProfile, starts: list[float]) -> dict[str, Any]:
    """Bytes by category, where any of them changes."""
    categories = [c for c in CATEGORIES if c in memory.timeline]
    rows = list(zip(*(memory.timeline[c] for c in categories), strict=True))
    changed = [n for n, row in enumerate(rows) if n == 0 or row != rows[n - 1]]
    return {
        "categories": categories,
        "positions": changed,
        "times": [round(starts[n], 3) for n in changed],
        "values": [rows[n] for n in changed],
        "peak": memory.peak,
        "peak_position": memory.peak_index,
        "holders": [[holder.node, holder.category, holder.nbytes] for holder in memory.holders],
    }


def _operator(node: fx.Node) -> str:
    return node.op if node.op in ("placeholder", "output") else str(node.target)


def _source(node: fx.Node) -> str | None:
    found = source_line(node)
    return None if found is None else f"{found.file}:{found.line}  {found.code}"


def _rounded(rows: Iterable[list[float]]) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in rows]


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_asset("report.html"))


@functools.cache
def _asset(name: str) -> str:
    return resources.files("graph_fsdp.report").joinpath("html", name).read_text(encoding="utf-8")
