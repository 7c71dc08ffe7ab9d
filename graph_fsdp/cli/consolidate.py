"""``graph-fsdp consolidate``: a model out of a checkpoint."""

from __future__ import annotations

import argparse
import re
import sys

SUMMARY = "one model file from a checkpoint that many ranks have written"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the model of a checkpoint as .safetensors or .pt, one tensor in memory at a time. No process group and "
        "no device is needed."
    )
    parser.add_argument("checkpoint", help="folder that graph_fsdp or torch.distributed.checkpoint has written")
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="ends with .safetensors or .pt")
    parser.add_argument(
        "--shard-size", type=_bytes, metavar="2GB", help="split a larger model into files, with Hugging Face's index"
    )
    parser.add_argument("--model-key", default="model", help='where the model is; "": names are the keys')
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> None:
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


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)", text.upper())
    unit = None if found is None else _UNITS.get(found[2] if found[2] != "B" else "")
    if found is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: give bytes, or as 500MB, 2GB, 1GiB")
    return int(float(found[1]) * unit)
