"""Parameters that code outside of graphs reads are gathered for it, unit by unit.

[Note: code outside of graphs]
With ``fullgraph=False`` Dynamo leaves to Python what it cannot trace. The first operator of such code that reads a
placeholder has the parameter's unit gathered, and the placeholder gets the whole parameter's memory, in place: whatever
holds the parameter already, an ``autograd.Function`` or a list, has its values too.

The gather is a graph as any other, from a unit's shards to its parameters: all options act on it, the verifier checks
it, ranks run it in step, and the report has it. To autograd a placeholder is a leaf, whose whole gradient goes through
the backward of the gather's graph, the reduction, when the model's backward has ended. Of a tensor-parallel one, a
DTensor, it is this rank's part that is gathered, exchanged and reduced.

A unit stays whole to the end of the backward, since autograd has saved what it will read; without gradients, until
another unit is read or the forward ends. A later backward has the unit gathered again. See docs/decisions/pieces.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.engine.dynamo import Entry
from graph_fsdp.engine.recompilation import CaptureKey, Cause
from graph_fsdp.errors import ParameterChangedError, UnsupportedError
from graph_fsdp.parameters.gradients import connected_shards
from graph_fsdp.parameters.inputs import tensors_of
from graph_fsdp.parameters.placeholder import calling_line, guard_beside_nested_tensors, unguarded
from graph_fsdp.parameters.sharded import ShardedParameter
from graph_fsdp.parameters.shards import set_memory
from graph_fsdp.passes.ir.settings import Settings

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine

READ_BY_PYTHON = "read outside of graphs"


class PythonReads:
    """Holds the units of one model that are whole for code outside of graphs."""

    def __init__(self, engine: Engine, fullgraph: bool) -> None:
        self._engine = engine  # a weak proxy
        # Unit, in the order of gathers → whole parameters, connected to the shards, and the placeholders' data before.
        self._whole: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
        # Of the last forward: whether it has a backward, and the units that it read with the writes to their shards.
        self._grad = False
        self._units: dict[str, list[tuple[int, int]]] = {}
        self._programs: dict[tuple[Settings, str, bool, tuple[bool, ...]], Callable[..., Any]] = {}
        self._leaves: dict[str, Any] = {}  # autograd's nodes of placeholders, which live as long as someone has them
        self.versions: dict[str, int] = {}  # of the placeholders that were whole, as they were found
        self._watches = not fullgraph and engine.backend.name != "xla"
        if self._watches:
            guard_beside_nested_tensors()
        self._awaited = -1  # the backward whose end is awaited, by number
        # While a backward computes something again: whether that has had gradients, in a backward of its own.
        self._inner: bool | None = None

    # --- from outside

    def refusal(self, names: Sequence[str]) -> str:
        """Give parameters that code outside of graphs reads memory, and return ""; or say why it cannot be."""
        if not self._watches:
            return "that is for fullgraph=False, and not for backend='xla'"
        for name in dict.fromkeys(names):
            unit = self._engine.storage.parameters[name].spec.unit
            if unit in self._whole:
                continue
            if any(p.spec.extended for p in self._members[unit]):
                return "parameters of the unit have tensor extensions"
            if any(p.used_like is not None for p in self._members[unit]):
                return "parameters of the unit are quantized"
            if not self._engine.storage.active and unit not in self._units:
                self._units[unit] = self._writes(unit)
            self._gather(unit, name)
        return ""

    @contextlib.contextmanager
    def forward_call(self) -> Iterator[None]:
        """Release at the end of a call what only it needs, whatever happens in it."""
        self.release()
        self._grad, self._units = torch.is_grad_enabled(), {}
        if self._watches:
            self._watch()
        keep = False
        again = compat.checkpointed_functions(self._again) if self._watches and self._grad else contextlib.nullcontext()
        try:
            with again:
                yield
            self._check_unwritten()
            keep = self._grad
        finally:
            if not keep:
                self.release()

    def before_backward(self, inputs: Any, outputs: Any) -> Callable[[Any], None] | None:
        """Return what is to be called before the backward of a call that has just run, from ``inputs`` to ``outputs``;
        None where nothing may break. What Python computes in it, it does with placeholders as in forward."""
        units = self._units
        if not self._watches or not self._grad:
            return None
        compat.around_backwards_of_python(tensors_of(outputs), tensors_of(inputs), self._again)

        def gather_again(_: Any) -> None:
            for unit, writes in units.items():
                if self._writes(unit) != writes:
                    raise ParameterChangedError(
                        f"the shards of unit {unit or 'root'!r} changed (an optimizer's step) between a forward and "
                        "its backward, which reads parameters in code outside of graphs; run backward before"
                    )
                if unit not in self._whole:
                    self._gather(unit, "")

        return gather_again

    def release(self, *, but: str | None = None) -> None:
        """Take the memory of placeholders away again, but for those of unit ``but``."""
        for unit in [unit for unit in self._whole if unit != but]:
            _, before = self._whole.pop(unit)
            with compat.without_torch_function():
                for p, empty in zip(self._members[unit], before, strict=True):
                    set_memory(p.placeholder, empty)
                    # An operator that autograd has saved the parameter for must find that it is gone.
                    compat.set_version(p.placeholder, self.versions[p.spec.name] + 1)

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes in backward, with placeholders as in forward."""
        engine = self._engine

        def computed(*args: Any, **kwargs: Any) -> Any:
            if compat.current_backward() == -1 or engine.storage.active:
                return function(*args, **kwargs)
            self._inner = False
            try:
                with engine.storage.placeholders_registered(), engine.entered():
                    found = function(*args, **kwargs)
            finally:
                inner, self._inner = self._inner, None
            if inner or self._whole:
                self._arrived()
            return found

        return computed

    def gets_gradient(self, name: str) -> bool:
        """Say whether the backward under way has a gradient for what code outside of graphs read of a parameter."""
        return name in self._leaves and compat.current_backward() != -1 and compat.is_run(self._leaves[name])

    # --- gathering

    @property
    def _members(self) -> dict[str, list[ShardedParameter]]:
        return self._engine.unsharded.members

    def _writes(self, unit: str) -> list[tuple[int, int]]:
        return [compat.writes_to(p.shard) for p in self._members[unit]]

    def _gather(self, unit: str, read: str) -> None:
        if self._engine.storage.active and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            if not self._grad:  # ``torch.enable_grad()`` in a call under ``torch.no_grad()``
                self.release()
            self._grad = True
        grad = self._grad or not self._engine.storage.active
        if not grad and unit:  # the root unit is read before and after others
            self.release(but="")
        members = self._members[unit]
        trains = tuple(grad and p.shard.requires_grad for p in members)
        # A checkpoint that reads the unit compares what it has saved with what it saves again, when the unit is whole.
        hooks = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
        with torch.inference_mode(False), torch.set_grad_enabled(grad), hooks, compat.without_torch_function():
            shards = connected_shards(members)
            values = self._program(unit, members, trains, read)(*shards)
            empty = [compat.local_part(p.placeholder).detach() for p in members]
            for p, value in zip(members, values, strict=True):
                whole = value.detach()
                if isinstance(p.placeholder, DTensor):  # of which torch makes no fake one if its part shares a storage
                    whole = compat.with_storage_of_its_own(whole)
                set_memory(p.placeholder, whole)
                compat.set_version(p.placeholder, self.versions.setdefault(p.spec.name, p.placeholder._version))
        self._whole[unit] = list(values), empty
        if self._engine.storage.active:
            self._units[unit] = self._writes(unit)

    def _program(
        self, unit: str, members: list[ShardedParameter], trains: tuple[bool, ...], read: str
    ) -> Callable[..., Any]:
        """Return a program from a unit's shards to its whole parameters."""
        engine = self._engine
        settings, grad = dataclasses.replace(engine.settings, unsharded=engine.unsharded.units), torch.is_grad_enabled()
        key = (settings, unit, grad, trains)
        if key not in self._programs:
            cost = _cost(unit, members, read)
            if not self._programs:
                warnings.warn(
                    f"{cost} (read at {calling_line()}); other units likewise, and the report names them "
                    "(graph_fsdp.inspect). fullgraph=True tells where graphs break",
                    stacklevel=2,
                )
            entry = Entry(unit, READ_BY_PYTHON, lambda *_: None)
            mode = compat.FakeTensorMode(shape_env=compat.ShapeEnv(), allow_non_fake_inputs=True)
            with compat.tracing_in(mode):
                module = _whole_parameters(members, mode)
                cause = Cause("python", cost)
                parts = [dataclasses.replace(p, as_used=None) if p.as_used is not None else p for p in members]
                by_place = dict(enumerate(parts))
                inputs: list[Any] = [None] * len(members)
                self._programs[key] = engine._compile_with(CaptureKey(settings, entry), cause, module, inputs, by_place)
        return self._programs[key]

    # --- gradients

    def _watch(self) -> None:
        """Watch for gradients of placeholders, and restore the versions under which autograd has saved them."""
        parameters = self._engine.storage.parameters
        with compat.without_torch_function():
            for name, version in self.versions.items():
                compat.set_version(parameters[name].placeholder, version)
            for name, p in parameters.items() if not torch.is_inference_mode_enabled() else ():
                if p.placeholder.grad is not None:  # of a backward that raised
                    p.placeholder.grad = None
                if p.placeholder.requires_grad and name not in self._leaves:
                    with unguarded([p.placeholder]):
                        self._leaves[name] = node = torch.autograd.graph.get_gradient_edge(p.placeholder).node
                    node.register_hook(self._arrived)

    def _arrived(self, *_: Any) -> None:
        if self._inner is not None:  # of a backward of what is computed again, which another may follow
            self._inner = True
        elif self._awaited != (backward := compat.current_backward()):  # one that raised has no end
            self._awaited = backward
            compat.when_backward_ends(self._reduce)

    def _reduce(self) -> None:
        """Send the whole gradients that have arrived to the shards."""
        self._awaited = -1
        with compat.without_torch_function():
            parameters = self._engine.storage.parameters.values()
            for unit in dict.fromkeys(p.spec.unit for p in parameters if p.placeholder.grad is not None):
                if unit not in self._whole:  # autograd had all that it needed without the placeholders
                    self._gather(unit, "")
                values, _ = self._whole[unit]
                pairs: list[tuple[Tensor, Tensor]] = []
                for p, value in zip(self._members[unit], values, strict=True):
                    grad, p.placeholder.grad = p.placeholder.grad, None
                    if isinstance(grad, DTensor) and isinstance(p.placeholder, DTensor):
                        grad = grad.redistribute(placements=p.placeholder.placements).to_local()
                    pairs += [(value, grad)] if grad is not None and value.requires_grad else []
                torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        if not self._engine.storage.active:
            self.release()
            self._engine.unsharded.after_backward()  # where no graph of the forward had parameters

    def _check_unwritten(self) -> None:
        for unit in self._whole:
            for p in self._members[unit]:
                with compat.without_torch_function():
                    written = p.placeholder._version != self.versions[p.spec.name]
                if written:
                    raise UnsupportedError(
                        f"parameter {p.spec.name!r} was written by code outside of graphs in the model's forward, "
                        "where it is a gathered copy; write to it in graph_fsdp.unsharded, outside of the forward"
                    )


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _cost(unit: str, members: list[ShardedParameter], read: str) -> str:
    nbytes = sum(math.prod(p.spec.shape) * p.spec.param_dtype.itemsize for p in members)
    what = f"reads parameter {read!r}" if read else f"reads unit {unit or 'root'!r}"
    return (
        f"code outside of graphs {what}: its unit {unit or 'root'!r} is gathered for it, {nbytes:,} bytes, with no "
        "compute beside the gather, and stays whole to the end of the backward"
    )


def _whole_parameters(members: list[ShardedParameter], mode: Any) -> fx.GraphModule:
    """Return a graph that returns its inputs, which are placeholders of parameters."""
    graph = fx.Graph()
    nodes = []
    for p in members:
        node = graph.placeholder(f"p_{p.spec.name}")
        node.target = node.name  # an identifier
        with mode:
            value = torch.empty(p.spec.shape, dtype=p.spec.param_dtype, device=p.input.device)
            node.meta["example_value"] = value.requires_grad_(p.placeholder.requires_grad)
        nodes.append(node)
    graph.output(tuple(nodes))
    return fx.GraphModule({}, graph)
