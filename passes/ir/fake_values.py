"""Fake values: what a call computes, as far as shapes, dtypes, devices and memory go.

A model of equal layers makes the same few calls on values of the same kinds thousands of times, and running an
operator on fake tensors costs about 100 microseconds. Calls are therefore described by all that a result depends on,
and each distinct one is run once per process: once by the passes, which make values (``VALUES``), and once by the
verifier, which does not trust them (``KINDS``). Calls of operators that others have registered are run each time.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from graph_fsdp import compat
from graph_fsdp.passes.ir import dialect
from graph_fsdp.passes.ir.operands import function


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with fake values in place of nodes."""
    return fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])


def evaluate(node: fx.Node) -> Any:
    """The value of a call on the fake values of its inputs."""
    args, kwargs = fake_arguments(node)
    if node.target is operator.getitem and isinstance(args[0], (tuple, list)):  # no operator: a mode would cost more
        return args[0][args[1]]
    mode = fake_mode_of(node.all_input_nodes)
    if mode is None:
        return function(node)(*args, **kwargs)
    with mode:
        return function(node)(*args, **kwargs)


def fake_mode_of(nodes: Iterable[fx.Node]) -> Any:
    for node in nodes:
        for value in iterate_tensors(node.meta.get("val")):
            mode = getattr(value, "fake_mode", None)
            if mode is not None:
                return mode
    return None


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iterate_tensors(item)


class NotDescribed(Exception):
    """A value or an argument whose description would not say everything that a result depends on."""


def kind(value: Any) -> Any:
    """What must not change of a value: shape, dtype and device of its tensors."""
    if isinstance(value, torch.Tensor):
        return (tuple(str(s) for s in value.shape), value.dtype, value.device.type)
    if isinstance(value, (list, tuple)):
        return tuple(kind(v) for v in value)
    return type(value).__name__


_T = TypeVar("_T")
_NAMESPACES = frozenset({"aten", "prims", "graph_fsdp"})


class Memory(dict[Hashable, _T]):
    """What is known of calls, in a bounded number: a process may compile any number of models."""

    LIMIT = 20_000

    def __setitem__(self, key: Hashable, value: _T) -> None:
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(key, value)


@dataclass(frozen=True)
class _Recipe:
    """How to make the value of a call again. ``view``: in the memory of the first argument; else in its own."""

    view: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class FakeValues:
    """Makes the fake values of calls. An equal call's value is made from the first one's metadata, without running
    the operator; it is a tensor of its own, in the memory that the operator would have put it in."""

    def __init__(self) -> None:
        self._recipes: Memory[_Recipe | None] = Memory()

    def of(self, node: fx.Node) -> Any:
        """The value of a call on the fake values of its inputs. Raises what the operator raises."""
        try:
            key = _describe_call(node)
            recipe = self._recipes.get(key)
        except (NotDescribed, TypeError):  # not described, or not hashable
            return evaluate(node)
        if recipe is None:
            value = evaluate(node)
            if key not in self._recipes:
                self._recipes[key] = _recipe(node, value)
            return value
        memory = _first_argument(node) if recipe.view else None
        return compat.fake_tensor(
            fake_mode_of(node.all_input_nodes),
            recipe.shape,
            recipe.stride,
            recipe.dtype,
            recipe.device,
            memory,
            recipe.offset,
        )


def _recipe(node: fx.Node, value: Any) -> _Recipe | None:
    """None where there is more to the value than a recipe says."""
    if not isinstance(value, compat.FakeTensor):
        return None
    try:
        _describe_value(value)
    except NotDescribed:
        return None
    if value.requires_grad or value.is_conj() or value.is_neg():
        return None
    inputs = [tensor for i in node.all_input_nodes for tensor in iterate_tensors(i.meta["val"])]
    own = not any(compat.same_memory(value, tensor) for tensor in inputs)
    first = _first_argument(node)
    if own:
        fits = value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.dtype.itemsize
    else:
        fits = first is not None and compat.same_memory(value, first) and value.dtype == first.dtype
    if not fits:
        return None
    return _Recipe(not own, value.shape, value.stride(), int(value.storage_offset()), value.dtype, value.device)


def _first_argument(node: fx.Node) -> torch.Tensor | None:
    first = node.args[0] if node.args else None
    value = first.meta["val"] if isinstance(first, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


class Kinds:
    """Kinds of computed values, remembered by operator, by all metadata of its tensors and by its other arguments.

    Only calls of operators on tensors of known sizes are remembered. Whatever else a result could depend on (symbolic
    sizes, constants, subgraphs, operators that write to their inputs) is computed each time.
    """

    def __init__(self) -> None:
        self._known: Memory[Any] = Memory()

    def computed(self, node: fx.Node) -> Any:
        """The kind of what ``node`` computes from the fake values of its inputs. Raises what the operator raises."""
        try:
            key = _describe_call(node)
            if key in self._known:
                return self._known[key]
        except (NotDescribed, TypeError):  # not described, or not hashable
            return kind(evaluate(node))
        value = evaluate(node)
        found = kind(value)
        if _is_static(value):  # a size that depends on data is another one each time
            self._known[key] = found
        return found


VALUES, KINDS = FakeValues(), Kinds()


def _describe_call(node: fx.Node) -> Hashable:
    target = node.target
    # A user may register another operator by the same name.
    if not isinstance(target, compat.OpOverload) or target.namespace not in _NAMESPACES:
        raise NotDescribed
    if target._schema.is_mutable and target not in dialect.EXECUTED:  # may change sizes or storages of its inputs
        raise NotDescribed
    keywords = tuple((name, _describe(value)) for name, value in node.kwargs.items()) if node.kwargs else ()
    args = node.args
    if target is dialect.gather_param or target is dialect.reduce_grad:
        args = (*args[:4], *args[5:])  # the parameter's name, which no value depends on
    if fake_mode_of(node.all_input_nodes) is None:  # nothing says in which mode the value is made
        raise NotDescribed
    autocast = [torch.is_autocast_enabled(device) for device in ("cpu", "cuda", "xpu")]
    return (target, _describe(args), keywords, torch.is_grad_enabled(), torch.get_default_dtype(), *autocast)


def _is_static(value: Any) -> bool:
    return all(type(size) is int for tensor in iterate_tensors(value) for size in tensor.shape)


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
    )
