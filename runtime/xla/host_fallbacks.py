"""Operators that XLA has no implementation of, which torch_xla runs on the host.

Such an operator cuts a graph in two: its inputs are computed and copied to the host, and in a manual region (see
``operators.py``) they are one device's of all of them. So it is an error by default. torch_xla counts them under their
names; counting around each node of a graph tells whose they are.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from graph_fsdp.passes import compat_xla

OnHostFallback = Literal["error", "warn"]

# A module as Dynamo names it: L['self'].blocks.0, and on torch 2.9 L['self']._modules['blocks']._modules['0'].
_PARTS = re.compile(r"[^\[\]'\".]+")
_NOT_NAMES = frozenset({"L", "G", "self", "_modules"})


class HostFallbackError(NotImplementedError):
    """A model uses operators that XLA does not have."""


@dataclass(frozen=True)
class HostFallback:
    """``operator``: torch's name of it. ``module``: name and class of the one that uses it; "" where nothing says."""

    operator: str
    module: str

    def __str__(self) -> str:
        return f"{self.operator}, used by {self.module}" if self.module else self.operator


class HostFallbacks(fx.Interpreter):
    """Runs a graph on XLA tensors, node by node, and keeps which operators ran on the host."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=True)
        self.found: dict[HostFallback, None] = {}  # in order of use

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._counts = compat_xla.fallback_counts()
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        counts = compat_xla.fallback_counts()
        for operator in counts:
            if counts[operator] != self._counts.get(operator, 0):
                self.found[HostFallback(operator, module_of(n))] = None
        self._counts = counts
        return result


def run_without_host_fallbacks(module: fx.GraphModule, *args: Any, on_host_fallback: OnHostFallback = "error") -> Any:
    """What the graph returns for ``args``, tensors on XLA.

    Raises:
        HostFallbackError: an operator of the graph ran on the host; a warning with ``on_host_fallback="warn"``.
    """
    interpreter = HostFallbacks(module)
    result = interpreter.run(*args)
    if interpreter.found:
        report(list(interpreter.found), on_host_fallback)
    return result


def report(found: list[HostFallback], on_host_fallback: OnHostFallback) -> None:
    listed = "; ".join(map(str, found))
    what = f"XLA has no implementation of {len(found)} of the model's operators, and they run on the host: {listed}. "
    if on_host_fallback == "error":
        raise HostFallbackError(
            f"{what}Each step would copy their inputs there and wait; write these with other operators, or pass "
            "on_host_fallback='warn' to run them so"
        )
    warnings.warn(f"{what}Each step copies their inputs there and waits", stacklevel=3)


def module_of(node: fx.Node) -> str:
    """Name and class of the innermost module that a node, or the node that it is the gradient of, was traced in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    name = ".".join(part for part in _PARTS.findall(path) if part not in _NOT_NAMES)
    kind = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return f"module {name!r} ({kind})" if name else f"the model ({kind})"
