"""torch_xla runs operators that XLA has no implementation of on the host, and computes some otherwise than PyTorch.

In the part of a program that each device runs by itself (``operators.py``) the first aborts the process. So each kind
of call is tried before, once, by itself on zeros; torch_xla counts those that run on the host, and what they return has
to have PyTorch's shape (docs/decisions/devices.md).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Literal

import torch
from torch import Tensor, fx

from graph_fsdp.compat import OpOverload, free_symbols
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.passes.ir import ctc, recurrent
from graph_fsdp.passes.ir.operands import function
from graph_fsdp.passes.ir.unit_calls import innermost_module

OnHostFallback = Literal["error", "warn"]

aten = torch.ops.aten
_OURS = frozenset({"graph_fsdp", "graph_fsdp_xla", "_c10d_functional"})
_OF_MODELS = frozenset(  # which stand for operators of torch
    {ctc.ctc_loss, ctc.ctc_loss_backward, recurrent.recurrent_layer, recurrent.recurrent_layer_backward}
)


class HostFallbackError(NotImplementedError):
    """A model uses operators that XLA does not have, or has otherwise than PyTorch."""


@dataclass(frozen=True)
class HostFallback:
    """Names an operator, as torch does, and the module that uses it, with its class; "" where nothing says."""

    operator: str
    module: str

    def __str__(self) -> str:
        return f"{self.operator}, used by {self.module}" if self.module else self.operator


def find_host_fallbacks(graph: fx.Graph) -> list[HostFallback]:
    """Find a graph's ATen operators that would run on the host, in the order of use. Nodes have their fake values.

    Raises:
        HostFallbackError: what torch_xla makes of an operator has another shape than what PyTorch does.
    """
    known: dict[Any, tuple[list[str], Any]] = {}
    found: dict[HostFallback, None] = {}
    device = compat_xla.device()
    with torch.no_grad(), compat_xla.lazily():
        for node in graph.nodes:
            if not is_of_model(node):
                continue
            if (key := _call(node)) not in known:
                known[key] = _tried(node, device)
            on_host, shapes = known[key]
            for name in [f"{node.target} to the host"] if _moves_to_host(node) else on_host:
                found[HostFallback(name, module_of(node))] = None
            if not on_host:
                _check_shapes(node, shapes)
    return list(found)


def is_of_model(node: fx.Node) -> bool:
    """Say whether a node calls an operator of the model, and not one of ours that communicates or moves."""
    return isinstance(node.target, OpOverload) and (node.target.namespace not in _OURS or node.target in _OF_MODELS)


def _moves_to_host(node: fx.Node) -> bool:
    devices = [
        n.meta["val"].device.type for n in (node, *node.all_input_nodes) if isinstance(n.meta.get("val"), Tensor)
    ]
    return devices[:1] != ["xla"] and "xla" in devices


def _call(node: fx.Node) -> tuple[Any, str]:
    """Describe a call by its operator and what it is given: calls of one description differ in values alone."""
    return node.target, repr(fx.map_arg((node.args, node.kwargs), _kind))


def _kind(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _tried(node: fx.Node, device: torch.device) -> tuple[list[str], Any]:
    """Name what runs on the host in one call of a node's operator, and return the shapes of what it returns."""
    before, result = compat_xla.fallback_counts(), None
    for number in (0, 1):  # ones where zeros can stand for nothing, as for lengths of ``ctc_loss``
        with contextlib.suppress(Exception):  # the graph itself will say
            result = _called(node, device, number)
            break
    after = compat_xla.fallback_counts()
    on_host = [name for name, count in after.items() if count != before.get(name, 0)]
    return on_host, [x.shape if isinstance(x, Tensor) else None for x in _results(result)]


def _check_shapes(node: fx.Node, shapes: Sequence[torch.Size | None]) -> None:
    """Raise HostFallbackError if a result that others read has another shape than in the graph. What tells errors of
    linear algebra has another on XLA, where none are found."""
    items = {place: user for user in node.users if user.target is getitem for _, place in [user.args]}
    for place, (shape, expected) in enumerate(zip(shapes, _results(node.meta.get("val")), strict=False)):
        if shape is None or not isinstance(expected, Tensor) or shape == expected.shape:
            continue
        readers = items[place].users if place in items else {} if items else node.users
        if any(user.target is not aten._linalg_check_errors.default for user in readers):
            raise HostFallbackError(
                f"torch_xla makes a tensor of shape {list(shape)}, and PyTorch one of {list(expected.shape)}, of "
                f"{HostFallback(str(node.target), module_of(node))}; write it with other operators"
            )


def _results(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def _called(node: fx.Node, device: torch.device, number: int = 0) -> Any:
    """Call a node's operator by itself, on tensors that are full of ``number``."""

    def full(source: fx.Node) -> Any:
        value = source.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        return torch.full(value.shape, number, dtype=value.dtype, device=device)

    args, kwargs = fx.map_arg((node.args, node.kwargs), full)
    return function(node)(*args, **kwargs)


def refuse_sizes_of_values(graph: fx.Graph) -> None:
    """Raise HostFallbackError for an operator whose result has as many elements as values say."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and free_symbols(value):
            raise HostFallbackError(
                f"the shape of what {HostFallback(str(node.target), module_of(node))} returns depends on values, and "
                "XLA compiles programs for shapes: keep all elements, and leave some out with torch.where or a mask"
            )


def name_what_fails(graph: fx.Graph) -> None:
    """Raise HostFallbackError for the first ATen operator that cannot be called or compiled by itself."""
    device = compat_xla.device()
    calls: dict[Any, fx.Node] = {}
    for node in filter(is_of_model, graph.nodes):
        calls.setdefault(_call(node), node)
    with torch.no_grad(), compat_xla.lazily():
        for node in calls.values():
            try:
                compat_xla.compile_pending([x for x in _results(_called(node, device)) if isinstance(x, Tensor)])
            except (RuntimeError, ValueError) as error:
                text = " ".join(str(error).partition("Exception raised from")[0].split())
                what = HostFallback(str(node.target), module_of(node))
                raise HostFallbackError(f"XLA fails at {what}: {text}; write it with other operators") from error


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
