"""XLA holds sharded parameters, and Dynamo traces stand-ins for tensors that have the shape of all devices.

With SPMD a parameter keeps its full logical shape; its rows lie on the devices that shard (``ceil(rows / n)`` on each,
the last ones padded), and an optimizer's step on it runs on all of them. So parameters stay the model's own objects.

[Note: stand-ins]
The traced graph is what *one* device runs. For a sharded tensor Dynamo is given a stand-in without memory that has one
device's rows, and the compiled function gets the tensor itself. A parameter is whole in the traced graph, as gathered;
where its dtype is not ``param_dtype``, a stand-in has that dtype.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from graph_fsdp import compat
from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.parameters.sharded import Owners, ShardedParameter, Shards
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec
from graph_fsdp.runtime.xla.operators import Placement
from graph_fsdp.xla.mesh import XlaMesh


class XlaStorage(Shards):
    """Holds the model's own parameters, of full logical shape and sharded. A placeholder is the parameter itself, or a
    stand-in where the traced model is to see another tensor."""

    reads_in_place = False  # what XLA has cannot be written to

    def __init__(
        self, spec: ModelSpec, originals: dict[str, nn.Parameter],
        owners: dict[str, Owners], mesh: XlaMesh, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__(spec, None, device)  # no mesh of ranks: there is one process
        self.xla_mesh = mesh
        for name, p in spec.parameters.items():
            original = originals[name]
            self.parameters[name] = ShardedParameter(
                p, owners[name], placeholder=original, shard=original, input=original, local=original
            )
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}
        self._values: dict[str, Tensor] = {}  # of parameters, until they get them

    def _needs_stand_in(self, p: ParameterSpec) -> bool:
        """Say whether the model, as it is traced, sees another tensor than the parameter."""
        return p.param_dtype is not p.dtype

    def placement(self, p: ParameterSpec) -> Placement:
        return self.xla_mesh.whole if p.replicated or p.empty else self.xla_mesh.sharded

    def fill(self, p: ShardedParameter, full: Tensor) -> None:
        """Place a value and keep it for ``install``: a parameter on the meta device cannot hold it."""
        if full is not p.shard or full.device.type != "xla":
            full = self._values[p.spec.name] = full.detach().to(self.device, copy=True)
        self._mark(p, full)
        p.filled = True

    def plain_copy(self, p: ShardedParameter) -> nn.Parameter:
        return nn.Parameter(torch.empty(p.shard.shape, dtype=p.spec.dtype, device="meta"), p.shard.requires_grad)

    def fill_from(self, other: Shards) -> None:
        for name, p in self.parameters.items():
            # A mere copy would have the same memory, which the next step of an optimizer gives back to XLA.
            self._values[name] = other.parameters[name].shard.detach() * 1
            self._mark(p, self._values[name])
            p.filled = True

    def _mark(self, p: ShardedParameter, value: Tensor) -> None:
        placement = self.placement(p.spec)
        compat_xla.mark_sharding(value, placement.devices, placement.tiles)

    def install(self, model: nn.Module, fullgraph: bool) -> None:
        for name, p in self.parameters.items():
            if not p.filled:
                self.fill(p, p.shard)
            if (value := self._values.pop(name, None)) is not None:
                # Exchanged, so that whoever holds the parameter (``nn.LSTM``, an optimizer) finds the value in it.
                compat.swap(p.shard, value.requires_grad_(p.shard.requires_grad))
            if self._needs_stand_in(p.spec):
                stand_in = compat_xla.without_memory(
                    p.spec.shape, p.spec.param_dtype, self.device, p.shard.requires_grad, nn.Parameter
                )
                p.placeholder = cast(nn.Parameter, stand_in)
        self.by_original.clear()
        known = {id(tensor) for tensor, _ in self._whole} | {id(p.shard) for p in self.parameters.values()}
        others = [t for t in (*model.buffers(), *model.parameters()) if t.device.type != "xla" and id(t) not in known]
        for tensor, value in (*self._whole, *((tensor, tensor.detach()) for tensor in others)):
            compat.swap(tensor, value.to(self.device).requires_grad_(tensor.requires_grad))
        self._whole.clear()
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}
        compat_xla.sync()

    def after_apply(self) -> None:
        return  # a shard is the parameter itself, which has been moved

    def refresh(self) -> None:
        """Take over ``requires_grad`` and replaced objects (``load_state_dict(assign=True)``); shard what was
        loaded."""
        for p in self.parameters.values():
            if p.in_modules is not p.shard:
                self._replace(p, p.in_modules)
            if p.placeholder.requires_grad != p.shard.requires_grad:
                p.placeholder.requires_grad_(p.shard.requires_grad)
        self._shard_again()

    def _shard_again(self) -> None:
        parameters = list(self.parameters.values())
        shards = [p.shard.detach() for p in parameters]
        if compat_xla.pending(shards):  # an optimizer's step
            compat_xla.sync(wait=True)
        for p, found in zip(parameters, self.xla_mesh.placements(shards), strict=True):
            placement = self.placement(p.spec)
            if not placement.is_replicated and found != placement:
                compat_xla.mark_sharding(p.shard, placement.devices, placement.tiles)

    def _replace(self, p: ShardedParameter, found: Any) -> None:
        expected = (p.shard.shape, p.spec.dtype, self.device)
        if not isinstance(found, nn.Parameter) or (found.shape, found.dtype, found.device) != expected:
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was replaced by {type(found).__name__} that is not a parameter of shape "
                f"{tuple(p.shard.shape)} and type {p.spec.dtype} on {self.device}; copy into the parameter"
            )
        self.by_placeholder.pop(id(p.placeholder), None)
        if p.placeholder is p.shard:
            p.placeholder = found
        p.shard = p.input = p.local = found
        p.register(found)
        self.by_placeholder[id(p.placeholder)] = p

    def inputs(self) -> dict[str, Tensor]:
        needs_grad = torch.is_grad_enabled()
        return {name: p.shard if needs_grad else p.shard.detach() for name, p in self.parameters.items()}


class LocalViews:
    """Maps one forward's inputs to their stand-ins, and back."""

    def __init__(self, mesh: XlaMesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self.real: dict[int, Tensor] = {}  # by the stand-in's id
        self.placements: dict[int, Placement] = {}  # likewise
        self.signature: tuple[Placement | None, ...] = ()  # of all tensors, in order
        self._stand_ins: dict[int, Tensor] = {}  # by the tensor's id, alive as long as this

    def of(self, inputs: Any) -> Any:
        """Return ``inputs``, a tree, with stand-ins for what is sharded."""
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
        (placement,) = self.mesh.placements([tensor])
        if placement is None:
            (spec,) = compat_xla.sharding_specs([tensor])
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
        """Return the tensors themselves where a model returns stand-ins of its inputs."""
        return compat.tree_map_only(Tensor, lambda t: self.real.get(id(t), t), outputs)
