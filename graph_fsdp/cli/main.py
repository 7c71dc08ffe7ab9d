"""Run ``graph-fsdp``, also as ``python -m graph_fsdp``. ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from graph_fsdp.cli import plan, saved

# Name → what adds its arguments, and what is called as ``run``, to a parser; and what it is for.
_COMMANDS = {
    "plan": (plan.add, "time and memory of a training step on a cluster that is not there"),
    "report": (saved.add_report, "print a report that report.save('report.json') or an error has written"),
    "consolidate": (saved.add_consolidate, "one model file from a checkpoint that many ranks have written"),
    "inspect-checkpoint": (
        saved.add_inspect_checkpoint,
        "contents, sizes and step of a checkpoint, and whether it is whole",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser("graph-fsdp", description="Fully sharded data parallelism by graph passes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (add, summary) in _COMMANDS.items():
        add(commands.add_parser(name, help=summary))
    chosen = parser.parse_args(arguments)

    from graph_fsdp.errors import CheckpointError, UnsupportedError

    try:
        chosen.run(chosen)
    except (ValueError, TypeError, UnsupportedError, CheckpointError, OSError) as error:
        print(f"graph-fsdp: {error}", file=sys.stderr)
        return 2
    return 0
