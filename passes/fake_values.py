"""What a call computes, as far as the verifier compares it: shapes, dtypes and devices.

A model of equal layers makes the same few calls on values of the same kinds thousands of times, and running an
operator on fake tensors costs about 100 microseconds. Within one graph, each distinct call is therefore run once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx

from graph_fsdp.passes import compat, dialect
from graph_fsdp.passes.graph import evaluate


class NotDescribed(Exception):
    """A value or an argument whose description would not say everything that a result depends on."""


def kind(value: Any) -> Any:
    """What must not change of a value: shape, dtype and device of its tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(str(s) for s in value.shape), value.dtype, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(kind(v) for v in value)
    return type(value).__name__


class Kinds:
    """Kinds of computed values, remembered by operator, by all metadata of its tensors and by its other arguments.

    Only calls of operators on tensors of known sizes are remembered. Whatever else a result could depend on (symbolic
    sizes, constants, subgraphs, operators that write to their inputs) is computed each time.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def computed(self, node: fx.Node) -> Any:
        """The kind of what ``node`` computes from the fake values of its inputs. Raises what the operator raises."""
        try:
            key = _describe_call(node)
            if key in self._known:
                return self._known[key]
        except (NotDescribed, TypeError):  # not described, or not hashable
            return kind(evaluate(node))
        self._known[key] = found = kind(evaluate(node))
        return found


def _describe_call(node: fx.Node) -> Hashable:
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is None:
        raise NotDescribed
    if schema.is_mutable and target not in dialect.EXECUTED:  # may change sizes or storages of its inputs
        raise NotDescribed
    keywords = tuple((name, _describe(value)) for name, value in node.kwargs.items()) if node.kwargs else ()
    return (target, _describe(node.args), keywords, torch.is_grad_enabled())


def _describe(argument: Any) -> Hashable:
    if isinstance(argument, fx.Node):
        return _describe_value(argument.meta["val"])
    if isinstance(argument, (tuple, list)):
        return tuple([_describe(item) for item in argument])
    if isinstance(argument, slice):
        return ("slice", _describe(argument.start), _describe(argument.stop), _describe(argument.step))
    if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise NotDescribed
    return (type(argument), argument)  # 1, 1.0 and True are equal, and mean different things


def _describe_value(value: Any) -> Hashable:
    if not isinstance(value, compat.FakeTensor):
        if isinstance(value, (tuple, list)):
            return tuple([_describe_value(item) for item in value])
        raise NotDescribed
    if value.layout is not torch.strided or value.constant is not None:
        raise NotDescribed
    sizes = (*value.shape, *value.stride(), value.storage_offset(), value.untyped_storage().nbytes())
    if any(type(size) is not int for size in sizes):
        raise NotDescribed
    return (
        len(value.shape),
        sizes,
        value.dtype,
        value.device,
        value.requires_grad,
        value.is_conj(),
        value.is_neg(),
        value.fake_mode,
    )
