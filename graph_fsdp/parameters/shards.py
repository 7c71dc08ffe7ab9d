"""Parameters as shards: one contiguous buffer per dtype, DTensor views of it, and placeholders for tracing.

[Note: three tensors per parameter]
- The *shard*: a DTensor parameter whose local tensor lies in the storage. ``parameters()``, ``state_dict()``, the
  optimizer and DCP see it, always, except while the model's forward runs.
- The *placeholder*: the model's original Parameter object, full shape and ``param_dtype``, with its memory taken
  away. While the forward runs it stands in the module, so that Dynamo traces the plain model. Being the original
  object, it also stands wherever else the model keeps a reference to its parameters (``nn.LSTM`` does).
- The *input*: the padded local shard, as the graph takes it. Equal shapes on all ranks, whatever the rank holds.

[Note: storages over storages]
The input is a view of the buffer, so that a bucket of consecutive parameters is a slice. The shard's local tensor has
a torch storage of its own over the same bytes, which keeps the buffer alive: to ``torch.save``, ``copy.deepcopy`` and
safetensors each parameter is one tensor and no more, as with FSDP2. So has a gradient over what its reduction left.
Where other processes are given a shard on the CPU, torch moves its storage to shared memory: the buffer then takes its
values before each forward (``refresh``).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import ParameterChangedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.module.changed_parameters import AssignedData, check_tied, checked_replacement
from graph_fsdp.parameters.placeholder import guard, set_guarded
from graph_fsdp.parameters.tensor_parallel import give_memory, shard_spec
from graph_fsdp.passes.ir.spec import ModelSpec, ParameterSpec, aligned
from graph_fsdp.passes.transforms.offload import HOST


@dataclass
class ShardedParameter:
    """One parameter of the model, under all its names."""

    spec: ParameterSpec
    owners: tuple[tuple[nn.Module, str], ...]  # modules that hold it, and its name in each
    placeholder: nn.Parameter
    shard: nn.Parameter
    input: Tensor  # padded local shard as it is gathered, a view of the storage
    rows: Tensor  # without padding, as it is used; likewise
    local: Tensor  # the shard's own local tensor: the same memory, in a storage of its own (see ``Storage``)
    filled: bool = False  # it has the parameter's values
    whole: nn.Parameter | None = None  # stands in the modules while the unit is unsharded (see unshard.py)

    @property
    def registered(self) -> nn.Parameter:
        """What modules hold while no forward runs."""
        return self.shard if self.whole is None else self.whole


class Storage:
    """All shards of a model. Construction allocates; ``install`` changes the model and cannot fail.

    In between, whoever gives the model other values than its own puts them in: ``fill`` and ``keep_whole``.
    """

    reads_in_place = True  # a file's rows can be read into the shards

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        originals: dict[str, nn.Parameter],
        names: dict[nn.Parameter, list[str]],
        mesh: DataParallelMesh | None,
        device: torch.device,
    ) -> None:
        self.spec, self.mesh = spec, mesh
        self.rank = mesh.shard_rank if mesh is not None else 0
        offsets, sizes = _layout(spec)
        # A model that is planned and not run has no memory, and its shards get none.
        self.has_memory = all(p.is_meta or compat.has_memory(compat.local_part(p)) for p in originals.values())
        # Not zeroed: on the CPU, pages are then taken as shards are filled, while the originals give theirs back.
        self.device = device  # of gathered parameters
        self.buffers = {dtype: self._allocate_shards(n, dtype) for dtype, n in sizes.items()}
        self.parameters: dict[str, ShardedParameter] = {}
        self._whole: list[tuple[Tensor, Tensor]] = []  # (the model's tensor, its value)
        for name, p in spec.parameters.items():
            original = originals[name]
            begin = offsets[name]
            memory = self.buffers[p.dtype][begin : begin + p.shard_numel]
            padded = memory.view(p.used_shard_shape)
            rows = padded if p.replicated else padded.narrow(p.shard_dim, 0, p.local_rows(self.rank))
            local = compat.with_storage_of_its_own(rows) if self.has_memory else rows
            if self.has_memory:
                end = begin + local.numel()
                self.buffers[p.dtype][end : begin + aligned(p.shard_numel, p.dtype)].zero_()
            owners = tuple(_owner(model, full_name) for full_name in names[original])
            self.parameters[name] = ShardedParameter(
                p, owners, original, self._make_shard(p, original, local), p.as_stored(padded), rows, local
            )
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}
        self._tied = [p for p in self.parameters.values() if len(p.owners) > 1]
        self._assigned = AssignedData(self.parameters.values())
        self.active = False
        self.refusal: Callable[[Sequence[str]], str] = _refused  # of memory to placeholders (python_reads.py)
        self.unguarded_in_forward = False

    def _allocate_shards(self, numel: int, dtype: torch.dtype) -> Tensor:
        offload = self.spec.offload
        device, pinned = (self.device, False) if offload is None else (HOST, offload.pin_memory)
        if not self.has_memory:
            return compat.without_memory((numel,), dtype, device)
        return torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)

    def _make_shard(self, p: ParameterSpec, original: nn.Parameter, local: Tensor) -> nn.Parameter:
        value = local
        if self.mesh is not None:
            dim = None if p.replicated else p.shard_dim
            stride = torch.empty(original.shape, device="meta").stride()
            if isinstance(original, DTensor):
                mesh, placements = shard_spec(original, self.mesh, dim)
            else:
                mesh, placements = self.mesh.mesh, self.mesh.placements(dim)
            # Without the tensor itself, which ``from_local`` would move to the mesh's device.
            shape, meta = original.shape, local.to("meta")
            like = DTensor.from_local(meta, mesh, placements, run_check=False, shape=shape, stride=stride)
            value = compat.make_dtensor(local, like)
        shard = nn.Parameter(value, requires_grad=original.requires_grad)
        shard.__dict__.update({k: v for k, v in original.__dict__.items() if not k.startswith("_")})
        return shard

    def fill(self, p: ShardedParameter, full: Tensor) -> None:
        """Copy this rank's part of a whole parameter, which may be on another device, into its shard."""
        p.local.detach().copy_(self._own_part(p, compat.local_part(full)))
        p.filled = True

    def _own_part(self, p: ShardedParameter, full: Tensor) -> Tensor:
        """A view of what this rank holds of a whole parameter."""
        source, dim = full.detach(), p.spec.shard_dim
        if p.spec.replicated:
            return source
        return source.narrow(dim, min(self.rank * p.spec.chunk_rows, p.spec.rows), p.local.shape[dim])

    def shard_of(self, p: ShardedParameter, full: Tensor) -> DTensor:
        """A copy of this rank's part of a whole parameter, as a DTensor like its shard."""
        return compat.make_dtensor(self._own_part(p, full).to(p.local.device).contiguous().clone(), p.shard)

    def keep_whole(self, tensor: Tensor, value: Tensor) -> None:
        """``install`` gives ``tensor``, one of the model's that is not sharded, this value on this device."""
        self._whole.append((tensor, value))

    def install(self, fullgraph: bool) -> None:
        """Fill the shards that are not filled yet with the originals' values, register them, and take the originals'
        memory away, parameter by parameter. With ``fullgraph``, nothing of the model runs outside of compiled code,
        and placeholders need no guard while its forward runs."""
        self.unguarded_in_forward = fullgraph
        for p in self.parameters.values():
            if self.has_memory and not p.filled:
                self.fill(p, p.placeholder)
            _register(p, p.shard)
            allocate = torch.empty if self.has_memory else compat.without_memory
            empty = allocate(p.spec.shape, dtype=p.spec.param_dtype, device=self.device)
            if self.has_memory:
                empty.untyped_storage().resize_(0)
            _set_memory(p.placeholder, empty)
            guard(p.placeholder, p.spec.name, self)
        for tensor, value in self._whole:
            if tensor.device == value.device:
                tensor.detach().copy_(value)
            else:
                _set_memory(tensor, value)
        self._whole.clear()

    @contextlib.contextmanager
    def placeholders_registered(self) -> Iterator[None]:
        """For the time of a forward: modules hold placeholders. Whatever happens, they hold shards afterwards."""
        self.active = True
        try:
            for p in self.parameters.values():
                if self.unguarded_in_forward:
                    set_guarded(p.placeholder, False)
                _register(p, p.placeholder)
            yield
        finally:
            for p in self.parameters.values():
                if self.unguarded_in_forward:
                    set_guarded(p.placeholder, True)
                _register(p, p.registered)
            self.active = False

    def without_placeholders(self, outputs: Any) -> Any:
        """A model that returns a parameter returns its shard: Dynamo hands back the very object that it read."""
        with compat.without_torch_function():
            return compat.tree_map_only(nn.Parameter, self._without_placeholder, outputs)

    def _without_placeholder(self, p: nn.Parameter) -> nn.Parameter:
        found = self.by_placeholder.get(id(p))
        return p if found is None else found.registered

    def set_whole(self, p: ShardedParameter, whole: nn.Parameter | None) -> None:
        """``whole`` stands in the modules from now on; None: the shard."""
        p.whole = whole
        _register(p, p.registered)

    def checked_whole(self, p: ShardedParameter) -> nn.Parameter:
        """What stands in the modules for an unsharded parameter: it may have been replaced."""
        found: Any = p.whole
        plain = isinstance(found, nn.Parameter) and not isinstance(found, DTensor)
        if not plain or found.shape != torch.Size(p.spec.shape) or found.device != p.input.device:
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was replaced by {type(found).__name__} while it was unsharded; a plain "
                f"parameter of shape {tuple(p.spec.shape)} on {p.input.device} has to stand there"
            )
        whole: nn.Parameter = found
        return whole

    def refresh(self) -> None:
        """Take over what the user did to parameters since the last forward: ``requires_grad``, a replaced
        Parameter object (``load_state_dict(assign=True)``), other memory (``p.data = …`` of one process).

        Raises:
            ParameterChangedError: it cannot be taken over.
        """
        self._assigned.check()
        for p in self._tied:
            check_tied(p)
        taken = [self._take_over(p) for p in self.parameters.values()]
        if any(taken):
            self._assigned.look()

    def _take_over(self, p: ShardedParameter) -> bool:
        """Whether there was something to take over."""
        module, leaf = p.owners[0]
        registered, found = module._parameters.get(leaf), False
        if p.whole is not None:
            p.whole = registered
            if registered is not None and registered.requires_grad != p.shard.requires_grad:
                p.shard.requires_grad_(registered.requires_grad)
        elif registered is not p.shard:
            p.shard, found = checked_replacement(p, registered), True
        memory = p.shard.data if self.mesh is None else compat.local_part(p.shard)
        if memory.data_ptr() != p.rows.data_ptr() and memory.numel():
            self._adopt(p, memory)
            found = True
        with compat.without_torch_function():
            if p.placeholder.requires_grad != p.shard.requires_grad:
                p.placeholder.requires_grad_(p.shard.requires_grad)
        return found

    def _adopt(self, p: ShardedParameter, memory: Tensor) -> None:
        if memory.data_ptr() == p.local.data_ptr():  # its storage was moved, to be shared with other processes
            with torch.no_grad():
                p.rows.copy_(memory)
            return
        if (found := described(memory)) != (expected := described(p.local)):
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was {expected} per rank and is {found} now; move and cast the model before "
                "graph_fsdp.compile, and set compute dtypes with mp_policy"
            )
        with torch.no_grad():
            p.local.copy_(memory)
        if self.mesh is None:
            p.shard.data = p.local
        else:
            compat.set_local_tensor(p.shard, p.local)

    def inputs_after_refresh(self) -> dict[str, Tensor]:
        """Parameter name → the padded local shard that the graphs take, connected to the parameter's ``grad``."""
        self.refresh()
        shards = connected_shards(list(self.parameters.values()), self.mesh is not None)
        return dict(zip(self.parameters, shards, strict=True))


def connected_shards(parameters: list[ShardedParameter], are_dtensors: bool) -> list[Tensor]:
    """The padded local shards of parameters, connected to their ``grad`` where gradients are recorded."""
    trained = [p for p in parameters if p.shard.requires_grad] if torch.is_grad_enabled() else []
    shards: Sequence[Tensor] = [p.shard for p in trained]
    if are_dtensors and trained:
        shards = Linked.apply([p.input for p in trained], lambda grads: map(_shard_gradient, trained, grads), *shards)
    linked = iter(shards)
    return [next(linked) if trained and p.shard.requires_grad else p.input for p in parameters]


# Gradients of what comes out of a node of autograd → those of what went in.
Gradients: TypeAlias = Callable[[Sequence[Tensor | None]], Iterable[Tensor | None]]


class Linked(torch.autograd.Function):
    """One node of autograd for many tensors: ``values`` come out of it, whose gradients ``backward`` turns into those
    of ``sources``. None stands for a gradient that is not there."""

    @staticmethod
    def forward(ctx: Any, values: Sequence[Tensor], backward: Gradients, *sources: Tensor) -> tuple[Tensor, ...]:
        ctx.call = backward
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.call(grads))


def own_rows(module: nn.Module, storage: Any, state_dict: Mapping[str, Any]) -> Any:
    """``state_dict`` with a DTensor of this rank's rows for each whole tensor of a parameter that is sharded."""
    if not isinstance(storage, Storage) or not isinstance(state_dict, Mapping):
        return state_dict
    held = {id(p.shard): p for p in storage.parameters.values() if not isinstance(p.placeholder, DTensor)}
    made = {}
    for name, registered in module.named_parameters(remove_duplicate=False):
        p = held.get(id(registered))
        value: Any = state_dict.get(name)
        whole = isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta
        if p is not None and isinstance(registered, DTensor) and whole and value.shape == registered.shape:
            made[name] = storage.shard_of(p, value)
    if not made:
        return state_dict
    rows: OrderedDict[str, Any] = OrderedDict({**state_dict, **made})
    if hasattr(state_dict, "_metadata"):  # versions of modules
        vars(rows)["_metadata"] = state_dict._metadata
    return rows


def _shard_gradient(p: ShardedParameter, grad: Tensor | None) -> Tensor | None:
    """The gradient of a padded local shard as a DTensor."""
    if grad is None:
        return None
    rows = p.local.shape[p.spec.shard_dim] if p.local.dim() else 0
    local = grad if p.spec.replicated or rows == grad.shape[0] else grad[:rows]
    used = p.spec.as_used(local).contiguous()
    return compat.make_dtensor(compat.with_storage_of_its_own(used), p.shard)


def _refused(names: Sequence[str]) -> str:
    return "the model is not compiled yet"


def _layout(spec: ModelSpec) -> tuple[dict[str, int], dict[torch.dtype, int]]:
    """Parameter name → element at which its chunk starts in its dtype's buffer, and the buffers' sizes."""
    offsets: dict[str, int] = {}
    sizes: dict[torch.dtype, int] = {}
    for bucket in spec.buckets:
        if bucket.parameters[0].name in spec.payloads:
            continue
        dtype = bucket.parameters[0].dtype
        begin = sizes.setdefault(dtype, 0)
        offsets.update({name: begin + offset for name, offset in bucket.offsets.items()})
        sizes[dtype] = begin + bucket.shard_numel
    for p in spec.parameters.values():
        if p.name not in offsets:
            offsets[p.name] = sizes.setdefault(p.dtype, 0)
            sizes[p.dtype] += aligned(p.shard_numel, p.dtype)
    return offsets, sizes


def _set_memory(tensor: Tensor, value: Tensor) -> None:
    """``tensor`` has the memory of ``value`` from now on, wherever the model refers to it."""
    if isinstance(tensor, DTensor):
        give_memory(tensor, value)
    elif tensor.is_meta:  # torch lets no other device's memory be its ``data``
        compat.swap(tensor, value.requires_grad_(tensor.requires_grad))
    else:
        tensor.data = value


def _register(p: ShardedParameter, value: nn.Parameter) -> None:
    for module, leaf in p.owners:
        module._parameters[leaf] = value


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def described(value: Tensor) -> str:
    """``"float32[4, 8] on cpu"``."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
