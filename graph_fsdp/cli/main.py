"""Run ``graph-fsdp``, also as ``python -m graph_fsdp``. ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from graph_fsdp.cli import consolidate, inspect_checkpoint, plan, report

# Each module has SUMMARY and add(parser), which sets what `run` is called.
_COMMANDS = {
    "plan": plan,
    "report": report,
    "consolidate": consolidate,
    "inspect-checkpoint": inspect_checkpoint,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: 0, or 2 for invalid input."""
    parser = argparse.ArgumentParser("graph-fsdp", description="Fully sharded data parallelism by graph passes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        command.add(commands.add_parser(name, help=command.SUMMARY))
    chosen = parser.parse_args(arguments)

    from graph_fsdp.errors import CheckpointError, UnsupportedError

    try:
        chosen.run(chosen)
    except (ValueError, TypeError, UnsupportedError, CheckpointError, OSError) as error:
        print(f"graph-fsdp: {error}", file=sys.stderr)
        return 2
    return 0
