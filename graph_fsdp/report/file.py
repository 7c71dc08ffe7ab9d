"""A report is saved as JSON of one version, which any machine prints or makes a page of.

A page needs no network. Its data is JSON, deflated and in base64, with each stage as its difference to the one before,
since a model of a thousand layers has millions of lines in all its stages. The page's own script (``html/``) draws it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from pathlib import Path

import jinja2
import torch
from rich.console import RenderableType

from graph_fsdp.report.data import Data, stage_diff, stage_texts
from graph_fsdp.report.provenance import not_there
from graph_fsdp.report.text import Printed, report_parts

FORMAT = "graph_fsdp.GraphReport"
VERSION = 2  # of the file; no other is read
_PAGES = (".html", ".htm")
_SCRIPTS = ("data.js", "timeline.js", "stages.js", "page.js")
_FILES = jinja2.PackageLoader("graph_fsdp.report", "html")
_TEMPLATES = jinja2.Environment(loader=_FILES, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def is_page(path: str | PathLike[str]) -> bool:
    """Say whether a report is to be saved as a page, or as data. Raises ValueError if the suffix says neither."""
    suffix = Path(fspath(path)).suffix.lower()
    if suffix not in (*_PAGES, ".json"):
        raise ValueError(f"path: a report is saved as .html or .json, and {fspath(path)!r} ends in neither")
    return suffix in _PAGES


class SavedReport(Printed):
    """Keeps a report without the model, as :func:`graph_fsdp.load_report` returns it. It prints as the report does, and
    saves as page or data; ``data`` is what it knows, ``error`` what ended the capture, where something did."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.error: str | None = data["error"]

    def stages(self, phase: str, capture: int | None = None) -> dict[str, str]:
        """Return pass → the graph after it, as Python, of a ``capture`` by its number, or of the latest with such a
        graph.

        Raises:
            KeyError: there is no such graph.
        """
        for found in reversed(self.data["captures"]):
            for graph in found["graphs"]:
                if graph["phase"] == phase and graph["stages"] and capture in (None, found["index"]):
                    return stage_texts(graph["stages"])
        which = f"capture {capture} of the report" if capture is not None else "report"
        known = ", ".join(f"{c['index']}: {g['phase']}" for c in self.data["captures"] for g in c["graphs"])
        raise KeyError(f"the {which} has no {phase} graph; it has {known or 'none'}")

    def diff(self, stage: str, phase: str, capture: int | None = None) -> str:
        """Return a unified diff of a graph after the pass ``stage`` against the one before.

        Raises:
            KeyError: there is no such graph or stage.
        """
        texts = self.stages(phase, capture)
        return stage_diff(phase, list(texts), stage, texts.__getitem__)

    def find(self, parameter: str) -> str:
        """Follow one parameter, as :meth:`GraphReport.find` does, in the graphs that the page draws; as text.

        Raises:
            KeyError: the model had no sharded parameter of this name, or nothing was drawn; says which names are like
                it.
        """
        if not self.data["lives"]:
            raise KeyError("the report follows no parameter: no graph in it went through all passes; see its stages")
        if parameter not in self.data["lives"]:
            raise KeyError(not_there(parameter, self.data["lives"]))
        about, events = self.data["lives"][parameter]
        lines, before = [about], None
        width = max((len(kind) for _, _, kind, _ in events), default=0)
        for phase, position, kind, source in events:
            lines += ["", phase] if phase != before else []
            lines.append(f"  {position:>6}  {kind:<{width}}  {source}".rstrip())
            before = phase
        return "\n".join(lines)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the report to a file, as ``.html`` or ``.json`` by the suffix of ``path``.

        Raises:
            ValueError: the suffix is neither.
            OSError: the file cannot be written.
        """
        write_text(path, self.to_html() if is_page(path) else self.to_json())

    def to_json(self) -> str:
        """Return the text of a file that :func:`load_report` reads."""
        document = {"format": FORMAT, "version": VERSION, "torch": torch.__version__, "report": self.data}
        return json.dumps(document, separators=(",", ":"))

    def to_html(self) -> str:
        """Return the page. Where nothing is to be drawn, it shows what the passes left behind."""
        report, captures = self.data, self.data["captures"]
        graphs = [
            {**graph, "title": f"graph {capture['index']}, {graph['phase']}" if captures[1:] else graph["phase"]}
            for capture in captures
            for graph in capture["graphs"]
            if graph["stages"] or graph["timeline"]
        ]
        page = {"buckets": report["buckets"], "graphs": graphs, "lives": report["lives"]}
        packed = base64.b64encode(zlib.compress(json.dumps(page, separators=(",", ":")).encode(), 6)).decode()
        style, *script = (_FILES.get_source(_TEMPLATES, name)[0] for name in ("report.css", *_SCRIPTS))
        ranks = report["world_size"] * report["replicas"]
        return _TEMPLATES.get_template("report.html").render(
            title=f"graph_fsdp: {report['parameters']} parameters on {ranks} ranks",
            error=self.error,
            causes=[f"graph {c['index']} was captured because {c['cause']}" for c in captures[1:]],
            step="\n".join(report.get("step", ())),
            timed=any(graph["timeline"] for graph in graphs),
            style=style,
            script="\n".join(script),
            data=packed,
        )

    def parts(self) -> Iterable[RenderableType]:
        return report_parts(self.data)


def write_text(path: str | PathLike[str], text: str) -> None:
    """Write a whole file that a user names. Raises OSError of the kind that the system gave, with what to do."""
    _write(path, "w", text)


def check_writable(path: str | PathLike[str]) -> None:
    """Raise what :func:`write_text` would, and leave a file as it is."""
    is_new = not Path(path).exists()
    _write(path, "a", "")
    if is_new:
        Path(path).unlink()


def _write(path: str | PathLike[str], mode: str, text: str) -> None:
    try:
        with open(path, mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        reason = f"path: cannot be written ({error.strerror}); name a file in a folder that exists and is yours"
        raise type(error)(error.errno, reason, fspath(path)) from error


def load_report(path: str | PathLike[str]) -> SavedReport:
    """Load a report that ``report.save("….json")`` wrote, or that was saved when a pass failed. Reads data only.

    Raises:
        ValueError: it is another file, or a report of another version.
        OSError: it cannot be read.
    """
    name = fspath(path)
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        hint = (
            "; a page is for browsers, and the report is saved as .json for this" if Path(name).suffix in _PAGES else ""
        )
        raise ValueError(f"path: {name!r} is not JSON, and so no saved report ({error}){hint}") from error
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ValueError(f"path: {name!r} is no saved report; one is written by report.save('report.json')")
    if document.get("version") != VERSION:
        raise ValueError(
            f"path: {name!r} is a report of version {document.get('version')!r}, and this graph_fsdp reads version "
            f"{VERSION}; read it with the graph_fsdp that wrote it, or save the report again"
        )
    try:
        found = SavedReport(document["report"])
        str(found), found.to_html()
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration) as error:
        raise ValueError(f"path: {name!r} is a damaged report ({error!r}); save it again") from error
    return found
