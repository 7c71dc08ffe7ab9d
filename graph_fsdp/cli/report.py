"""``graph-fsdp report`` prints a report from a file, or saves it as a page."""

from __future__ import annotations

import argparse

SUMMARY = "print a report that report.save('report.json') or an error has written"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a saved report: buckets, predicted times and bytes, and of each graph what the passes made of it. "
        "Reads data only; nothing in the file is run."
    )
    parser.add_argument("file", metavar="FILE.json", help="what report.save wrote, or the file that an error names")
    parser.add_argument("--html", metavar="FILE.html", help="save it as a page for a browser, and print nothing")
    parser.add_argument("--diff", metavar="PASS", help="print what a pass changed, and nothing else")
    parser.add_argument("--code", metavar="PASS", help="print the graphs after a pass, and nothing else")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from graph_fsdp.report.file import is_page, load_report

    if chosen.html and not is_page(chosen.html):
        raise ValueError(f"--html: {chosen.html!r} must end in .html")
    report = load_report(chosen.file)
    if chosen.html:
        report.save(chosen.html)
    elif chosen.diff or chosen.code:
        name = chosen.diff or chosen.code
        graphs = [(c["index"], graph) for c in report.data["captures"] for graph in c["graphs"]]
        names = dict.fromkeys(stage["name"] for _, graph in graphs for stage in graph["stages"])
        if name not in names:
            raise ValueError(f"no graph has a stage {name!r}; there are {', '.join(names) or 'none'}")
        for index, graph in graphs:
            if any(stage["name"] == name for stage in graph["stages"]):
                phase = graph["phase"]
                print(f"# graph {index}, {phase}")
                print(report.diff(name, phase, index) if chosen.diff else report.stages(phase, index)[name])
    else:
        console = Console()
        if console.is_terminal:
            console.print(report)
        else:
            print(report)
