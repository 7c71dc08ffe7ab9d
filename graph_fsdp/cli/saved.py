"""``graph-fsdp report``, ``inspect-checkpoint`` and ``consolidate`` read what a training has saved."""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prints a saved report: buckets, predicted times and bytes, and of each graph what the passes made of it. "
        "Reads data only; nothing in the file is run."
    )
    parser.add_argument("file", metavar="FILE.json", help="what report.save wrote, or the file that an error names")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--html", metavar="FILE.html", help="save it as a page for a browser, and print nothing")
    instead.add_argument("--diff", metavar="PASS", help="print what a pass changed, and nothing else")
    instead.add_argument("--code", metavar="PASS", help="print the graphs after a pass, and nothing else")
    instead.add_argument("--find", metavar="PARAMETER", help="print where a parameter is gathered, used and freed")
    parser.set_defaults(run=_report)


def add_inspect_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists what a checkpoint has, and reads all of it to compare it with the sums that were saved with it. Nothing "
        "in it is run. The exit status is 2 for one that is damaged or not complete."
    )
    parser.add_argument("checkpoint", help="folder that graph_fsdp or torch.distributed.checkpoint has written")
    parser.add_argument("--tensors", action="store_true", help="a line for each tensor")
    parser.add_argument("--no-check", action="store_true", help="look at the description only")
    parser.add_argument("--json", action="store_true", help="print what there is as JSON")
    parser.set_defaults(run=_inspect_checkpoint)


def add_consolidate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of a checkpoint as .safetensors or .pt, one tensor in memory at a time. No process group and "
        "no device is needed."
    )
    parser.add_argument("checkpoint", help="folder that graph_fsdp or torch.distributed.checkpoint has written")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="ends with .safetensors or .pt")
    parser.add_argument(
        "--shard-size",
        type=parse_bytes,
        metavar="2GB",
        help="split a larger model into files, with Hugging Face's index",
    )
    parser.add_argument("--model-key", default="model", help='where the model is; "": names are the keys')
    parser.set_defaults(run=_consolidate)


def _report(chosen: argparse.Namespace) -> None:
    from rich.console import Console

    from graph_fsdp.report.file import is_page, load_report
    from graph_fsdp.report.text import WIDTH

    if chosen.html is not None and not is_page(chosen.html):
        raise ValueError(f"--html: {chosen.html!r} must end in .html")
    report = load_report(chosen.file)
    if chosen.html is not None:
        report.save(chosen.html)
    elif chosen.find is not None:
        try:
            print(report.find(chosen.find))
        except KeyError as error:
            raise ValueError(error.args[0]) from error
    elif (name := chosen.code if chosen.diff is None else chosen.diff) is not None:
        graphs = [(c["index"], graph) for c in report.data["captures"] for graph in c["graphs"]]
        names = dict.fromkeys(stage["name"] for _, graph in graphs for stage in graph["stages"])
        if name not in names:
            raise ValueError(f"no graph has a stage {name!r}; there are {', '.join(names) or 'none'}")
        for index, graph in graphs:
            if any(stage["name"] == name for stage in graph["stages"]):
                phase = graph["phase"]
                print(f"# graph {index}, {phase}")
                print(report.diff(name, phase, index) if chosen.code is None else report.stages(phase, index)[name])
    else:
        console = Console()
        if console.is_terminal:  # a narrower one wraps lines itself: a table made for it would lose names and digits
            console.width = max(console.width, WIDTH)
            console.print(report)
        else:
            print(report)


def _inspect_checkpoint(chosen: argparse.Namespace) -> None:
    from graph_fsdp.checkpoint.contents import check, contents

    found = contents(chosen.checkpoint)
    if chosen.json:
        figures = {**asdict(found), "checked": None}
        try:
            if not chosen.no_check:
                figures["checked"] = asdict(check(chosen.checkpoint))
        finally:  # what there is of a damaged one, too
            print(json.dumps(figures, indent=1))
        return
    print(found)
    if chosen.tensors:
        print(found.table())
    if not chosen.no_check:
        checked = check(chosen.checkpoint)
        print(f"whole: {checked.entries} entries, {checked.bytes:,} bytes, {checked.sums} of them with known sums")


def _consolidate(chosen: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from graph_fsdp.checkpoint.consolidate import consolidate
    from graph_fsdp.checkpoint.contents import contents

    start = f"{chosen.model_key}." if chosen.model_key else ""
    total = sum(tensor.bytes for tensor in contents(chosen.checkpoint).tensors if tensor.key.startswith(start))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("consolidating", total=total)
        made = consolidate(
            chosen.checkpoint,
            chosen.out,
            shard_size=chosen.shard_size,
            model_key=chosen.model_key,
            progress=lambda nbytes: bar.advance(task, nbytes),
        )
    print(f"{made.tensors} tensors, {made.bytes:,} bytes: {', '.join(str(file) for file in made.files)}")
    if made.left_out:
        print(f"left out, as they are no tensors: {', '.join(made.left_out)}", file=sys.stderr)


def parse_bytes(text: str) -> int:
    """Return the bytes that a size means: ``4096``, ``80GB``, ``1.5GiB``. Raises ArgumentTypeError if it is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(?:([KMGT])(I?))?B)?", text.strip().upper())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or as 500MB, 2GB, 1GiB")
    return int(float(found[1]) * (2**10 if found[3] else 10**3) ** " KMGT".index(found[2] or " "))
