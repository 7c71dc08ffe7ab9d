"""Parameters become shards: one contiguous buffer per dtype (pinned ones: ``host_memory.py``), DTensor views of it, and
placeholders for tracing.

[Note: three tensors per parameter]
- The *shard* is a DTensor parameter whose local tensor lies in the storage. ``parameters()``, ``state_dict()``, the
  optimizer and DCP see it, except while the model's forward runs.
- The *placeholder* is the model's original Parameter object, of full shape and ``param_dtype``, without memory. While
  the forward runs it stands in the module, and wherever else the model refers to it (``nn.LSTM`` does).
- The *input* is the padded local shard, as the graph takes it, of equal shape on all ranks.

[Note: storages over storages]
The input is a view of the buffer, so that a bucket of consecutive parameters is a slice. The shard's local tensor
(and a gradient's) has a torch storage of its own over the same bytes, which keeps the buffer alive. Where torch moves
it to shared memory, the buffer takes its values before each forward (``refresh``). When the whole model is moved to
another device the buffers are given back, and the next forward takes new ones. See docs/decisions/parameters.md.

[Note: data of a DTensor]
``parameter.data = …`` exchanges what the DTensor itself has, and its local tensor stays: no shard changes, in FSDP2
neither, and what was assigned cannot be found. The DTensor's own storage, which has no bytes, is then another one, by
which an assignment is noticed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import ParameterChangedError
from graph_fsdp.mesh import DataParallelMesh
from graph_fsdp.parameters.gradients import connected_shards
from graph_fsdp.parameters.host_memory import pieces_of
from graph_fsdp.parameters.placeholder import set_guarded, unguarded
from graph_fsdp.parameters.placements import as_model_uses_it, give_memory, shard_spec
from graph_fsdp.parameters.sharded import Owners, ShardedParameter, Shards, can_be_written, take_replacement
from graph_fsdp.passes.ir.dialect import aligned
from graph_fsdp.passes.ir.spec import HOST, ModelSpec, ParameterSpec
from graph_fsdp.passes.pipeline import collector_paused


class Storage(Shards):
    """Holds the shards of a rank."""

    reads_in_place = True
    installed: ClassVar[weakref.WeakSet[Storage]] = weakref.WeakSet()  # of all models that live
    holders: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()  # of buffers: optimizers, which have ``forget_buffers``

    @collector_paused()
    def __init__(
        self,
        spec: ModelSpec,
        originals: dict[str, nn.Parameter],
        owners: dict[str, Owners],
        mesh: DataParallelMesh | None,
        device: torch.device,
    ) -> None:
        super().__init__(spec, mesh, device)
        self.ranks = {name: mesh.of_parameter(name).shard_rank if mesh is not None else 0 for name in spec.parameters}
        # A model that is planned and not run has no memory, and its shards get none.
        self.has_memory = all(p.is_meta or compat.has_memory(compat.local_part(p)) for p in originals.values())
        memory = self._allocate_shards()
        for name, p in spec.parameters.items():
            original, (local, stored) = originals[name], memory[name]
            shard = self._make_shard(p, original, local)
            self.parameters[name] = ShardedParameter(
                p, owners[name], original, shard, stored, local, seen=_parts(shard)
            )
            if isinstance(original, DTensor):
                self.parameters[name].as_used = as_model_uses_it(original)
        self.by_placeholder = {id(p.placeholder): p for p in self.parameters.values()}
        self._look: _Look | None = None  # at what ``refresh`` has left
        self._tied = [p for p in self.parameters.values() if len(p.owners) > 1]
        self.is_away = False

    def _allocate_shards(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter's part of new buffers, without padding in a storage of its own, and as it is
        gathered."""
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, flat in self._allocate().items():
            p = self.spec.parameters[name]
            padded = flat[: p.shard_numel].view(p.used_shard_shape)
            rows = padded if p.replicated else padded.narrow(p.shard_dim, 0, p.local_rows(self.ranks[name]))
            local = compat.with_storage_of_its_own(rows) if self.has_memory else rows
            if self.has_memory:
                flat[local.numel() :].zero_()
            found[name] = local, p.as_stored(padded)
        return found

    def _allocate(self) -> dict[str, Tensor]:
        """Allocate the buffers; return each parameter's part of them, flat and with what follows it up to the next."""
        offload = self.spec.offload
        device, pinned = (self.device, False) if offload is None else (HOST, offload.pin_memory)
        parts: dict[str, Tensor] = {}
        for dtype, numels in _layout(self.spec).items():
            names = iter(numels)
            sizes = [numel * dtype.itemsize for numel in numels.values()]
            for count in pieces_of(sizes) if pinned else [len(sizes)]:
                members = list(itertools.islice(names, count))
                lengths = [numels[name] for name in members]
                # Not zeroed: on the CPU, pages are then taken as shards are filled, while originals give theirs back.
                make = functools.partial(torch.empty, pin_memory=pinned) if self.has_memory else compat.without_memory
                self.buffers.append(make((sum(lengths),), dtype=dtype, device=device))
                parts.update(zip(members, self.buffers[-1].split(lengths), strict=True))
        return parts

    def _make_shard(self, p: ParameterSpec, original: nn.Parameter, local: Tensor) -> nn.Parameter:
        value = local
        if self.mesh is not None:
            dim = None if p.replicated else p.shard_dim
            stride = torch.empty(original.shape, device="meta").stride()
            own = self.mesh.of_parameter(p.name)
            if isinstance(original, DTensor):
                mesh, placements = shard_spec(original, own, dim)
            else:
                mesh, placements = own.mesh, own.placements(dim)
            # Without the tensor itself, which ``from_local`` would move to the mesh's device.
            shape, meta = original.shape, local.to("meta")
            like = DTensor.from_local(meta, mesh, placements, run_check=False, shape=shape, stride=stride)
            value = compat.make_dtensor(local, like)
        shard = nn.Parameter(value, requires_grad=original.requires_grad)
        shard.__dict__.update({k: v for k, v in original.__dict__.items() if not k.startswith("_")})
        return shard

    def fill(self, p: ShardedParameter, full: Tensor) -> None:
        p.local.detach().copy_(self._own_part(p, compat.local_part(full)))
        p.filled = True

    def plain_copy(self, p: ShardedParameter) -> nn.Parameter:
        value = (compat.emptied if self.has_memory else compat.without_memory)(p.spec.shape, p.spec.dtype, self.device)
        if isinstance(p.placeholder, DTensor):
            value = compat.make_dtensor(value, p.placeholder)
        return nn.Parameter(value, p.shard.requires_grad)

    @torch.no_grad()
    def fill_from(self, other: Shards) -> None:
        for name, p in self.parameters.items():
            p.local.copy_(compat.local_part(other.parameters[name].shard))
            p.filled = True

    def _own_part(self, p: ShardedParameter, full: Tensor) -> Tensor:
        """Return a view of what this rank holds of a whole parameter."""
        source, dim = full.detach(), p.spec.shard_dim
        if p.spec.replicated:
            return source
        begin = min(self.ranks[p.spec.name] * p.spec.chunk_rows, p.spec.rows)
        return source.narrow(dim, begin, p.local.shape[dim])

    def shard_of(self, p: ShardedParameter, full: Tensor) -> DTensor:
        """Return a copy of this rank's part of a whole parameter, as a DTensor like its shard: where shards are, or, of
        a model that was moved away, where it runs if ``full`` is there."""
        device = self._home if self.is_away and full.device.type == self._home.type else p.local.device
        return compat.make_dtensor(self._own_part(p, full).to(device).contiguous().clone(), p.shard)

    @collector_paused()
    def install(self, model: nn.Module, fullgraph: bool) -> None:
        self.unguarded_in_forward = fullgraph
        self.installed.add(self)
        for p in self.parameters.values():
            if self.has_memory and not p.filled:
                self.fill(p, p.placeholder)
            p.register(p.shard)
            self._empty_placeholder(p)
            vars(p.placeholder)["_graph_fsdp"] = (p.spec.name, self)
            set_guarded([p.placeholder], True)
        for tensor, value in self._whole:
            if tensor.device == value.device and can_be_written(tensor):
                compat.local_part(tensor).detach().copy_(value)
            else:
                set_memory(tensor, value)
        self._whole.clear()
        self.by_original.clear()

    def _empty_placeholder(self, p: ShardedParameter) -> None:
        make = compat.emptied if self.has_memory else compat.without_memory
        shape, dtype = p.spec.shape, p.spec.param_dtype
        if p.used_like is not None:
            shape, dtype = tuple(p.used_like.shape), p.used_like.dtype
        set_memory(p.placeholder, make(shape, dtype, self.device))

    def after_apply(self) -> None:
        with contextlib.suppress(ParameterChangedError):  # the next forward says so
            self._take_replacements()
        memories = [compat.local_part(p.shard) for p in self.parameters.values()]
        homes = [p.local.device for p in self.parameters.values()]
        moved = all(m.device != home and not m.is_meta for m, home in zip(memories, homes, strict=True))
        if moved and memories and self.has_memory and not self.keeps_buffers:
            self._leave_buffers()

    def _leave_buffers(self) -> None:
        """Give the buffers back: shards have memory of their own, until the next forward takes new buffers."""
        for p in self.parameters.values():
            memory = compat.local_part(p.shard)
            p.local, p.input, p.seen = memory, memory, _parts(p.shard)
        self._forget_buffers(True)

    def take_spec(self, spec: ModelSpec) -> None:
        """Hold the same parameters in other dtypes, which their shards have already."""
        self.spec = spec
        for name, p in self.parameters.items():
            p.spec = spec.parameters[name]
            with unguarded([p.placeholder]):
                self._empty_placeholder(p)
        self._leave_buffers()

    def _take_replacements(self) -> None:
        """Take what stands in modules now for the shards: ``load_state_dict(assign=True)`` exchanges them."""
        for p in self.parameters.values():
            if p.whole is None:
                take_replacement(p)

    @property
    def _home(self) -> torch.device:
        return self.device if self.spec.offload is None else HOST

    def _forget_buffers(self, is_away: bool) -> None:
        self.buffers, self._look, self.is_away = [], None, is_away
        for holder in self.holders:
            holder.forget_buffers()

    def _come_back(self) -> None:
        """Take new buffers for shards whose memory was given back. Raises ParameterChangedError where they still are on
        another device."""
        self._take_replacements()
        home = self._home
        there = {m.device for m in map(compat.local_part, (p.shard for p in self.parameters.values()))}
        if {device.type for device in there} != {home.type}:
            raise ParameterChangedError(
                f"the model was moved to {', '.join(sorted(map(str, there)))} and runs on {home}: move it back before "
                f"it is called, with model.to({str(home)!r})"
            )
        self._forget_buffers(False)
        with torch.inference_mode(False):  # where an evaluation comes first
            memory = self._allocate_shards()
        for name, (local, stored) in memory.items():
            self.parameters[name].local, self.parameters[name].input = local, stored

    def refresh(self) -> None:
        if self.is_away:
            self._come_back()
        for p in self._tied:
            check_tied(p)
        with compat.without_torch_function():
            if self._look is not None and self._look.finds_no_change():
                return
            parameters, self._look = list(self.parameters.values()), None
            assigned = [repr(p.spec.name) for p in parameters if self._take_over(p)]
            # What lies elsewhere is copied here before each forward.
            self._look = None if any(map(_memory_elsewhere, parameters)) else _Look(parameters)
        if assigned:
            raise ParameterChangedError(
                f".data of parameter {', '.join(assigned)} was assigned, which does not change values of a DTensor: "
                "they are what they were. Write to the parameter in torch.no_grad() (parameter.copy_ of a DTensor, "
                "parameter.to_local().copy_ of this rank's rows), use load_state_dict, or write in a block of "
                "graph_fsdp.unsharded(model)"
            )

    def set_whole(self, p: ShardedParameter, whole: nn.Parameter | None) -> None:
        super().set_whole(p, whole)
        self._look = None  # which would hold the whole parameter

    def _take_over(self, p: ShardedParameter) -> bool:
        """Take over changes of one parameter; say whether ``data`` was assigned ([Note: data of a DTensor])."""
        if p.whole is not None:
            p.whole = registered = p.in_modules
            if registered is not None and registered.requires_grad != p.shard.requires_grad:
                p.shard.requires_grad_(registered.requires_grad)
        else:
            take_replacement(p)
        (memory, storage), (known, known_storage) = _parts(p.shard), p.seen
        # What ``model.to(…)`` does exchanges the local tensor too.
        assigned = self.mesh is not None and memory is known and storage is not known_storage
        if assigned:
            p.shard.data = compat.make_dtensor(memory, p.shard)
        if _memory_elsewhere(p):
            self._adopt(p, memory)
        if memory is not known or storage is not known_storage:
            p.seen = _parts(p.shard)
        if p.placeholder.requires_grad != p.shard.requires_grad:
            p.placeholder.requires_grad_(p.shard.requires_grad)
        return assigned

    def _adopt(self, p: ShardedParameter, memory: Tensor) -> None:
        if memory.data_ptr() == p.local.data_ptr():  # its storage was moved, to be shared with other processes
            with torch.no_grad():
                p.spec.as_used(p.input)[tuple(map(slice, memory.shape))].copy_(memory)
            return
        if (found := described(memory)) != (expected := described(p.local)):
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} was {expected} per rank and is {found} now; cast all of the model "
                "(model.to(dtype)), or move and cast it before graph_fsdp.compile; mp_policy has what it computes in"
            )
        with torch.no_grad():
            p.local.copy_(memory)
        if self.mesh is None:
            p.shard.data = p.local
        else:
            compat.set_local_tensor(p.shard, p.local)

    def inputs(self) -> dict[str, Tensor]:
        shards = connected_shards(list(self.parameters.values()))
        return dict(zip(self.parameters, shards, strict=True))


class _Look:
    """Holds all that is looked at in each forward, for each parameter, as it was. One call looks at all of them."""

    def __init__(self, parameters: Sequence[ShardedParameter]) -> None:
        self.modules = [p.owners[0][0] for p in parameters]
        self.leaves = [p.owners[0][1] for p in parameters]
        self.registered, self.shards = [p.registered for p in parameters], [p.shard for p in parameters]
        self.memories = compat.local_parts(self.shards)
        self.storages = list(map(Tensor.untyped_storage, self.shards))
        self.addresses = list(map(Tensor.data_ptr, self.memories))
        unsharded = [p.shard for p in parameters if p.whole is not None]
        self.flagged = [*self.registered, *unsharded, *(p.placeholder for p in parameters)]
        self.flags = list(map(_FLAG, self.flagged))

    def finds_no_change(self) -> bool:
        registered = map(dict.get, map(_PARAMETERS, self.modules), self.leaves)
        return (
            all(map(operator.is_, registered, self.registered))
            and all(map(operator.is_, compat.local_parts(self.shards), self.memories))
            and all(map(operator.is_, map(Tensor.untyped_storage, self.shards), self.storages))
            and list(map(Tensor.data_ptr, self.memories)) == self.addresses
            and list(map(_FLAG, self.flagged)) == self.flags
        )


_PARAMETERS, _FLAG = operator.attrgetter("_parameters"), operator.attrgetter("requires_grad")


def _memory_elsewhere(p: ShardedParameter) -> bool:
    """Say whether a shard lies in other memory than is gathered: it was exchanged, or moved to be shared."""
    memory = compat.local_part(p.shard)
    return memory.data_ptr() != p.input.data_ptr() and memory.numel() > 0


def _parts(shard: nn.Parameter) -> tuple[Tensor, torch.UntypedStorage]:
    return compat.local_part(shard), shard.untyped_storage()


def check_tied(p: ShardedParameter) -> None:
    """Check that a parameter of several names is registered under all of them, or equal ones (``load_state_dict`` with
    ``assign=True`` registers one for each name)."""
    first, *others = (module._parameters.get(leaf) for module, leaf in p.owners)
    for (module, leaf), found in zip(p.owners[1:], others, strict=True):
        if found is not first and not _are_equal(first, found):
            raise ParameterChangedError(
                f"parameter {p.spec.name!r} is tied to {leaf!r} of a {type(module).__name__}, where another parameter "
                "stands now: untie parameters before graph_fsdp.compile, and write values to the parameter that is "
                "there"
            )


def _are_equal(first: Any, second: Any) -> bool:
    if type(first) is not type(second) or first is None:
        return False
    one, other = compat.local_part(first.detach()), compat.local_part(second.detach())
    return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one, other)


def _layout(spec: ModelSpec) -> dict[torch.dtype, dict[str, int]]:
    """Return, by dtype, the elements that each parameter takes with its padding, in the order in which they lie behind
    one another: that of buckets."""
    found: dict[torch.dtype, dict[str, int]] = {}
    for p in itertools.chain(*(bucket.parameters for bucket in spec.buckets), spec.parameters.values()):
        if p.name not in spec.payloads:
            found.setdefault(p.dtype, {})[p.name] = aligned(p.shard_numel, p.dtype)
    return found


def set_memory(tensor: Tensor, value: Tensor) -> None:
    """Give ``tensor`` the memory of ``value``, wherever the model refers to it."""
    if isinstance(tensor, DTensor):
        give_memory(tensor, value)
    elif not compat.can_be_data(tensor, value):
        compat.swap(tensor, value.requires_grad_(tensor.requires_grad))
    else:
        tensor.data = value


def described(value: Tensor) -> str:
    """Return a description such as ``"float32[4, 8] on cpu"``."""
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} on {value.device}"
