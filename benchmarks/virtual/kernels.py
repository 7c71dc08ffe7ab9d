"""Operators of the virtual device: each is computed on the host, at once, by the CPU's kernel on the same memory, and
launched on the current stream of the machine, which knows from the operator's schema what it reads and writes. On a
machine without numbers only the shapes of results are computed, by the kernels of torch's meta device."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims import rng_prims
from torch.utils import _pytree as pytree

from virtual import library
from virtual.machine import Machine

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")
_on_host = torch.ops.virtual_device  # its operator is there when the library is loaded

# The host has to know how large their results are.
_WAITED_FOR = {
    getattr(aten, name)
    for name in ["nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"]
    if hasattr(aten, name)
}
# One kernel on an accelerator, of which torch makes several by default.
_ONE_KERNEL = [
    *("aten::split_with_sizes_copy.out", "aten::_chunk_cat", "aten::_chunk_cat.out", "aten::native_layer_norm"),
    *("aten::native_group_norm", "aten::embedding_dense_backward", "aten::convolution", "aten::convolution_backward"),
]

_kept: list[torch.library.Library] = []


def register() -> None:
    every, own, device = (torch.library.Library(name, "IMPL") for name in ("_", "aten", "virtual_device"))
    torch._dynamo.trace_rules.add("virtual")  # Dynamo would trace them where Python runs between pieces
    _kept[:] = [every, own, device]
    every.fallback(run, "PrivateUse1")
    if torch.__version__ < (2, 10):  # later ones have it
        every.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse1")
    foreach = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::_foreach_")]
    for name in [*_ONE_KERNEL, *foreach]:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        own.impl(name.removeprefix("aten::"), functools.partial(run, operator), "PrivateUse1")
    own.impl("_copy_from", copy, "PrivateUse1")
    own.impl("_copy_from_and_resize", copy, "PrivateUse1")
    for lazy in ("Conjugate", "Negative"):  # torch makes such values plain by copying them
        for owner, name in ((own, "_copy_from"), (own, "_copy_from_and_resize"), (device, "on_host")):
            owner.impl(name, torch.library.fallthrough_kernel, lazy)
    own.impl("_local_scalar_dense", item, "PrivateUse1")
    own.impl("set_.source_Tensor", set_tensor, "PrivateUse1")
    own.impl("set_.source_Storage", set_storage, "PrivateUse1")
    own.impl("resize_", resize, "PrivateUse1")
    own.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1")  # the math of it
    rng_prims.get_device = _device_of_random_numbers


def _device_of_random_numbers(args: Any, kwargs: Any, device_of: Any = rng_prims.get_device) -> str | None:
    """What a checkpointed program draws again: torch knows by the device whose generator it is."""
    device: str | None = device_of(args, kwargs)
    return "cpu" if device == library.NAME else device


class Signature(NamedTuple):
    """What an operator's schema says. ``positional``: how many arguments are not only keywords;
    ``written``: names of the arguments that it writes; ``out``: those that it does
    not read. ``returned``: of each result, the argument that it is, "" if it is new, or a view of one ("view")."""

    names: tuple[str, ...]
    positional: int
    written: frozenset[str]
    out: frozenset[str]
    returned: tuple[str, ...]


@functools.cache
def signature(operator: Any) -> Signature:
    schema = operator._schema
    owners: dict[str, str] = {}
    written, out = set(), set()
    for argument in schema.arguments:
        if argument.alias_info is not None:
            for name in argument.alias_info.before_set:
                owners[name] = argument.name
            if argument.alias_info.is_write:
                written.add(argument.name)
                if argument.kwarg_only:
                    out.add(argument.name)
    returned = []
    for result in schema.returns:
        info = result.alias_info
        owner = next((owners[name] for name in info.before_set if name in owners), "") if info is not None else ""
        returned.append(owner if info is None or info.is_write else f"view of {owner}")
    names = tuple(argument.name for argument in schema.arguments)
    positional = sum(not argument.kwarg_only for argument in schema.arguments)
    return Signature(names, positional, frozenset(written), frozenset(out), tuple(returned))


def tensors_of(value: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf


def is_virtual(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == library.NAME


def on_host(value: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    return _on_host.on_host(value) if is_virtual(value) else value


def _lazy_on_host(value: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU, still to be conjugated or negated as the tensor is."""
    found = on_host(value)
    if found is not value:
        found = found.conj() if value.is_conj() else found
        found = torch._neg_view(found) if value.is_neg() else found
    return found


def _moved(leaf: Any, to: torch.device) -> Any:
    """``leaf`` on the device that computes it: the host, or torch's meta device, which computes shapes."""
    if isinstance(leaf, torch.device):
        return to if leaf.type == library.NAME else leaf
    if not isinstance(leaf, Tensor) or to == CPU:
        return on_host(leaf) if isinstance(leaf, Tensor) else leaf
    if leaf.device == CPU and not leaf.dim():  # dtypes of results follow from what it is
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=to)


def run(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator that has no function of its own here."""
    machine = Machine.current
    if machine is not None:
        machine.enter()
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return _run(machine, operator, args, kwargs)
    finally:
        if machine is not None:
            machine.leave()


def _run(machine: Machine | None, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    known = signature(operator)
    named = {**dict(zip(known.names, args, strict=False)), **kwargs}
    numbers = machine is None or machine.numbers
    to = CPU if numbers else META
    host_args, host_kwargs = pytree.tree_map(functools.partial(_moved, to=to), (tuple(args), kwargs))
    host_kwargs.pop("pin_memory", None)
    grown = [name for name in known.out if is_virtual(named.get(name)) and not named[name].numel()]
    for name in grown:  # the kernel resizes it
        host_kwargs[name] = torch.empty(0, dtype=named[name].dtype, device=to)
    value = operator(*host_args, **host_kwargs)
    for name in grown:
        resized = resize(named[name], host_kwargs[name].shape)
        if numbers:
            on_host(resized).copy_(host_kwargs[name])
    values = value if isinstance(value, tuple) and len(known.returned) > 1 else (value,)
    results = []
    for result, owner in zip(values, known.returned, strict=False):
        if owner.startswith("view of "):
            owner = owner.removeprefix("view of ")
            results.append(pytree.tree_map(functools.partial(_view, named[owner]), result))
        elif owner:
            results.append(named[owner])
        else:
            results.append(pytree.tree_map(_fresh, result))
    if machine is not None:
        fresh = [result for result, owner in zip(results, known.returned, strict=False) if not owner]
        _launch(machine, operator, known, named, fresh, waits=_waits(operator, values))
    if not known.returned:
        return None
    return results[0] if len(known.returned) == 1 else tuple(results)


def _fresh(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=library.NAME)
    if value.device == CPU:
        on_host(made).copy_(value)
    return made


def _view(owner: Tensor, value: Any) -> Any:
    """The tensor of the device for ``value``, which views ``owner`` where that was moved to."""
    if not isinstance(value, Tensor):
        return value
    like = owner if value.dtype is owner.dtype else owner.view(value.dtype)
    # What was moved begins in its storage where the owner begins in its own.
    return like.as_strided(value.shape, value.stride(), value.storage_offset() + like.storage_offset())


def _waits(operator: Any, values: Sequence[Any]) -> bool:
    """Whether the host waits for the operator."""
    plain = any(not isinstance(leaf, Tensor) and leaf is not None for leaf in pytree.tree_leaves(values))
    return plain or operator.overloadpacket in _WAITED_FOR


def _launch(
    machine: Machine, operator: Any, known: Signature, named: dict[str, Any], fresh: list[Any], waits: bool
) -> None:
    """``fresh``: the operator's results that are in memory of their own; None where it was asked for none."""
    written = [tensor for name in named if name in known.written for tensor in tensors_of(named[name])]
    read = {name: value for name, value in named.items() if name not in known.out}
    value: Any = [*written, *fresh]
    value = value[0] if len(value) == 1 else tuple(value)
    first = [name for name in known.names[: known.positional] if name in read]
    by_name = {name: read[name] for name in read if name not in first}
    seconds = machine.kernels.call(operator, [read[name] for name in first], by_name, value)
    everything = [tensor for name in read for tensor in tensors_of(read[name])]
    reads = [tensor for tensor in everything if not any(tensor is other for other in written)]
    machine.launch(str(operator.overloadpacket), reads, [*written, *tensors_of(fresh)], seconds)
    if waits:
        machine.wait_for(machine.current_stream)


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    machine = Machine.current
    if machine is not None:
        machine.enter()
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return _copy(machine, source, target, non_blocking)
    finally:
        if machine is not None:
            machine.leave()


def _copy(machine: Machine | None, source: Tensor, target: Tensor, non_blocking: bool) -> Tensor:
    numbers = machine is None or machine.numbers
    if machine is not None and source.device.type == "cpu" and numbers:
        machine.arrive(source)
    if numbers:
        _lazy_on_host(target).copy_(_lazy_on_host(source))
    if machine is None:
        return target
    machine.launch("aten.copy_", [source], [target], machine.kernels.copy(target, source))
    host = source if source.device.type == "cpu" else target if target.device.type == "cpu" else None
    if host is not None and non_blocking and host.is_pinned():
        if numbers:
            machine.copy_beside_host(host, host.clone(), is_target=host is target)
    elif host is not None:
        machine.wait_for(machine.current_stream)
    return target


def item(value: Tensor) -> Any:
    machine = Machine.current
    if machine is not None:
        machine.enter()
        machine.launch("aten.item", [value], [], machine.kernels.model.transfer_seconds(value.nbytes))
        machine.wait_for(machine.current_stream)
        machine.leave()
        if not machine.numbers:
            return torch.zeros((), dtype=value.dtype).item()
    with torch._C._AutoDispatchBelowAutograd():
        return on_host(value).item()


def set_tensor(target: Tensor, source: Tensor) -> Tensor:
    return target.set_(source.untyped_storage(), source.storage_offset(), source.shape, source.stride())


def set_storage(target: Tensor, source: torch.UntypedStorage) -> Tensor:
    return target.set_(source, 0, (source.nbytes() // target.element_size(),), (1,))


def resize(value: Tensor, size: Sequence[int], memory_format: Any = None) -> Tensor:
    like = torch.empty(size, dtype=value.dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage = value.untyped_storage()
    needed = (value.storage_offset() + like.numel()) * value.element_size()
    if needed > storage.nbytes():
        storage.resize_(needed)
    return value.set_(storage, value.storage_offset(), like.shape, like.stride())
