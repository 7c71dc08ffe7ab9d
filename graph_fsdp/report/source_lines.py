"""From a node of a graph to the line of the model that it comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

import graph_fsdp
from graph_fsdp import passes
from graph_fsdp.passes.ir.unit_calls import module_path

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n[ \t]*(?P<code>[^\n]*)')
# Ours run as the model does where a graph breaks: what reads a parameter there.
_NOT_USERS = tuple(f"{Path(str(p.__file__)).parent}{os.sep}" for p in (torch, graph_fsdp, passes))
_MODULE_STACKS = ("nn_module_stack", "fwd_nn_module_stack")  # of forward's nodes, and of those that differentiate them


@dataclass(frozen=True)
class SourceLine:
    """A line of the model. ``code`` is without indentation, and empty where the file could not be read."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}  {self.code}".rstrip()


def source_line(node: fx.Node) -> SourceLine | None:
    """The line that computes ``node``, or that it is the derivative of; None for what no line of the model asked for
    (collectives). Torch's own lines do not count: of ``nn.Linear``, the line that calls the module."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    users = [match for match in frames if not match["file"].startswith(_NOT_USERS)]
    if not users:
        return None
    last = users[-1]
    return SourceLine(last["file"], int(last["line"]), last["function"], last["code"].strip())


def module_name(node: fx.Node) -> str | None:
    """The module that computes ``node``, or whose computation it differentiates: "layers.3.attn", and "" for the model
    itself. None for what belongs to no module."""
    found = _own_module(node)
    trace = node.meta.get("stack_trace")
    if found is not None or not trace:
        return found
    # Sums of gradients have a line and no module: that of the gradient which the same line computed.
    same_line = (_own_module(value) for value in node.all_input_nodes if value.meta.get("stack_trace") == trace)
    return next((module for module in same_line if module is not None), "")


def _own_module(node: fx.Node) -> str | None:
    for key in _MODULE_STACKS:
        stack = node.meta.get(key)
        if stack:
            return ".".join(module_path(next(reversed(stack.values()))[0])[1:])
    return None
