"""``graph-fsdp consolidate`` writes the model of a checkpoint as one file."""

from __future__ import annotations

import argparse
import functools
import sys

from graph_fsdp.cli.sizes import parse_bytes

SUMMARY = "one model file from a checkpoint that many ranks have written"
_bytes = functools.partial(parse_bytes, hint="as 500MB, 2GB, 1GiB")


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
