"""torch_xla runs operators that XLA has no implementation of on the host.

In the part of a program that each device runs by itself (``operators.py``) that aborts the process. So each kind of
call is tried before, once, by itself on zeros; torch_xla counts those that run on the host (docs/decisions/devices.md).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from graph_fsdp.compat import OpOverload
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir.operands import function
from graph_fsdp.passes.ir.unit_calls import innermost_module

OnHostFallback = Literal["error", "warn"]

_OURS = frozenset({"graph_fsdp", "graph_fsdp_xla", "_c10d_functional"})


class HostFallbackError(NotImplementedError):
    """A model uses operators that XLA does not have."""


@dataclass(frozen=True)
class HostFallback:
    """Names an operator, as torch does, and the module that uses it, with its class; "" where nothing says."""

    operator: str
    module: str

    def __str__(self) -> str:
        return f"{self.operator}, used by {self.module}" if self.module else self.operator


def find_host_fallbacks(graph: fx.Graph) -> list[HostFallback]:
    """Find a graph's ATen operators that would run on the host, in the order of use. Nodes have their fake values."""
    known: dict[Any, list[str]] = {}
    found: dict[HostFallback, None] = {}
    device = compat_xla.device()
    with torch.no_grad(), compat_xla.lazily():
        for node in graph.nodes:
            if not isinstance(node.target, OpOverload) or node.target.namespace in _OURS:
                continue
            key = (node.target, fx.map_arg((node.args, node.kwargs), _kind).__repr__())
            if key not in known:
                known[key] = _fallbacks_of(node, device)
            for operator in known[key]:
                found[HostFallback(operator, module_of(node))] = None
    return list(found)


def _kind(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _fallbacks_of(node: fx.Node, device: torch.device) -> list[str]:
    """Name what runs on the host in one call of a node's operator."""

    def zeros(source: fx.Node) -> Any:
        value = source.meta.get("val")
        return torch.zeros(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), zeros)
    before = compat_xla.fallback_counts()
    with contextlib.suppress(Exception):  # what zeros cannot stand for: the graph itself will say
        function(node)(*args, **kwargs)
    after = compat_xla.fallback_counts()
    return [operator for operator, count in after.items() if count != before.get(operator, 0)]


def report(found: Sequence[HostFallback], on_host_fallback: OnHostFallback, *, can_run: bool) -> None:
    """Warn of operators that would run on the host. Raises HostFallbackError if they are not to, or if not
    ``can_run``."""
    if not found:
        return
    listed = "; ".join(map(str, found))
    kinds = len({fallback.operator for fallback in found})
    what = f"XLA has no implementation of {kinds} of the model's operators: {listed}. "
    if can_run and on_host_fallback == "warn":
        warnings.warn(f"{what}They run on the host, and each step copies their inputs there and waits", stacklevel=3)
        return
    allowed = "on_host_fallback='warn'" if can_run else "sharding='auto', on_host_fallback='warn'"
    why = "" if can_run else "What each device runs by itself cannot leave for the host. "
    raise HostFallbackError(f"{what}{why}Write these with other operators, or pass {allowed} to run them on the host")


def module_of(node: fx.Node) -> str:
    """Return name and class of the innermost module that a node, or the node that it differentiates, was traced in."""
    if (found := innermost_module(node)) is None:
        return ""
    name, kind = found
    return f"module {name!r} ({kind})" if name else f"the model ({kind})"
