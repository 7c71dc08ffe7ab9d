"""``GraphReport.save``: the report as one page that needs no network.

The page's data is JSON, deflated and in base64: texts of graphs repeat themselves, and a model of a thousand layers
has millions of lines in all its stages. A stage is kept as its difference to the one before. The page's own script
(``html/``) draws what is looked at.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Sequence

import jinja2
from torch import fx

from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.spec import ModelSpec
from graph_fsdp.report.data import Data, error_text
from graph_fsdp.report.parameter_life import lives
from graph_fsdp.report.source_lines import module_name, source_line
from graph_fsdp.report.trace_events import MICROSECONDS, ScheduledGraph, communication, in_a_row

FORMAT = 2  # of the data; a script reads its own
_SCRIPTS = ("data.js", "timeline.js", "stages.js", "page.js")
_FILES = jinja2.PackageLoader("graph_fsdp.report", "html")
_TEMPLATES = jinja2.Environment(loader=_FILES, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
_COLUMNS = ("name", "kind", "parameters", "nbytes", "start", "wait", "first_use", "free", "ahead", "seconds", "exposed")


def schedule_data(spec: ModelSpec, capture: int, graphs: Sequence[ScheduledGraph]) -> Data:
    """What the page draws of ``graphs``, all of one capture, after all passes: the timeline, the memory and the
    parameters. ``lives``: parameter → what it is, and (phase, position, kind) of each event. ``strings``: each text
    once; elsewhere stands its number, -1 for none."""
    strings: dict[str, int] = {}

    def string(text: str | None) -> int:
        return -1 if text is None else strings.setdefault(text, len(strings))

    found = [_graph(begin, scheduled, spec, string) for begin, scheduled in in_a_row(graphs)]
    of_parameters = lives(spec, [(capture, s.graph) for s in graphs])
    return {
        "capture": capture,
        "hardware": graphs[0].cost.hardware.name,
        "graphs": found,
        "lives": {
            name: [str(life).split("\n", 1)[0], [[e.phase, e.position, string(e.kind)] for e in life.events]]
            for name, life in of_parameters.items()
        },
        "strings": list(strings),
    }


def _graph(begin: float, scheduled: ScheduledGraph, spec: ModelSpec, string: Callable[[str | None], int]) -> Data:
    """``compute``, ``waits``: position, begin and duration in microseconds; ``communication``: with the lane as well,
    behind the position. ``records``: what nodes of the dialect do."""
    nodes, timeline = scheduled.graph.nodes, scheduled.timeline
    position = {node.name: index for index, node in enumerate(nodes)}
    compute = [(node.name, begin + timeline.starts[node], seconds) for node, seconds in scheduled.computing().items()]
    slices = list(communication(begin, scheduled, spec))
    return {
        "phase": scheduled.graph.phase,
        "begin": begin * MICROSECONDS,
        "seconds": timeline.seconds,
        "compute_seconds": timeline.compute,
        "exposed_seconds": timeline.exposed,
        "names": list(position),
        "operators": [string(n.op if n.op in ("placeholder", "output") else str(n.target)) for n in nodes],
        "modules": [string(module_name(node)) for node in nodes],
        "sources": [string(_source(node)) for node in nodes],
        "compute": [[position[name], _micro(at), _micro(seconds)] for name, at, seconds in compute],
        "waits": [[position[s.name], _micro(s.begin), _micro(s.seconds)] for s in slices if s.category == "exposed"],
        "communication": [
            [position[s.name], string(s.lane), _micro(s.begin), _micro(s.seconds)]
            for s in slices
            if s.category == "communication"
        ],
        "records": {
            index: [found.role.value, found.unit or "root", found.bucket, found.nbytes, len(found.params)]
            for index, found in enumerate(map(dialect.record, nodes))
            if found is not None
        },
        "memory": _memory(begin, scheduled),
    }


def html_page(report: Data, schedule: Data | None) -> str:
    """The page. ``report`` has stages. Without a ``schedule`` it shows what the passes left behind."""
    timed = schedule or {"capture": -1, "hardware": None, "graphs": [], "lives": {}, "strings": []}
    of_timeline = {graph["phase"]: graph for graph in timed["graphs"]}
    graphs, sources = [], []
    for capture in report["captures"]:
        title = f"graph {capture['index']}, " if len(report["captures"]) > 1 else ""
        for graph in capture["graphs"]:
            named = {"phase": graph["phase"], "title": f"{title}{graph['phase']}", "stages": graph["stages"]}
            if capture["index"] == timed["capture"] and graph["phase"] in of_timeline:
                buckets = [{**b, "free": "kept"} if b["kept"] else b for b in graph["buckets"]]
                rows = [[b[column] for column in _COLUMNS] for b in buckets]
                graphs.append({**of_timeline[graph["phase"]], **named, "rows": rows})
            elif graph["stages"]:
                sources.append({**named, "cause": capture["cause"]})
    page = {
        "format": FORMAT,
        "hardware": timed["hardware"],
        "ranks": report["world_size"] * report["replicas"],
        "parameters": report["parameters"],
        "buckets": report["buckets"],
        "graphs": graphs,
        "sources": sources,
        "lives": timed["lives"],
        "strings": timed["strings"],
    }
    packed = base64.b64encode(zlib.compress(json.dumps(page, separators=(",", ":")).encode(), 6)).decode()
    style, *script = (_FILES.get_source(_TEMPLATES, name)[0] for name in ("report.css", *_SCRIPTS))
    return _TEMPLATES.get_template("report.html").render(
        title=f"graph_fsdp: {page['parameters']} parameters on {page['ranks']} ranks",
        error=error_text(report),
        causes=[f"graph {c['index']} was captured because {c['cause']}" for c in report["captures"][1:]],
        timed=bool(graphs),
        style=style,
        script="\n".join(script),
        data=packed,
    )


def _memory(begin: float, scheduled: ScheduledGraph) -> Data | None:
    """Bytes by category, where any of them changes."""
    memory = scheduled.memory
    if memory is None:
        return None
    starts, held = list(scheduled.timeline.starts.values()), scheduled.held()
    return {
        "categories": list(memory.timeline),
        "positions": list(held),
        "times": [_micro(begin + starts[position]) for position in held],
        "values": [list(values.values()) for values in held.values()],
        "peak": memory.peak,
        "peak_position": memory.peak_index,
        "holders": [[holder.node, holder.category, holder.nbytes] for holder in memory.holders],
    }


def _micro(seconds: float) -> float:
    return round(seconds * MICROSECONDS, 3)


def _source(node: fx.Node) -> str | None:
    found = source_line(node)
    return None if found is None else f"{found.file}:{found.line}  {found.code}"
