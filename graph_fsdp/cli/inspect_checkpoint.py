"""``graph-fsdp inspect-checkpoint`` shows what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

SUMMARY = "contents, sizes and step of a checkpoint, and whether it is whole"


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lists what a checkpoint has, and reads all of it to compare it with the sums that were saved with it. Nothing "
        "in it is run. The exit status is 2 for one that is damaged or not complete."
    )
    parser.add_argument("checkpoint", help="folder that graph_fsdp or torch.distributed.checkpoint has written")
    parser.add_argument("--tensors", action="store_true", help="a line for each tensor")
    parser.add_argument("--no-check", action="store_true", help="look at the description only")
    parser.add_argument("--json", action="store_true", help="print what there is as JSON")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> None:
    from graph_fsdp.checkpoint.contents import check, contents

    found = contents(chosen.checkpoint)
    if chosen.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        print(found)
        if chosen.tensors:
            print(found.table())
    if not chosen.no_check:
        checked = check(chosen.checkpoint)
        if not chosen.json:
            print(f"whole: {checked.entries} entries, {checked.bytes:,} bytes, {checked.sums} of them with known sums")
