"""Frozen parameters that torchao has quantized are gathered as they are stored, and dequantized in the graph.

Such a parameter is a tensor subclass around several inner tensors: an NF4 tensor has packed 4-bit values, scales of
blocks in int8 and scales of these. The bytes of all of them, one behind the other, are one vector of uint8, which is
sharded, gathered, offloaded and written to checkpoints as any other frozen parameter: its contents are the same for any
number of ranks. In the graph, inner tensors are views of the gathered bytes, ``__tensor_unflatten__`` makes the
subclass of them, and AOTAutograd traces its operators. Dynamo, and Python code of the model, see a plain parameter of
the subclass's shape and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.sharded import Shards
from graph_fsdp.passes.ir.dialect import aligned


@dataclass(frozen=True)
class Plain:
    """Describes a plain inner tensor, whose elements are stored from byte ``begin`` on. ``order``: its dimensions, from
    the largest stride to the smallest, in which they are stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def of(self, stored: Tensor) -> Tensor:
        """View the part of ``stored`` that is this tensor."""
        values = stored[self.begin : self.end].view(self.dtype).view([self.shape[dim] for dim in self.order])
        return values.permute([self.order.index(dim) for dim in range(len(self.shape))])


@dataclass(frozen=True)
class Wrapper:
    """Describes a tensor subclass, by what it says of itself. ``inner``: its tensors, which may be subclasses too."""

    subclass: Any
    context: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    inner: Mapping[str, Plain | Wrapper]

    def of(self, stored: Tensor) -> Any:
        inner = {name: part.of(stored) for name, part in self.inner.items()}
        return self.subclass.__tensor_unflatten__(inner, self.context, torch.Size(self.shape), self.stride)

    def layout(self) -> str:
        """Say which inner tensors the bytes are, for ranks to compare."""
        inner = (
            f"{name} {part.layout()}"
            if isinstance(part, Wrapper)
            else f"{name} {list(part.shape)} {part.dtype} {part.order}"
            for name, part in self.inner.items()
        )
        return f"{self.subclass.__qualname__} {list(self.shape)} of ({', '.join(inner)})"


@dataclass(frozen=True)
class Quantized:
    """Holds a quantized parameter until it is sharded.

    ``value``: the parameter. ``sharded``: like its bytes, a vector of uint8, without memory. ``as_model_uses_it`` makes
    the tensor subclass of the gathered bytes. ``layout``: which of them are what."""

    name: str
    value: Tensor
    sharded: nn.Parameter
    as_model_uses_it: Callable[[Tensor], Any]
    layout: str

    def put_into(self, storage: Shards) -> None:
        """Fill the parameter's shard, and say there what the model uses."""
        parameter = storage.parameters[self.name]
        parameter.as_used, parameter.layout = self.as_model_uses_it, self.layout
        parameter.used_like = torch.empty(self.value.shape, dtype=self.value.dtype, device="meta")
        storage.fill(parameter, self.stored())

    def stored(self) -> Tensor:
        """Copy the parameter's bytes into one vector."""
        stored = torch.zeros(self.sharded.shape, dtype=torch.uint8, device=self.value.device)
        wrapper, tensors = _described(self.value.detach())
        for part, tensor in zip(_plain_parts(wrapper), tensors, strict=True):
            part.of(stored).copy_(tensor)
        return stored


def is_quantized(p: Tensor) -> bool:
    """Say whether a parameter is frozen and of a tensor subclass, unless it is one inner tensor and a tensor extension
    (``extensions.py``), which says what is gathered of it."""
    if p.requires_grad or isinstance(p, DTensor) or not _is_wrapper(p):
        return False
    inner: Any = p
    return not is_extended(p) or len(inner.__tensor_flatten__()[0]) > 1


def find_quantized(
    names: Mapping[nn.Parameter, Sequence[str]],
    ignored: Collection[nn.Parameter],
    device: torch.device,
    **unsupported: bool,
) -> dict[str, Quantized]:
    """Return the quantized parameters by canonical name. ``unsupported``: option → is set.

    Raises:
        UnsupportedError: a parameter is of a tensor subclass that can be neither trained nor gathered as its bytes,
            or not with an option.
    """
    found: dict[str, Quantized] = {}
    uses: list[tuple[Wrapper, Callable[[Tensor], Any]]] = []  # one for equal parameters, so that layers are equal
    for p, (name, *_) in names.items():
        if p in ignored or isinstance(p, DTensor) or not _is_wrapper(p):
            continue
        what = f"parameter {name!r} is a {type(p).__name__}"
        if not is_quantized(p):
            if not is_extended(p):
                raise UnsupportedError(
                    f"{what} that requires a gradient, which only tensors with fsdp_pre_all_gather and "
                    "fsdp_post_all_gather may; freeze it by requires_grad_(False) and train adapters beside it (LoRA)"
                )
            continue
        for option, is_set in unsupported.items():
            if is_set:
                raise UnsupportedError(f"{what}, which is not available with {option}; leave one out")
        if p.is_meta:
            raise UnsupportedError(f"{what} on the meta device; give it values before graph_fsdp.compile")
        if p.device.type != device.type or device.index not in (None, p.device.index):
            raise UnsupportedError(
                f"{what} on {p.device} and the mesh is on {device}; move the model to {device} before "
                "graph_fsdp.compile, since what a quantized tensor says of itself names its device"
            )
        wrapper, tensors = _described(p.detach())
        if strange := {type(t).__name__ for t in tensors} - {"Tensor", "Parameter"}:
            raise UnsupportedError(f"{what} around a {strange.pop()}; only plain inner tensors can be gathered")
        use = next((use for known, use in uses if known == wrapper), None)
        if use is None:
            use = _use(wrapper)
            uses.append((wrapper, use))
        like = compat.emptied((max(part.end for part in _plain_parts(wrapper)),), torch.uint8, device)
        found[name] = Quantized(name, p, nn.Parameter(like, requires_grad=False), use, wrapper.layout())
    return found


def _is_wrapper(value: Any) -> bool:
    wrapper: bool = compat.is_traceable_wrapper_subclass(value)
    return wrapper


def _use(wrapper: Wrapper) -> Callable[[Tensor], Any]:
    def as_quantized(stored: Tensor) -> Any:
        return wrapper.of(stored)

    return as_quantized


def _described(value: Any) -> tuple[Wrapper, list[Tensor]]:
    """Return the description of a tensor subclass, and its plain tensors in the order of its parts."""
    tensors: list[Tensor] = []
    end = 0

    def describe(value: Any) -> Plain | Wrapper:
        nonlocal end
        if _is_wrapper(value):
            attributes, context = value.__tensor_flatten__()
            inner = {name: describe(getattr(value, name)) for name in attributes}
            return Wrapper(type(value), context, tuple(value.shape), tuple(value.stride()), inner)
        tensors.append(value)
        order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
        part = Plain(tuple(value.shape), value.dtype, tuple(order), aligned(end, torch.uint8))
        end = part.end
        return part

    wrapper = describe(value)
    assert isinstance(wrapper, Wrapper)
    return wrapper, tensors


def _plain_parts(wrapper: Wrapper) -> Iterator[Plain]:
    for part in wrapper.inner.values():
        if isinstance(part, Wrapper):
            yield from _plain_parts(part)
        else:
            yield part
