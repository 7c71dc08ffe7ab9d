"""Sharded parameters on XLA, and what Dynamo traces in the place of tensors whose shape is that of all devices.

With SPMD one process has all devices. A parameter keeps its full logical shape; its rows lie on the devices that shard
(``ceil(rows / n)`` on each, the last ones padded), and an optimizer's step on it runs on all of them. So parameters
stay plain ones: the model's own objects, moved to XLA if they were on the CPU.

[Note: stand-ins]
The graph that is traced is what *one* device runs. A tensor that is sharded stands in it with the rows of one device:
Dynamo is given a stand-in of that shape without memory, and the compiled function gets the tensor itself. A parameter
is whole in the traced graph, as gathered; where its type is not ``param_dtype``, a stand-in has that type.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.runtime.xla.placement import Placement, read_placement
from graph_fsdp.xla.mesh import XlaMesh


@dataclass
class XlaParameter:
    """One parameter of the model, under all its names."""

    spec: ParameterSpec
    owners: tuple[tuple[nn.Module, str], ...]  # modules that hold it, and its name in each
    shard: nn.Parameter  # what they hold: of full logical shape, sharded
    stand_in: nn.Parameter | None = None  # what they hold while a forward runs, where that is another one
    filled: bool = False
    value: Tensor | None = None  # until the parameter gets it

    @property
    def placeholder(self) -> nn.Parameter:
        """What Dynamo finds in the modules."""
        return self.shard if self.stand_in is None else self.stand_in

    @property
    def input(self) -> Tensor:
        return self.shard

    @property
    def registered(self) -> nn.Parameter:
        return self.shard


class XlaStorage:
    """All parameters of a model. Construction changes nothing; ``install`` changes the model."""

    reads_in_place = False  # what XLA has cannot be written to

    def __init__(
        self, model: nn.Module, spec: ModelSpec, originals: dict[str, nn.Parameter],
        names: dict[nn.Parameter, list[str]], mesh: XlaMesh, device: torch.device,
    ) -> None:  # fmt: skip
        self.spec, self.device = spec, device
        self.mesh, self.xla_mesh = None, mesh  # no mesh of ranks: there is one process
        self.has_memory = True
        self.parameters: dict[str, XlaParameter] = {}
        for name, p in spec.parameters.items():
            owners = tuple(
                (model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2]) for n in names[originals[name]]
            )
            self.parameters[name] = XlaParameter(p, owners, originals[name])
        self.by_placeholder = {id(p.shard): p for p in self.parameters.values()}
        self.active = False
        self._whole: list[tuple[Tensor, Tensor]] = []  # (the model's tensor, its value)

    def _needs_stand_in(self, p: ParameterSpec) -> bool:
        """Whether the model, as it is traced, sees another tensor than the parameter."""
        return p.param_dtype is not p.dtype

    def _shape(self, p: ParameterSpec) -> torch.Size:
        """Of the registered parameter."""
        return torch.Size(p.shape)

    def placement(self, p: ParameterSpec) -> Placement:
        return self.xla_mesh.whole if p.replicated or p.empty else self.xla_mesh.sharded

    def fill(self, p: XlaParameter, full: Tensor) -> None:
        """Shard the value of a parameter, which may be on the CPU; ``install`` gives it to the parameter. (A model on
        the meta device has its values only while a piece of it is initialised.)"""
        placement = self.placement(p.spec)
        if full is p.shard and full.device.type == "xla":
            compat_xla.mark_sharding(p.shard, placement.devices, placement.tiles)
        else:
            p.value = full.detach().to(self.device, copy=True)
            compat_xla.mark_sharding(p.value, placement.devices, placement.tiles)
        p.filled = True

    def keep_whole(self, tensor: Tensor, value: Tensor) -> None:
        """``install`` gives ``tensor``, one of the model's that is not sharded, this value on the device."""
        self._whole.append((tensor, value))

    def install(self, model: nn.Module) -> None:
        """Fill what is not filled yet with the originals' values, make the stand-ins, and move what is not sharded."""
        for p in self.parameters.values():
            if not p.filled:
                self.fill(p, p.shard)
            if p.value is not None:
                # Exchanged, so that whoever holds the parameter (``nn.LSTM``, an optimizer) finds the value in it.
                compat.swap(p.shard, p.value.requires_grad_(p.shard.requires_grad))
                p.value = None
            if self._needs_stand_in(p.spec):
                stand_in = compat_xla.without_memory(
                    p.spec.shape, p.spec.param_dtype, self.device, p.shard.requires_grad, nn.Parameter
                )
                p.stand_in = cast(nn.Parameter, stand_in)
        replaced = {id(tensor) for tensor, _ in self._whole}
        parameters = {id(p.shard) for p in self.parameters.values()}
        for tensor in (*model.buffers(), *model.parameters()):
            if tensor.device.type != "xla" and id(tensor) not in replaced | parameters:
                self._whole.append((tensor, tensor.detach()))
        for tensor, value in self._whole:
            compat.swap(tensor, value.to(self.device).requires_grad_(tensor.requires_grad))
        self._whole.clear()
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}
        compat_xla.sync()

    @contextlib.contextmanager
    def placeholders_registered(self) -> Iterator[None]:
        """For the time of a forward: modules hold what Dynamo is to find."""
        self.active = True
        replaced = [p for p in self.parameters.values() if p.stand_in is not None]
        try:
            for p in replaced:
                _register(p, p.placeholder)
            yield
        finally:
            for p in replaced:
                _register(p, p.shard)
            self.active = False

    def without_placeholders(self, outputs: Any) -> Any:
        """A model that returns a parameter returns the one that it has."""
        return compat.tree_map_only(nn.Parameter, self._without_placeholder, outputs)

    def _without_placeholder(self, p: nn.Parameter) -> nn.Parameter:
        found = self.by_placeholder.get(id(p))
        return p if found is None else found.shard

    def refresh(self) -> None:
        """Take over what the user did to parameters since the last forward: ``requires_grad``, or another object
        (``load_state_dict(assign=True)``)."""
        for p in self.parameters.values():
            module, leaf = p.owners[0]
            registered = module._parameters.get(leaf)
            if registered is not p.shard:
                self._replace(p, registered)
            if p.stand_in is not None and p.stand_in.requires_grad != p.shard.requires_grad:
                p.stand_in.requires_grad_(p.shard.requires_grad)
        self._shard_again()

    def _shard_again(self) -> None:
        """What was loaded into parameters (``load_state_dict``) is whole on every device."""
        parameters = list(self.parameters.values())
        shards = [p.shard.detach() for p in parameters]
        if compat_xla.pending(shards):  # an optimizer's step
            compat_xla.sync(wait=True)
        for p, spec in zip(parameters, compat_xla.sharding_specs(shards), strict=True):
            placement = self.placement(p.spec)
            found = read_placement(spec, self.xla_mesh.ranks)
            if not placement.is_replicated and found != placement:
                compat_xla.mark_sharding(p.shard, placement.devices, placement.tiles)

    def _replace(self, p: XlaParameter, found: Any) -> None:
        expected = (self._shape(p.spec), p.spec.dtype, self.device)
        if not isinstance(found, nn.Parameter) or (found.shape, found.dtype, found.device) != expected:
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was replaced by {type(found).__name__} that is not a parameter of shape "
                f"{tuple(self._shape(p.spec))} and type {p.spec.dtype} on {self.device}; copy into the parameter"
            )
        self.by_placeholder.pop(id(p.placeholder), None)
        self._place(p, found)
        p.shard = found
        for module, leaf in p.owners:
            module._parameters[leaf] = found
        self.by_placeholder[id(p.placeholder)] = p

    def _place(self, p: XlaParameter, found: nn.Parameter) -> None:
        placement = self.placement(p.spec)
        if read_placement(compat_xla.sharding_specs([found])[0], self.xla_mesh.ranks) != placement:
            compat_xla.mark_sharding(found, placement.devices, placement.tiles)

    def inputs_after_refresh(self) -> dict[str, Tensor]:
        """Parameter name → the parameter, which the graphs take."""
        self.refresh()
        if torch.is_grad_enabled():
            return {name: p.shard for name, p in self.parameters.items()}
        return {name: p.shard.detach() for name, p in self.parameters.items()}


class LocalViews:
    """The stand-ins of one forward's inputs, and the tensors that they stand for."""

    def __init__(self, mesh: XlaMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.real: dict[int, Tensor] = {}  # by the stand-in's id
        self.placements: dict[int, Placement] = {}  # likewise
        self.signature: tuple[Placement | None, ...] = ()  # of all tensors, in order
        self._stand_ins: dict[int, Tensor] = {}  # by the tensor's id, alive as long as this

    @property
    def has_sharded(self) -> bool:
        return bool(self._stand_ins)

    def of(self, inputs: Any) -> Any:
        """``inputs``, a tree, with stand-ins for what is sharded."""
        return compat.tree_map_only(Tensor, self._of_tensor, inputs)

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        found = self._stand_in(compat_xla.plain(tensor))
        self.signature += (self.placements.get(id(found)),)
        return found

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self._stand_ins:
            return self._stand_ins[id(tensor)]
        if tensor.device.type != "xla" or isinstance(tensor, nn.Parameter):
            return tensor
        (spec,) = compat_xla.sharding_specs([tensor])
        placement = read_placement(spec, self.mesh.ranks)
        if placement is None:
            raise UnsupportedError(
                f"an input of shape {tuple(tensor.shape)} is sharded as {spec}; with backend='xla' inputs are sharded "
                "on their first dimension alone, or not at all"
            )
        if placement.is_replicated:
            return tensor
        if tensor.shape[0] % placement.tiles:
            raise ValueError(
                f"an input of shape {tuple(tensor.shape)} is sharded over {placement.tiles} devices, which do not get "
                "equally many rows each; pass a batch whose size is divisible by the number of devices"
            )
        local = placement.local_shape(tensor.shape)
        stand_in = compat_xla.without_memory(local, tensor.dtype, self.device, tensor.requires_grad)
        self._stand_ins[id(tensor)] = stand_in
        self.real[id(stand_in)], self.placements[id(stand_in)] = tensor, placement
        return stand_in

    def back(self, outputs: Any) -> Any:
        """A model that returns an input returns the tensor itself."""
        return compat.tree_map_only(Tensor, lambda t: self.real.get(id(t), t), outputs)


def _register(p: XlaParameter, value: nn.Parameter) -> None:
    for module, leaf in p.owners:
        module._parameters[leaf] = value
