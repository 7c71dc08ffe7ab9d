"""Parameters are whole outside of a forward by ``unshard()``, ``reshard()``, and :func:`unsharded`.

[Note: how long a unit stays whole]
- What ``unshard()`` gathered, in the dtype that the forward computes in: until ``reshard()``, or the end of the next
  backward of the model, whatever FSDP2's ``reshard_after_forward`` says.
- A unit with ``set_reshard_after_backward(False)``: from its next forward with gradients on, over backwards.
- A unit with ``set_reshard_after_forward(False)``: from its next forward without gradients, to the end of a backward.
- A unit that an optimizer gathers ahead: from its step, or the next forward with gradients on, to the end of that
  forward. What backward reads of it is saved for it, as activations are. A forward gives it back first where a shard
  has changed in between, or gradients are off.
- What :func:`unsharded` gathered, in the dtype of the shards: to the end of its block.

While a unit is whole, its modules hold plain parameters (of tensor-parallel ones, DTensors over these ranks), which the
model's graphs take; optimizers still hold the shards. A shard that changes, after its gather began, makes the whole
parameter stale, an error at the next forward. Changes are what torch counts (``compat.writes_to``), and steps
(``count_writes``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import UnshardHandle

from graph_fsdp import compat
from graph_fsdp.engine.ranks import Schedules
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.parameters.gradients import at_the_end
from graph_fsdp.parameters.sharded import ShardedParameter, Shards
from graph_fsdp.passes.ir.layout import GatherLayout
from graph_fsdp.passes.ir.settings import Settings, check_flags
from graph_fsdp.passes.ir.spec import BucketSpec
from graph_fsdp.runtime import GatheredBytes
from graph_fsdp.runtime.comm.collectives import Comm, Comms, Pending, start_all_gather

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class UnshardedUnits:
    """Holds which units of a model are whole, and their parameters. ``schedules`` keeps the ranks in step; ``comms``
    has the user's own gather, by which parameters come as the forward computes with them."""

    def __init__(self, storage: Shards, counter: GatheredBytes, schedules: Schedules, comms: Comms) -> None:
        self.storage, self.counter, self._schedules, self._comms = storage, counter, schedules, comms
        self.members: dict[str, list[ShardedParameter]] = {}
        for p in storage.parameters.values():
            self.members.setdefault(p.spec.unit, []).append(p)
        self.units: frozenset[str] = frozenset()
        self.refused = ""  # why, where another engine than this one's runs the model
        self.optional = False  # unshard() does nothing where units cannot be whole: the model is a pipeline's stage
        self.held: set[str] = set()  # by ``unsharded``, to the end of its block
        self.whole_after_backward: frozenset[str] = frozenset()
        self._for_forward: set[str] = set()  # what only an optimizer gathers, ahead of the next forward
        # Under way, by unit: buckets with the parameters of the unit in them, and whether in the type of the shards.
        self._gathering: dict[str, tuple[list[tuple[Pending, BucketSpec, list[ShardedParameter]]], bool]] = {}
        # The shard, and the writes to it when a gather began.
        self._versions: dict[str, tuple[nn.Parameter, tuple[int, int]]] = {}

    @property
    def sharded(self) -> frozenset[str]:
        """Return the units of which a forward gathers something."""
        gathered = {unit for unit, ps in self.members.items() if any(p.spec.world_size > 1 for p in ps)}
        return frozenset(gathered - self.units)

    def unavailable(self) -> str:
        """Return why units of this model cannot be whole; "" where they can."""
        parameters, offload = self.storage.parameters.values(), self.storage.spec.offload
        if self.refused:
            return self.refused
        if any(p.spec.extended for p in parameters):
            return "parameters of it have tensor extensions"
        if any(p.used_like is not None for p in parameters):
            return "parameters of it are quantized"
        if any(p.spec.shard_dim for p in parameters):
            return "shard_placement_fn shards parameters of it on another dimension than the first"
        if offload is not None and offload.device.type != "cpu":
            return "its shards are on the CPU (offload_policy)"
        return ""

    def check_available(self, what: str, instead: str = "leave the call out, as forwards gather by themselves") -> None:
        if reason := self.unavailable():
            raise UnsupportedError(f"{what} is not available on this model: {reason}; {instead}")

    # --- gathering

    def start(self, unit: str, *, full_precision: bool = False, for_forward: bool = False) -> None:
        """Start gathering a unit; do nothing where it is whole, or about to be."""
        self.check_available("unshard()")
        if self.storage.active:
            raise RuntimeError("unshard() was called while the model's forward runs; call it before")
        if not for_forward:
            self._for_forward.discard(unit)
        if unit in self.units or unit in self._gathering or unit not in self.members:
            return
        if for_forward:
            self._for_forward.add(unit)
        self.storage.refresh()
        spec = self.storage.spec
        gathered = [bucket for bucket in spec.buckets if bucket.world_size > 1]
        found = {b: [p for p in self.members[unit] if p.spec.name in b.offsets] for b in gathered}
        members = {b: ps for b, ps in found.items() if ps}
        dtypes = {b: b.parameters[0].dtype if full_precision else b.parameters[0].param_dtype for b in members}
        comm = None if full_precision else self._comms.all_gather
        if members:
            by = "" if comm is None else " by set_custom_all_gather"
            gathers = [f"gather {b.name} of {b.shard_numel} elements in {dtypes[b]}{by}" for b in members]
            self._schedules.begin("unshard()", f"of unit {unit or 'root'!r}", gathers)
        with torch.inference_mode(False), torch.no_grad():
            buckets = [(self._start_bucket(b, ps, dtypes[b], comm), b, ps) for b, ps in members.items()]
        self.note_versions(unit)
        self._gathering[unit] = buckets, full_precision

    def _start_bucket(
        self, bucket: BucketSpec, members: list[ShardedParameter], dtype: torch.dtype, comm: Comm | None
    ) -> Pending:
        offsets = [bucket.offsets[p.spec.name] for p in members]
        numels = [p.spec.shard_numel for p in members]
        messages = bucket.message_arguments() if comm is None else []
        layout = GatherLayout.make(offsets, numels, bucket.shard_numel, bucket.world_size, messages)
        group = compat.resolve_group(bucket.mesh.group)
        self.counter.count("all_gather")
        pending = start_all_gather([p.input for p in members], layout, dtype, group, comm=comm)
        self.counter.hold(pending.buffer)
        return pending

    def finish(self, unit: str) -> None:
        """Wait for the gathers of a unit, and put the whole parameters into its modules."""
        if unit not in self._gathering:
            return
        if any(p.in_modules is not p.registered for p in self.members[unit]):
            self.storage.refresh()  # takes what was put into the modules meanwhile for the shard
        buckets, full_precision = self._gathering.pop(unit)
        with torch.inference_mode(False), torch.no_grad():
            whole: dict[str, Tensor] = {}
            for pending, bucket, members in buckets:
                self._schedules.wait(pending)
                for p in members:
                    begin, rows = bucket.offsets[p.spec.name] * bucket.world_size, p.spec.chunk_rows * bucket.world_size
                    padded = pending.buffer[begin : begin + p.spec.shard_numel * bucket.world_size]
                    whole[p.spec.name] = padded.view(rows, *p.spec.shape[1:])[: p.spec.rows]
            for p in self.members[unit]:
                if p.spec.name not in whole:  # on all ranks alike: a scalar, an empty parameter, or nothing is sharded
                    dtype = p.spec.dtype if full_precision else p.spec.param_dtype
                    whole[p.spec.name] = p.local.detach().to(dtype, copy=True).reshape(p.spec.shape)
            self.put(unit, whole)

    def put(self, unit: str, whole: Mapping[str, Tensor]) -> None:
        """Put whole values into the modules of a unit, all or none; ``whole``: parameter → its value."""
        self.units |= {unit}
        try:
            for p in self.members[unit]:
                # ``data``: parameters of one buffer do not share the counter of writes to them.
                value = whole[p.spec.name].data
                if p.as_used is not None:
                    value = p.as_used(value)
                parameter = nn.Parameter(value, requires_grad=p.shard.requires_grad)
                parameter.__dict__.update({k: v for k, v in p.shard.__dict__.items() if not k.startswith("_")})
                vars(parameter)["_graph_fsdp_whole"] = p.spec.name  # for refusals.py
                self.storage.set_whole(p, parameter)
        except BaseException:
            self.reshard(unit)
            raise

    def before_forward(self, settings: Settings, ahead: frozenset[str]) -> None:
        """Gather what is to be whole in this forward, and check that nothing whole is stale. ``ahead``: units that an
        optimizer's step gathers for it."""
        training = torch.is_grad_enabled()
        kept = {unit for unit, gathered_again in settings.reshard_after_forward if not gathered_again}
        wanted, ahead = (self.whole_after_backward, ahead) if training else (kept, frozenset[str]())
        for unit in (unit for unit in self.members if unit in self._for_forward):
            if unit not in ahead or self._changed(unit):
                self.reshard(unit)
        if wanted | ahead and (training or not self.unavailable()):  # else evaluations gather as they go
            for unit in (unit for unit in self.members if unit in wanted | ahead):
                self.start(unit, for_forward=unit not in wanted)
        for unit in list(self._gathering):
            self.finish(unit)
        for unit in (unit for unit in self.members if unit in self.units):
            self.check_fresh(unit)

    def after_forward(self) -> None:
        """Give back what was gathered for this forward alone."""
        for unit in (unit for unit in self.members if unit in self._for_forward):
            self.reshard(unit)

    def after_backward(self) -> None:
        """Reshard the units that the end of a backward reshards."""
        for unit in sorted(self.units - self.held - self.whole_after_backward):
            self.reshard(unit)

    def note_versions(self, unit: str) -> None:
        """Take what the shards of a unit hold now for what is gathered."""
        for p in self.members[unit]:
            self._versions[p.spec.name] = p.shard, compat.writes_to(p.shard)

    def _changed(self, unit: str) -> ShardedParameter | None:
        """Return a parameter of a unit, whole or about to be, whose shard changed after its gather began."""
        if unit not in self.units and unit not in self._gathering:
            return None
        for p in self.members[unit]:
            shard, writes = self._versions[p.spec.name]
            is_replaced = p.in_modules is not p.registered and unit in self._gathering
            if is_replaced or p.shard is not shard or compat.writes_to(p.shard) != writes:
                return p
        return None

    def check_fresh(self, unit: str) -> None:
        if (p := self._changed(unit)) is not None:
            raise ParameterChangedError(
                f"the shard of parameter {p.spec.name!r} changed (an optimizer's step, a loaded checkpoint) after "
                f"its unit {unit or 'root'!r} was unsharded, and the whole parameter is out of date; "
                "call reshard() before (as set_reshard_after_backward(True) does at the end of a backward)"
            )

    # --- giving back

    def reshard(self, unit: str) -> None:
        """Put the shards into the unit's modules again. What was written to whole parameters is lost."""
        self.finish(unit)
        self._for_forward.discard(unit)
        if unit not in self.units:
            return
        try:
            self._put_shards(unit)
        except BaseException:  # [Note: Ctrl-C] in sharded.py
            self._put_shards(unit)
            raise

    def _put_shards(self, unit: str) -> None:
        for p in self.members[unit]:
            whole = p.whole  # None where it was removed from its module, or this was interrupted
            if whole is not None and whole.grad is not None:
                warnings.warn(
                    f"the gradient of parameter {p.spec.name!r} is lost: it was computed while the parameter was "
                    "whole, by a module that was called outside of the model's forward",
                    stacklevel=3,
                )
            if whole is not None and whole.requires_grad != p.shard.requires_grad:
                p.shard.requires_grad_(whole.requires_grad)
            self.storage.set_whole(p, None)
        self.units -= {unit}

    def release(self) -> None:
        """Reshard what no block of :func:`unsharded` holds."""
        for unit in self.members:
            if unit not in self.held:
                self.reshard(unit)

    @torch.no_grad()
    def write_back(self, unit: str) -> None:
        """Copy this rank's part of the whole parameters into its shards."""
        for p in self.members[unit]:
            self.storage.fill(p, self.storage.checked_whole(p))

    # --- in a forward

    def watched(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the graph's inputs, with what the end of the model's backward does to units that are whole."""

        def ended(_: list[str], grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
            self.after_backward()
            return grads

        return at_the_end(inputs, ended) if self.units else inputs

    def feeding(self, program: Any, names: list[str]) -> Callable[[list[Any]], Any]:
        """Return ``program``, run with the whole parameters of these names behind its other inputs."""
        parameters = [self.storage.parameters[name] for name in names]

        def run(args: list[Any]) -> Any:
            args.extend(map(self._value, parameters))
            return program(args)

        return run

    def _value(self, p: ShardedParameter) -> Tensor:
        value = compat.local_part(self.storage.checked_whole(p)).detach()
        return (value if value.dtype is p.spec.param_dtype else value.to(p.spec.param_dtype)).contiguous()


class Handle(UnshardHandle):
    """``unshard(async_op=True)`` returns this handle. The next forward waits by itself."""

    def __init__(self, units: UnshardedUnits, unit: str) -> None:
        self._units, self._unit = units, unit

    def __repr__(self) -> str:
        found = "whole" if self._unit in self._units.units else "sharded"
        state = "being gathered" if self._unit in self._units._gathering else found
        return f"<Handle of unit {self._unit or 'root'!r}: {state}>"

    def wait(self) -> None:
        self._units.finish(self._unit)


@contextlib.contextmanager
def unsharded(module: nn.Module, *, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
    """Make the parameters of a compiled model whole for a block: plain tensors in the dtype of the shards, or DTensors
    over the tensor-parallel ranks alone.

    All ranks enter it together. In it, ``state_dict()`` is that of the plain model, submodules can be called, and the
    model's forward gathers nothing: with gradients off, a rank may run it alone (``model.generate()`` needs no rank to
    wait for another). It is FSDP1's ``summon_full_params``.

    Args:
        module: a compiled model, one of its units, or a module that holds such.
        recurse: also the units below ``module``; False: those parameters only that ``module``'s own unit holds.
        writeback: keep what the block writes to parameters. Ranks must write the same. When the block raises, nothing
            is kept.

    Raises:
        TypeError: ``module`` is no unit of a compiled model and holds none, or a flag is neither True nor False.
        ParameterChangedError: shards changed in the block (an optimizer's step): writing back would undo that; or what
            was put in the place of a parameter has another shape or device.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    check_flags(recurse=recurse, writeback=writeback)
    found = [(engine.unsharded, unit) for engine, unit in places(module, recurse)]
    if not found:
        raise TypeError(
            f"module: {type(module).__name__} is no unit of a model compiled by graph_fsdp and holds none; pass the "
            "model or one of its units"
        )
    for units, _ in found:
        units.check_available("graph_fsdp.unsharded", "graph_fsdp.export reads whole tensors but quantized ones")
    entered = [(units, unit) for units, unit in found if unit in units.members and unit not in units.held]
    for units, unit in entered:
        units.reshard(unit)
    try:
        for units, unit in entered:
            units.held.add(unit)
            units.start(unit, full_precision=True)
        for units, unit in entered:
            units.finish(unit)
        yield
        for storage in dict.fromkeys(units.storage for units, _ in entered if writeback):
            storage.refresh()  # takes what was put into the modules (``load_state_dict(assign=True)``) for whole ones
        for units, unit in entered if writeback else ():
            units.check_fresh(unit)
        for units, unit in entered if writeback else ():
            units.write_back(unit)
    finally:
        try:
            _leave(entered)
        except BaseException:  # [Note: Ctrl-C] in sharded.py
            _leave(entered)
            raise


def _leave(entered: Sequence[tuple[UnshardedUnits, str]]) -> None:
    for units, unit in entered:
        units.held.discard(unit)
        units.reshard(unit)


def places(module: Any, recurse: bool) -> list[tuple[Engine, str]]:
    """Return the engine and the unit of ``module``, and, with ``recurse``, of the modules below it that have one."""
    modules = module.modules() if recurse else [module]
    found = [vars(m) for m in modules if "_graph_fsdp" in vars(m)]
    return [(place["_graph_fsdp"], place["_graph_fsdp_unit"]) for place in found]
