"""``backend="xla", sharding="replicas"``: one process per device, as ``XlaFullyShardedDataParallel`` runs.

A replica has the rows of its device and nothing else. So the model's parameters, the same objects under unchanged
names, hold this replica's rows after ``graph_fsdp.compile``: ``ceil(rows / n)`` of them on each of ``n`` replicas that
shard, the last ones filled up with zeros, whose gradients are zero. Inputs, losses and buffers are a replica's own, and
gradients the mean over replicas, as over ranks elsewhere. On XLA's CPU client replicas are threads
(``runtime/xla/replica.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from graph_fsdp.compat import xla as compat_xla
from graph_fsdp.engine.engine import Engine
from graph_fsdp.engine.entry import Entry
from graph_fsdp.errors import MeshError, UnsupportedError
from graph_fsdp.initialise.materialise import tensor_names
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes import Graph, PassContext, memory_profile
from graph_fsdp.passes.ir.spec import ParameterSpec
from graph_fsdp.report.report import CapturedGraph
from graph_fsdp.runtime.backends.xla import XlaBackend
from graph_fsdp.runtime.xla.replica import Compiled, ReplicaProgram, all_here, own_turn
from graph_fsdp.xla.mesh import XlaMesh
from graph_fsdp.xla.storage import XlaParameter, XlaStorage


@dataclass(frozen=True)
class ReplicaMesh(XlaMesh):
    """A mesh whose devices are replicas, of which this is one."""

    index: int = 0  # of this replica, among those that its parameters are sharded over
    ordinal: int = 0

    @classmethod
    def of(cls, mesh: Any) -> ReplicaMesh:
        """
        Raises:
            TypeError, MeshError: it is no mesh of all replicas, or does not say which axis shards.
        """
        devices, ordinal = XlaMesh.of(mesh).devices, compat_xla.ordinal()
        replicas = compat_xla.replica_count()
        if sorted(device for row in devices for device in row) != list(range(replicas)):
            raise MeshError(f"mesh must have each of the {replicas} replicas once, got the devices {devices}")
        index = next(row.index(ordinal) for row in devices if ordinal in row)
        return cls(devices, index, ordinal)

    @property
    def is_first(self) -> bool:
        return self.ordinal == self.devices[0][0]

    def broadcast(self, tensor: Tensor) -> None:
        """The first replica's value, into the tensors of all, on the CPU. All replicas call this."""
        value = tensor.detach() if self.is_first else torch.zeros_like(tensor)
        as_bytes = value.contiguous().reshape(-1).view(torch.uint8).to(torch.int32)  # a sum with zeros, of any type
        all_here()
        received = compat_xla.all_reduce(as_bytes.to(compat_xla.device()), [list(self.ranks)])
        compat_xla.sync(wait=True)
        tensor.copy_(received.cpu().to(torch.uint8).view(tensor.dtype).reshape(tensor.shape))


class ReplicaStorage(XlaStorage):
    """Of one replica. A parameter's stand-in is the whole parameter, without memory; the graphs take the rows."""

    xla_mesh: ReplicaMesh
    is_of_replica = True  # parameters are local, and do not say of what

    def rows(self, p: ParameterSpec, full: Tensor) -> Tensor:
        """This replica's rows of a parameter's whole value, filled up with zeros."""
        if p.replicated:
            return full
        begin = self.xla_mesh.index * p.chunk_rows
        rows = full[begin : begin + p.local_rows(self.xla_mesh.index)]
        missing = p.chunk_rows - rows.shape[0]
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows

    def fill(self, p: XlaParameter, full: Tensor) -> None:
        p.value = self.rows(p.spec, full.detach()).to(self.device, copy=True)
        p.filled = True

    def _needs_stand_in(self, p: ParameterSpec) -> bool:
        return True

    def _shape(self, p: ParameterSpec) -> torch.Size:
        return torch.Size(p.shard_shape)

    def _shard_again(self) -> None:
        """Rows are all that there is."""

    def _place(self, p: XlaParameter, found: nn.Parameter) -> None:
        """Likewise."""


@dataclass(frozen=True)
class ShardMetadata:
    """What a replica's rows are of: ``shape`` of the whole parameter, whose rows ``begin`` to ``begin + rows`` are the
    first ``rows`` of the tensor here. What is behind them fills up."""

    shape: tuple[int, ...]
    begin: int
    rows: int


def shard_metadata(model: nn.Module) -> dict[str, ShardMetadata]:
    """Of a model compiled with ``sharding="replicas"``: key of its state dict → what this replica has of it. Scalars,
    buffers and ignored parameters are whole, and not in it."""
    storage = _storage(model)
    found = {}
    for key, p in _sharded(model, storage):
        begin = min(storage.xla_mesh.index * p.spec.chunk_rows, p.spec.rows)
        found[key] = ShardMetadata(p.spec.shape, begin, p.spec.local_rows(storage.xla_mesh.index))
    return found


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict with whole parameters, on the CPU, of a model compiled with ``sharding="replicas"``. All replicas
    call this, and each gets it."""
    storage, whole = _storage(model), dict(model.state_dict())
    groups = storage.xla_mesh.groups["fsdp"]
    all_here()
    for channel, (key, p) in enumerate(_sharded(model, storage), start=1):
        whole[key] = compat_xla.all_gather(p.shard.detach(), groups, channel)[: p.spec.rows]
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


def _sharded(model: nn.Module, storage: ReplicaStorage) -> Iterator[tuple[str, XlaParameter]]:
    by_parameter = {p.shard: p for p in storage.parameters.values() if not p.spec.replicated}
    for key, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and value in by_parameter:
            yield key, by_parameter[value]


class ReplicaEngine(Engine):
    """An engine whose graphs run on this replica's device."""

    storage: ReplicaStorage  # type: ignore[assignment]  # it has what Engine's methods call
    backend: XlaBackend

    def __init__(self, forward: Callable[..., Any], spec: Any, storage: XlaStorage, *args: Any, **kwargs: Any) -> None:
        super().__init__(forward, spec, cast(Storage, storage), *args, whole=True, **kwargs)
        self.unsharded.refused = _unavailable()

    def run(self, entry: Entry, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        while True:
            all_here()
            try:
                with own_turn():
                    return super().run(entry, module, *args, **kwargs)
            except Compiled:
                continue

    def _compile_graph(
        self, settings: Any, entry: Entry, module: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        threads = compat_xla.local_device_count() > 1
        with compat_xla.backward_compiled_with_forward() if threads else contextlib.nullcontext():
            call = Engine._compile_graph(self, settings, entry, module, example_inputs)
        device = self.storage.device

        def on_device(*args: Any) -> Any:
            return call(*(arg.to(device) if isinstance(arg, Tensor) and arg.device != device else arg for arg in args))

        return on_device

    def program(self, graph: Graph, context: PassContext, captured: CapturedGraph) -> Callable[[list[Any]], Any]:
        graph.cost = context.cost
        groups = self.storage.xla_mesh.groups
        program = ReplicaProgram(graph, groups, self.regions, self.counter, self.backend.on_host_fallback)
        captured.add_program(graph, context, program, memory_profile(graph, context))
        self.programs[captured.index, graph.phase] = program
        return program


class AmongReplicas:
    """What ``initial_values`` has to know of ranks, which are replicas here."""

    ranks = (0,)  # there is no store to agree through

    def __init__(self, mesh: ReplicaMesh) -> None:
        self.is_first = mesh.is_first


def synchronise(model: nn.Module, storage: ReplicaStorage) -> None:
    """Give every replica the first one's values."""
    for tensor in tensor_names(model):
        value = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu", copy=True)
        if value.numel():
            storage.xla_mesh.broadcast(value)
        parameter = storage.by_placeholder.get(id(tensor))
        if parameter is not None:
            storage.fill(parameter, value)
        else:
            storage.keep_whole(tensor, value)


def put_replicas_values(
    model: nn.Module, storage: ReplicaStorage, put_values: Callable[[Any], None], sync_module_states: bool
) -> None:
    """``put_values``: of ``initial_values``, for a model that this replica has, or initialises, by itself."""
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if sync_module_states:
        synchronise(model, storage)
    elif on_meta:
        with first_replicas_random_numbers(storage.xla_mesh):
            put_values(storage)
    else:
        put_values(storage)


@contextlib.contextmanager
def first_replicas_random_numbers(mesh: ReplicaMesh) -> Iterator[None]:
    """Every replica draws what the first one draws, as in ``random_numbers.py``; threads, which have one generator
    between them, one after the other."""
    state = torch.get_rng_state()
    mesh.broadcast(state)
    with own_turn():
        own = torch.get_rng_state()
        torch.set_rng_state(state)
        try:
            yield
        finally:
            if not torch.equal(own, state):
                torch.set_rng_state(own)


def check_threads(fullgraph: bool) -> None:
    if not fullgraph and compat_xla.local_device_count() > 1:
        raise UnsupportedError(
            "fullgraph=False with sharding='replicas': the replicas of this process are threads, which take turns to "
            "trace, and a piece of a graph would wait in its turn for the others; leave fullgraph out, or start one "
            "process per device"
        )


def _unavailable() -> str:
    return "on XLA devices parameters are whole in compiled code alone"
