"""Initialise meta-device models piece by piece; each piece is dropped again once its shards are kept.

[Note: pieces]
A piece is what is materialised together: a unit; or, outside of units, the largest submodule that holds no unit. A
module that holds units is a piece without what is below it, and so is the model. So no more than one unit is unsharded
at a time. Pieces, and the modules of a piece, come children first and in order of registration, as in
``nn.Module.apply``: the order in which a model is built whose modules end their ``__init__`` with ``reset_parameters``.

[Note: stand-ins]
While a piece is initialised, each of its tensors exchanges its memory with a stand-in on the mesh's device, so that it
is there wherever the model refers to it. Then its shard is copied and it goes back to the meta device, also after an
error. A tensor that has values already stands in with a copy: an initialisation may read it, and what it writes there
is dropped. In the place of a DTensor (a tensor-parallel one) modules have a plain tensor of all its ranks, of which
each takes its part: values are those of a model that is not divided. A tensor extension has a plain tensor in its
place, too, as shards are plain.

[Note: initialised]
A tensor is initialised when an operator has written to the memory that it has at the end, through whatever view,
``detach`` or ``.data``, or when it was given memory that an operator has computed. What is written behind torch's back
(through NumPy) is not seen. See docs/decisions/initial_values.md.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import MetaDeviceError
from graph_fsdp.mesh import DataParallelMesh, Mesh
from graph_fsdp.parameters.extensions import is_extended
from graph_fsdp.parameters.placements import part_of_rank
from graph_fsdp.parameters.sharded import Shards
from graph_fsdp.parameters.shards import described
from graph_fsdp.passes.ir.effects import memory_effects
from graph_fsdp.passes.ir.fake_values import iterate_tensors
from graph_fsdp.units import modules_on_path

ParamInitFn: TypeAlias = Callable[[nn.Module], Any]
Call: TypeAlias = tuple[str, Callable[[], Any]]  # of a user's initialisation, with what it is in words

_EMPTY = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
_ALLOCATING = frozenset(getattr(torch.ops.aten, name) for name in _EMPTY)


@dataclass(frozen=True)
class Piece:
    """Modules whose tensors are materialised together form a piece."""

    modules: tuple[nn.Module, ...]
    fresh: tuple[Tensor, ...]  # of theirs: get their values here
    others: tuple[Tensor, ...]  # of theirs: have values already
    calls: tuple[Call, ...]


def tensor_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of every parameter and buffer once: ``"parameter 'head.weight'"``."""
    names: dict[Tensor, str] = {p: f"parameter {name!r}" for name, p in model.named_parameters()}
    return names | {b: f"buffer {name!r}" for name, b in model.named_buffers()}


def find_pieces(
    model: nn.Module, units: Collection[nn.Module], init_fn: ParamInitFn | None, loaded: Collection[Tensor] = ()
) -> list[Piece]:
    """Return the pieces in order, with who initialises what. ``units``: the modules that are units. ``loaded``: the
    tensors that get their values otherwise.

    Raises:
        MetaDeviceError: a module has a tensor on the meta device, and nobody to initialise it.
    """
    names = tensor_names(model)
    missing = {tensor for tensor in names if tensor.is_meta and tensor not in loaded}
    on_meta = frozenset(missing)
    pieces = []
    for modules, holds_units in _divide(model, units):
        held = dict.fromkeys(tensor for module in modules for _, _, tensor in _entries(module))
        fresh = dict.fromkeys(tensor for tensor in held if tensor in missing)
        missing.difference_update(fresh)
        if fresh or (holds_units and init_fn is not None and not on_meta.isdisjoint(_all_tensors(*modules))):
            calls = _own_calls(modules, fresh, names) if init_fn is None else _calls_of(init_fn, modules, fresh)
            others = tuple(tensor for tensor in held if tensor not in fresh)
            pieces.append(Piece(tuple(modules), tuple(fresh), others, tuple(calls)))
    return pieces


def materialise(
    pieces: Sequence[Piece], names: Mapping[Tensor, str], mesh: Mesh | None, device: torch.device, storage: Shards
) -> None:
    """Initialise the pieces one after the other, and put this rank's shards into the storage.

    Raises:
        MetaDeviceError: an initialisation raised, wrote where it must not, or left something without values.
    """
    writes = WatchedWrites({compat.storage_id(tensor): name for tensor, name in names.items()})
    divided = dict.fromkeys(tensor.device_mesh for tensor in names if isinstance(tensor, DTensor))
    with torch.no_grad(), device, _first_ranks_random_numbers(mesh, list(divided), device):
        for piece in pieces:
            _initialise(piece, names, device, storage, writes)


@contextlib.contextmanager
def _first_ranks_random_numbers(
    mesh: Mesh | None, beside: Sequence[DeviceMesh], device: torch.device
) -> Iterator[None]:
    """Have every rank draw what the mesh's first rank draws, or the first of the meshes ``beside`` it, which are
    tensor-parallel. Afterwards the first rank's generators, and those in the same state, are where the draws have
    brought them; the others, and after an error all, are where they were."""
    own = random_states(device)
    states = {name: state.clone() for name, state in own.items()}
    if mesh is not None:
        for state in states.values():
            sent = state.to(device)
            mesh.broadcast(sent)
            for other in beside:
                DataParallelMesh(other, None, None).broadcast(sent)
            state.copy_(sent)
    with mesh.turn() if mesh is not None else contextlib.nullcontext():
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            set_random_states(states, device)
            yield
            drawn = random_states(device)
        if all(map(torch.equal, own.values(), states.values())):
            set_random_states(drawn, device)


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return torch's random states: the CPU's as "torch", an accelerator's by its type."""
    states = {"torch": torch.get_rng_state()}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set torch's random states to what ``random_states`` returned; those of another device are left out."""
    torch.set_rng_state(states["torch"])
    if device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


class WatchedWrites(compat.TorchDispatchMode):
    """Keeps ``unwritten`` up to date while it is active, and lets no operator write to what is ``protected``.

    Both hold memory by ``compat.storage_id``; ``protected`` has the name of the tensor that it belongs to.
    """

    def __init__(self, protected: Mapping[int, str]) -> None:
        super().__init__()
        self.protected = protected
        self.unwritten: set[int] = set()

    def initialised(self, tensor: Tensor) -> bool:
        return not tensor.numel() or compat.storage_id(tensor) not in self.unwritten

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        aliased, mutated = memory_effects(func)
        values = (args[index] if index < len(args) else kwargs.get(name) for index, name in mutated)
        written = [tensor for value in values for tensor in iterate_tensors(value)]
        for tensor in written:
            name = self.protected.get(compat.storage_id(tensor))
            if name is not None:
                raise MetaDeviceError(
                    f"it writes to {name}, which is not one of those that are initialised with this module: a module "
                    "may initialise itself and what is below it in its unit (of parameters() it sees those of other "
                    "units too: parameters(recurse=False))"
                )
        result = func(*args, **kwargs)
        self.unwritten.difference_update(map(compat.storage_id, written))
        if not aliased:
            made = map(compat.storage_id, iterate_tensors(result))
            if func.overloadpacket in _ALLOCATING:
                self.unwritten.update(made)
            else:
                self.unwritten.difference_update(made)
        return result


def _initialise(
    piece: Piece, names: Mapping[Tensor, str], device: torch.device, storage: Shards, writes: WatchedWrites
) -> None:
    registered = [(table, module, leaf, tensor) for module in piece.modules for table, leaf, tensor in _entries(module)]
    held = (*piece.fresh, *piece.others)
    whole = {tensor: _whole(tensor, device) for tensor in held if tensor.is_meta and _is_wrapper(tensor)}
    seen = [(table, module, leaf, whole.get(tensor, tensor)) for table, module, leaf, tensor in registered]
    fresh = {whole.get(tensor, tensor): tensor for tensor in piece.fresh}  # what an initialisation sees → the model's
    names = {**names, **{value: names[tensor] for tensor, value in whole.items()}}
    stand_ins: dict[Tensor, Tensor] = {}
    try:
        for tensor in held:
            if tensor not in whole:
                value = torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.detach().clone()
                compat.exchange(tensor, value.requires_grad_(tensor.requires_grad))
                stand_ins[tensor] = value
        _put_back(seen)
        writes.unwritten |= {compat.storage_id(tensor) for tensor in fresh}
        for what, function in piece.calls:
            try:
                with writes:
                    function()
            except Exception as error:
                reason = str(error) if isinstance(error, MetaDeviceError) else f"{type(error).__name__}: {error}"
                raise MetaDeviceError(f"{what} failed, on a model on the meta device: {reason}") from error
            for tensor, found in _put_back(seen):
                _take_over(tensor, found, f"{what} replaced {names[tensor]} by", writes)
            # Other memory is forgotten: what is given back may come again as another tensor's.
            writes.unwritten &= {compat.storage_id(tensor) for tensor in fresh}
        for value, tensor in fresh.items():
            _check(value, stand_ins.get(tensor, tensor), device, names[tensor], writes)
        for value, tensor in fresh.items():
            parameter = storage.by_original.get(id(tensor))
            part = part_of_rank(tensor, value.detach()) if isinstance(tensor, DTensor) else value
            if parameter is not None:
                storage.fill(parameter, part)
            if tensor in stand_ins:
                part = stand_ins.pop(tensor)
                compat.exchange(tensor, part)
            if parameter is None:
                storage.keep_whole(tensor, part.clone() if tensor in whole else part)
    finally:
        for tensor, value in stand_ins.items():
            compat.exchange(tensor, value)
        _put_back(registered)


def _is_wrapper(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) or is_extended(tensor)


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a plain tensor without values in the place of a wrapper: of a DTensor what all ranks have of it."""
    value = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _put_back(registered: Iterable[tuple[dict[str, Any], nn.Module, str, Tensor]]) -> list[tuple[Tensor, Any]]:
    """Register tensors again that something else stands in the place of, and return what did."""
    replaced = []
    for table, module, leaf, tensor in registered:
        if (found := table.get(leaf)) is not tensor:
            replaced.append((tensor, found))
            table[leaf] = tensor
            setattr(module, leaf, tensor)  # for modules that keep other references (nn.LSTM)
    return replaced


def _take_over(tensor: Tensor, found: Any, what: str, writes: WatchedWrites) -> None:
    """Take the values of another tensor that an initialisation put in the place of this one."""
    if not isinstance(found, Tensor) or found.is_meta or found.shape != tensor.shape or found.dtype != tensor.dtype:
        by = described(found) if isinstance(found, Tensor) else repr(found)
        raise MetaDeviceError(f"{what} {by}; write into it, or keep its shape and dtype")
    if writes.initialised(found):
        tensor.copy_(found)
        writes.unwritten.discard(compat.storage_id(tensor))


def _check(tensor: Tensor, original: Tensor, device: torch.device, name: str, writes: WatchedWrites) -> None:
    if (tensor.shape, tensor.dtype, tensor.device) != (original.shape, original.dtype, device):
        raise MetaDeviceError(
            f"{name} was {described(original)} and {described(tensor)} after its initialisation; keep its shape, dtype "
            "and device"
        )
    if not writes.initialised(tensor):
        raise MetaDeviceError(
            f"{name} is on the meta device, and nothing has written to it when its module was initialised; give it "
            "values in reset_parameters() of its module or in param_init_fn (only torch's operators are seen)"
        )


# Pieces


def _divide(model: nn.Module, units: Collection[nn.Module]) -> Iterator[tuple[dict[nn.Module, str], bool]]:
    """Yield the modules of each piece with their names, children first, and whether it is a module that holds units."""
    seen: set[nn.Module] = set()
    holds_units = {model}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in units and module is not model:
            holds_units.update(modules_on_path(model, name)[:-1])
    tops = {child for module in holds_units for child in module.children()}
    for module, name in _children_first(model, "", set()):
        if module in holds_units:
            yield {module: name}, True
        elif module in tops and module not in seen:
            yield dict(_children_first(module, name, seen)), False


def _children_first(module: nn.Module, name: str, seen: set[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    if module not in seen:
        for leaf, child in module.named_children():
            yield from _children_first(child, f"{name}.{leaf}".lstrip("."), seen)
        seen.add(module)
        yield module, name


def _entries(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield (where it is registered, its name there, parameter or buffer) of the module itself."""
    for table in (module._parameters, module._buffers):
        for leaf, tensor in table.items():
            if tensor is not None:
                yield table, leaf, tensor


def _all_tensors(*modules: nn.Module) -> set[Tensor]:
    return {tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}


def _calls_of(init_fn: ParamInitFn, modules: Mapping[nn.Module, str], fresh: Collection[Tensor]) -> Iterator[Call]:
    """Yield the calls of ``init_fn`` on every module that has something to initialise in it or below it."""
    for module, name in modules.items():
        if not fresh or not _all_tensors(module).isdisjoint(fresh):
            yield f"param_init_fn of {_where(module, name)}", functools.partial(init_fn, module)


def _own_calls(modules: Mapping[nn.Module, str], fresh: Collection[Tensor], names: Mapping[Tensor, str]) -> list[Call]:
    """Return each module's own initialisation, or that of the nearest module above it in the piece that has one."""
    parents = {child: module for module in modules for child in module.children()}
    chosen = set()
    for module, name in modules.items():
        tensor = next((tensor for _, _, tensor in _entries(module) if tensor in fresh), None)
        if tensor is None:
            continue
        by: nn.Module | None = module
        while by is not None and _own_initialisation(by) is None:
            by = parents.get(by)
        if by is None:
            raise MetaDeviceError(
                f"{names[tensor]} is on the meta device, and {_where(module, name)} has no reset_parameters() that "
                "gives it values; write one, or pass param_init_fn, a function that initialises a module (of a Hugging "
                "Face model: model._init_weights)"
            )
        chosen.add(by)
    return [
        (f"{own[0]}() of {_where(module, name)}", own[1])
        for module, name in modules.items()
        if module in chosen and (own := _own_initialisation(module)) is not None
    ]


def _own_initialisation(module: nn.Module) -> tuple[str, Callable[[], Any]] | None:
    """Return ``reset_parameters``, which ``nn.MultiheadAttention`` has under a private name, and that name."""
    methods = ((name, getattr(module, name, None)) for name in ("reset_parameters", "_reset_parameters"))
    return next(((name, method) for name, method in methods if callable(method)), None)


def _where(module: nn.Module, name: str) -> str:
    return f"module {name!r} ({type(module).__name__})" if name else f"the model itself ({type(module).__name__})"
