"""``backend="xla", sharding="replicas"`` runs one process per device, as ``XlaFullyShardedDataParallel`` does.

After ``graph_fsdp.compile`` the model's parameters, the same objects under unchanged names, hold this replica's rows:
``ceil(rows / n)`` of them on each of ``n`` replicas that shard, the last ones filled up with zeros, whose gradients are
zero. Inputs, losses and buffers are a replica's own, and gradients the mean over replicas. On XLA's CPU client replicas
are threads (``runtime/xla/program.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.recompilation import CaptureKey
from graph_fsdp.errors import MeshError
from graph_fsdp.mesh import rows_of
from graph_fsdp.parameters.sharded import ShardedParameter
from graph_fsdp.passes.ir.spec import ParameterSpec
from graph_fsdp.runtime.xla.program import Compiled, ReplicaProgram, all_here, are_threads, own_turn
from graph_fsdp.xla.engine import XlaEngine
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.storage import XlaStorage


@dataclass(frozen=True)
class ReplicaMesh(XlaMesh):
    """Describes a mesh whose devices are replicas, of which this is one."""

    index: int = 0  # of this replica, among those that its parameters are sharded over
    ordinal: int = 0

    @classmethod
    def of(cls, mesh: Any) -> ReplicaMesh:
        """Read a user's mesh, and raise what :meth:`XlaMesh.of` does, also if it is no mesh of all replicas."""
        devices, ordinal = XlaMesh.of(mesh).devices, compat_xla.ordinal()
        replicas = compat_xla.runtime().world_size()
        if sorted(device for row in devices for device in row) != list(range(replicas)):
            raise MeshError(f"mesh must have each of the {replicas} replicas once, got the devices {devices}")
        index = next(row.index(ordinal) for row in devices if ordinal in row)
        return cls(devices, index, ordinal)

    @property
    def is_first(self) -> bool:
        return self.ordinal == self.devices[0][0]

    def turn(self) -> AbstractContextManager[None]:
        return own_turn()

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first replica's value into the tensors of all, on the CPU. All replicas call this."""
        value = tensor.detach() if self.is_first else torch.zeros_like(tensor)
        as_bytes = value.contiguous().reshape(-1).view(torch.uint8).to(torch.int32)  # a sum with zeros, of any type
        all_here()
        received = compat_xla.all_reduce(as_bytes.to(compat_xla.device()), [list(self.ordinals)])
        compat_xla.sync(wait=True)
        tensor.copy_(received.cpu().to(torch.uint8).view(tensor.dtype).reshape(tensor.shape))


class ReplicaStorage(XlaStorage):
    """Holds the parameters of one replica. Stand-ins are whole parameters, without memory; the graphs take the rows."""

    xla_mesh: ReplicaMesh
    is_of_replica = True

    def rows(self, p: ParameterSpec, full: Tensor) -> Tensor:
        """Return this replica's rows of a parameter's whole value, filled up with zeros."""
        if p.replicated:
            return full
        return rows_of(full, self.xla_mesh.index, p.chunk_rows)

    def fill(self, p: ShardedParameter, full: Tensor) -> None:
        self._values[p.spec.name] = self.rows(p.spec, full.detach()).to(self.device, copy=True)
        p.filled = True

    def _needs_stand_in(self, p: ParameterSpec) -> bool:
        return True

    def _mark(self, p: ShardedParameter, value: Tensor) -> None:
        """Do nothing, as in the next one: it is a replica's own."""

    def _shard_again(self) -> None:
        """Do nothing: rows are all that there is."""


@dataclass(frozen=True)
class ShardMetadata:
    """A replica has rows ``begin`` to ``begin + rows`` of a parameter of this ``shape``: the first ``rows`` of its
    tensor, whose rest is padding."""

    shape: tuple[int, ...]
    begin: int
    rows: int


def shard_metadata(model: nn.Module) -> dict[str, ShardMetadata]:
    """Return, of a model compiled with ``sharding="replicas"``, key of its state dict → what this replica has of it.
    Scalars, buffers and ignored parameters are whole, and not in it. Raises ValueError for another model."""
    storage = _storage(model)
    found = {}
    for key, p in _sharded(model, storage):
        begin = min(storage.xla_mesh.index * p.spec.chunk_rows, p.spec.rows)
        found[key] = ShardMetadata(p.spec.shape, begin, p.spec.local_rows(storage.xla_mesh.index))
    return found


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state dict, with whole parameters on the CPU, of a model compiled with ``sharding="replicas"``. All
    replicas call this, and each gets it. Raises ValueError for another model."""
    storage, whole = _storage(model), dict(model.state_dict())
    groups = storage.xla_mesh.groups["fsdp"]
    all_here()
    for channel, (key, p) in enumerate(_sharded(model, storage), start=1):
        shard = p.shard.detach()
        if p.spec.empty:  # which XLA does not gather
            whole[key] = shard.new_empty(p.spec.shape)
        else:
            whole[key] = compat_xla.all_gather(shard, groups, channel)[: p.spec.rows]
    compat_xla.sync(wait=True)
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in whole.items()}


def _storage(model: nn.Module) -> ReplicaStorage:
    storage = getattr(getattr(model, "_graph_fsdp", None), "storage", None)
    if not isinstance(storage, ReplicaStorage):
        raise ValueError(
            "model is not compiled with backend='xla', sharding='replicas'; with one process for all devices "
            "model.state_dict() is whole"
        )
    return storage


def _sharded(model: nn.Module, storage: ReplicaStorage) -> Iterator[tuple[str, ShardedParameter]]:
    by_parameter = {p.shard: p for p in storage.parameters.values() if not p.spec.replicated}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value in by_parameter:
            yield key, by_parameter[value]


class ReplicaEngine(XlaEngine):
    """Runs graphs on this replica's device."""

    program_class = ReplicaProgram

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        while True:
            all_here()
            try:
                with own_turn():
                    return super().run(entry, module, *args, **kwargs)
            except Compiled:
                continue

    def _compile_graph(
        self, key: CaptureKey, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        with compat_xla.backward_compiled_with_forward() if are_threads() else contextlib.nullcontext():
            return XlaEngine._compile_graph(self, key, module, example_inputs)
