"""Run ``graph-fsdp``, also as ``python -m graph_fsdp``. ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from graph_fsdp import __version__
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

# What to do, and an example of it: of the command line first.
EXAMPLES = {
    "Before there is a cluster": {
        "How long a step takes, and whether it fits": "graph-fsdp plan config.json --mesh 64x8 --hardware h100",
        "The fastest options that fit": "graph-fsdp plan config.json --mesh 64 --search --memory 80GB",
        "A pipeline with tensor parallelism": "graph-fsdp plan config.json --mesh pp=4,dp_shard=8,tp=2",
    },
    "A report that was saved, or that an error names": {
        "Buckets, times and bytes of each graph": "graph-fsdp report report.json",
        "Where a parameter is gathered, used and freed": "graph-fsdp report report.json --find blocks.0.up.weight",
        "What a pass changed": "graph-fsdp report report.json --diff prefetch",
        "A page for a browser": "graph-fsdp report report.json --html report.html",
    },
    "A checkpoint": {
        "What it has, and whether it is whole": "graph-fsdp inspect-checkpoint runs/step_10 --tensors",
        "One file of its model": "graph-fsdp consolidate runs/step_10 -o model.safetensors",
    },
}
IN_PYTHON = {
    "Shard and compile a model": "model = graph_fsdp.compile(model)",
    "See what was made of it, after a step": "print(graph_fsdp.inspect(model))",
    "Save that": "graph_fsdp.inspect(model).save('report.json')",
    "Watch a training": "graph_fsdp.monitor(model)",
    "Time it": "print(graph_fsdp.profile(model, *batch))",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand, or without one print what there is. Return the exit status: 0, 2 for invalid input, and as a
    shell has it 130 after Ctrl-C and 141 where nobody reads the output any more (``graph-fsdp report FILE | head``)."""
    try:
        status = _main(arguments)
        print(end="", flush=True)  # also where there is no output at all
        return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:  # of the output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python writes what is left at its end
        if isinstance(error, BrokenPipeError):
            return 128 + getattr(signal, "SIGPIPE", 13)  # Windows has none
        print(f"graph-fsdp: the output cannot be written: {error}", file=sys.stderr)
        return 2


def _main(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser("graph-fsdp", description="Fully sharded data parallelism by graph passes.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, (add, summary) in _COMMANDS.items():
        add(commands.add_parser(name, help=summary))
    chosen = parser.parse_args(arguments)
    if "run" not in chosen:
        print(_overview())
        return 0

    from graph_fsdp.errors import CheckpointError, UnsupportedError

    try:
        chosen.run(chosen)
    except BrokenPipeError:
        raise
    except (ValueError, TypeError, UnsupportedError, CheckpointError, OSError) as error:
        print(f"graph-fsdp: {error}", file=sys.stderr)
        return 2
    return 0


def _overview() -> str:
    """Return what can be done, with an example of each."""
    groups = {**EXAMPLES, "In Python": IN_PYTHON}
    width = max(len(what) for examples in groups.values() for what in examples)
    lines = ["Fully sharded data parallelism by graph passes."]
    for title, examples in groups.items():
        lines += ["", title, *(f"  {what:<{width}}  {example}" for what, example in examples.items())]
    return "\n".join([*lines, "", "graph-fsdp COMMAND --help has all options of a command."])
