"""An element-wise optimizer steps over slices of the shard storage.

[Note: what an element-wise optimizer sees]
Shards of one dtype lie behind one another in one buffer (``parameters/shards.py``). During a step the optimizer's
groups hold plain parameters over that buffer: one for each large shard, and one for each *run* of small neighbours,
whose gradients are packed for the step. Padding between neighbours has zero gradients and stays zero. The optimizer's
own ``step`` does the arithmetic, so that each element gets the bits that it would get alone. The CPU's fused kernels
round the last elements of a tensor otherwise than the first: there each parameter is a run.

A run's state is one tensor for each value that has the parameters' shape; ``optimizer.state`` has views of it, as
DTensors like the parameters. A state that is not these views (after ``load_state_dict``) is copied into new ones by the
next step. What belongs to a run as a whole ("step") its parameters share, and ``state_dict()`` gives each a copy.
Parameters whose shared values differ, because some had no gradient in a step, are in different runs.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.groups import NOT_COMPILED, count_writes, parameters_of, restored, shards_of
from graph_fsdp.parameters.inputs import tensors_of
from graph_fsdp.parameters.shards import Storage
from graph_fsdp.passes.ir.dialect import aligned

SMALL = 2**16  # bytes of a shard up to which its gradient is packed with those of its neighbours


def unshared(state: Any) -> Any:
    """Return a parameter's state with its own copies of values that parameters of a run share. What an optimizer keeps
    under another key than a parameter's, as MADGRAD its number of steps, is returned as it is."""
    if not isinstance(state, dict):
        return state
    return {k: v.clone() if isinstance(v, Tensor) and not v.dim() else v for k, v in state.items()}


@dataclass(eq=False)
class ShardSlice:
    """One parameter, and where its shard lies in a buffer: elements ``begin`` to ``end``, padding included."""

    p: nn.Parameter
    local: Tensor
    buffer: Tensor
    begin: int
    end: int

    def touches(self, other: ShardSlice) -> bool:
        """Say whether this small shard comes right behind another small one."""
        small = self.local.nbytes <= SMALL and other.local.nbytes <= SMALL
        return small and self.buffer is other.buffer and self.begin == other.end

    def part_of(self, value: Tensor, begin: int) -> Tensor:
        """Return this parameter's elements, flat, of a run's tensor that begins at element ``begin`` of the buffer."""
        return value.view(-1)[self.begin - begin :][: self.local.numel()]

    def view_of(self, value: Tensor, begin: int) -> Tensor:
        """Return the same elements as a tensor like the parameter."""
        local = compat.with_storage_of_its_own(self.part_of(value, begin).view(self.local.shape))
        return compat.make_dtensor(local, self.p) if isinstance(self.p, DTensor) else local


class Run:
    """Neighbours that are stepped as one parameter, without padding where it is only one."""

    def __init__(self, members: Sequence[ShardSlice]) -> None:
        self.members, (first, *others) = list(members), members
        self.parameters = [m.p for m in members]
        self.ids = frozenset(map(id, self.parameters))
        self.begin = first.begin
        data = first.buffer[first.begin : members[-1].end] if others else first.local.view(first.local.shape or 1)
        self.param = nn.Parameter(data.detach(), requires_grad=False)
        self.state: dict[str, Any] = {}
        self._seen: dict[str, Any] = {}  # the state when members were given theirs
        self._given: list[dict[str, Any]] = []  # theirs
        self._values: list[Any] = []  # in theirs
        # Of several, the gradients lie in one tensor during a step, which has no memory else.
        self._packed = packed = torch.empty_like(self.param.data) if others else None
        self._parts: list[Tensor] = []
        if packed is not None:
            self._parts = [m.part_of(packed, self.begin).view(m.local.shape) for m in members]
        self.clear_gradient()

    def set_gradient(self, gradients: Sequence[Tensor]) -> None:
        self.param.grad = self.joined(gradients)

    def joined(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradients of all members as one tensor."""
        if self._packed is None:
            return gradients[0].view(self.param.shape)
        self._packed.untyped_storage().resize_(self._packed.nbytes)
        self._packed.zero_()  # padding, too
        compat.foreach_copy(self._parts, gradients)
        return self._packed

    def clear_gradient(self) -> None:
        self.param.grad = None
        if self._packed is not None:
            self._packed.untyped_storage().resize_(0)

    def is_intact(self, state: Any) -> bool:
        """Say whether members have the states in ``optimizer.state`` that they were given."""
        found = list(map(state.get, self.parameters))
        if not self._given:
            return not any(found)
        values = chain.from_iterable(values.values() for values in self._given)
        sizes = sum(map(len, self._given)) == len(self._values)
        return all(map(is_, found, self._given)) and sizes and all(map(is_, values, self._values))

    def take(self, states: Sequence[dict[str, Any]]) -> None:
        """Make the run's state of its members' states, which agree in what is not of a parameter's shape."""
        for key, value in states[0].items():
            if _is_like(value, self.members[0].p):
                dtype = compat.local_part(value).dtype
                joined = torch.zeros_like(self.param, dtype=dtype)
                for m, state in zip(self.members, states, strict=True):
                    m.part_of(joined, self.begin).copy_(compat.local_part(state[key]).reshape(-1))
                self.state[key] = joined
            else:
                self.state[key] = value.clone() if isinstance(value, Tensor) else value

    def is_new(self, state: dict[str, Any]) -> bool:
        """Say whether a state has other values than when members got theirs."""
        return len(state) != len(self._seen) or any(v is not self._seen.get(k) for k, v in state.items())

    def give(self, state: Any) -> None:
        """Put into ``state`` what members have of the run's state, if it has other values than when they got theirs."""
        if not self.is_new(self.state):
            return
        self._given = [
            {k: m.view_of(v, self.begin) if _is_like(v, self.param) else v for k, v in self.state.items()}
            for m in self.members
        ]
        self._values = [value for values in self._given for value in values.values()]
        state.update(zip(self.parameters, self._given, strict=True))
        self._seen = dict(self.state)


def _check_states(optimizer: str, runs: Sequence[Run], states: dict[Any, Any]) -> None:
    """Raise UnsupportedError, and drop the runs' states, if the optimizer has made one that cannot be its parameters':
    it does not treat each element by itself, and a checkpoint would have one rank's for all."""
    new = [run for run in runs if run.is_new(states.get(run.param, {}))]
    for run in new:
        shape = tuple(run.param.shape)
        for name, value in states[run.param].items():
            for found in tensors_of(value):
                is_state = found is value and type(found) in (Tensor, nn.Parameter) and _is_like(found, run.param)
                if is_state or found.numel() == 1:
                    continue
                for each in new:
                    states.pop(each.param)
                where = "" if found is value else f" in a {type(value).__name__}"
                raise UnsupportedError(
                    f"element_wise=True: {optimizer} keeps {name!r}, a {type(found).__name__} of shape "
                    f"{tuple(found.shape)}{where}, for a parameter of shape {shape}; an element-wise state is a tensor "
                    "with a number for each of the parameter's elements, or one number. Leave distribute_optimizer "
                    "out, with an optimizer that steps on DTensors (for states of 8 bits, one of torchao.optim)"
                )


def _is_like(value: Any, p: Tensor) -> bool:
    """Say whether a state has an element for each of the parameter's. A scalar's is a DTensor as the parameter."""
    return isinstance(value, Tensor) and value.shape == p.shape and (value.dim() > 0 or isinstance(value, DTensor))


@dataclass(frozen=True)
class GroupStep:
    """What is stepped of one of an optimizer's groups: runs, and other parameters by themselves."""

    group: dict[str, Any]
    runs: Sequence[Run]
    others: Sequence[Tensor]


class Slices:
    """Knows where an optimizer's parameters lie in the shard storage, and which are stepped as one."""

    make_run: Callable[[Sequence[ShardSlice]], Run] = Run
    ahead = 0  # units that a step gathers for the next forward

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._in_runs = set[int]()  # ids of parameters whose states may share values
        self.forget_buffers()
        Storage.holders.add(self)
        self._find(parameters_of(optimizer))
        held = () if self._slices else shards_of(parameters_of(optimizer))
        if not self._slices and not any(storage.is_away for storage, _ in held):  # without buffers until a forward
            raise ValueError(NOT_COMPILED)

    def forget_buffers(self) -> None:
        self._storages = weakref.WeakSet[Storage]()
        self._slices: dict[int, ShardSlice] = {}  # by the id of the parameter, which is in it
        # By a group's ``fused`` and the ids of its parameters.
        self._neighbours: dict[tuple[int, ...], tuple[list[list[ShardSlice]], list[Tensor]]] = {}
        self._runs: dict[int, Run] = {}  # the run that a parameter was last in

    def step(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        """Call ``own_step`` with runs in the groups of ``optimizer``, and give their parameters their states."""
        for storage in self._storages:
            if storage.mesh is None and not storage.is_away:  # of a DTensor, the next forward refuses it
                storage.refresh()  # ``p.data = …`` since the forward has put values into other memory
        self.step_slices(optimizer, own_step)

    def step_slices(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        """Step where the shards were at the last forward, or ``step``."""
        groups, state = optimizer.param_groups, optimizer.state
        runs = [self._runs_of(group, state) for group in groups]
        inside = set[int]().union(*(run.ids for in_group in runs for run in in_group))
        others: defaultdict[Any, Any] = defaultdict(dict)
        for p in [p for p in state if id(p) not in inside]:  # what is stepped by itself counts by itself
            others[p] = unshared(state[p]) if id(p) in self._in_runs and p.grad is not None else state[p]
        others.update((run.param, run.state) for in_group in runs for run in in_group if run.state)
        rest = [[p for p in group["params"] if id(p) not in inside] for group in groups]

        def give() -> None:
            for run in chain.from_iterable(runs):
                run.clear_gradient()
                run.state = others.pop(run.param, run.state)
                run.give(state)
                increment_version(run.parameters)
            count_writes(chain.from_iterable(rest))
            state.update(others)

        try:
            with restored(optimizer):
                optimizer.state = others
                self.step_runs(list(map(GroupStep, groups, runs, rest)), own_step)
                _check_states(type(optimizer).__name__, list(chain.from_iterable(runs)), others)
        finally:
            try:
                give()
            except BaseException:  # [Note: Ctrl-C] in parameters/sharded.py
                give()
                raise

    def step_runs(self, steps: Sequence[GroupStep], own_step: Callable[[], Any]) -> None:
        """Step each group's runs and other parameters, all at once."""
        for step in steps:
            step.group["params"] = [run.param for run in step.runs] + list(step.others)
        own_step()

    def _runs_of(self, group: dict[str, Any], state: Any) -> list[Run]:
        """Return the runs of a group's parameters that have gradients, which the runs are given. There are none where a
        DTensor is not in one: torch's kernels for many tensors do not take it beside plain ones."""
        neighbours, others = self._neighbours_of(group["params"], bool(group.get("fused")))
        found: list[Run] = []
        for members in neighbours:
            given = compat.parts_of_gradients([(m.p, m.local) for m in members])
            gradients, trained = [gradient for gradient in given if gradient is not None], members.copy()
            if len(gradients) < len(given):
                trained = [m for m, gradient in zip(members, given, strict=True) if gradient is not None]
                others = [*others, *(m.p for m, gradient in zip(members, given, strict=True) if gradient is None)]
            while trained:
                run = self._runs.get(id(trained[0].p))
                if run is None or trained[: len(run.members)] != run.members or not run.is_intact(state):
                    run = self._make_run(trained, state)
                count = len(run.members)
                run.set_gradient(gradients[:count])
                del trained[:count], gradients[:count]
                found.append(run)
        if any(isinstance(p, DTensor) and p.grad is not None for p in others):
            for run in found:
                run.clear_gradient()
            return []
        return found

    def _make_run(self, members: Sequence[ShardSlice], state: Any) -> Run:
        """Make a run of the first of ``members`` and what follows it without a gap and agrees with it."""
        states = [state.get(m.p, {}) for m in members]
        shared = _shared(states[0], members[0].p)
        count = 1
        for before, m, values in zip(members, members[1:], states[1:]):  # noqa: B905
            if m.begin != before.end or _shared(values, m.p) != shared:
                break
            count += 1
        run = self.make_run(members[:count])
        run.take(states[:count])
        self._runs.update((id(m.p), run) for m in run.members)
        self._in_runs |= run.ids
        return run

    def joins(self, before: ShardSlice, m: ShardSlice) -> bool:
        """Say whether two shards may be stepped as one parameter."""
        return m.touches(before)

    def _neighbours_of(self, params: Sequence[Tensor], fused: bool) -> tuple[list[list[ShardSlice]], list[Tensor]]:
        """Return a group's shards in the order in which they lie, large ones alone and small ones with what they touch,
        and its other parameters."""
        key = (fused, *map(id, params))
        if key not in self._neighbours:
            self._find(params)
            held = [self._slices[id(p)] for p in params if id(p) in self._slices]
            found: list[list[ShardSlice]] = []
            for m in sorted(held, key=lambda m: (m.buffer.data_ptr(), m.begin)):
                if found and self.joins(found[-1][-1], m) and not (fused and m.buffer.is_cpu):
                    found[-1].append(m)
                else:
                    found.append([m])
            self._neighbours = {**self._neighbours, key: (found, [p for p in params if id(p) not in self._slices])}
        return self._neighbours[key]

    def _find(self, params: Iterable[Tensor]) -> None:
        for storage, held in shards_of(p for p in params if id(p) not in self._slices):
            self._storages.add(storage)
            buffers = {buffer.untyped_storage().data_ptr(): buffer for buffer in storage.buffers}
            for p in held.values() if storage.has_memory and storage.buffers else ():
                local = compat.local_part(p.shard)
                as_expected = local.dim() > 0 or isinstance(p.shard, DTensor)
                if as_expected and type(local.data) is Tensor:
                    begin = int(p.input.storage_offset())
                    end = begin + aligned(p.spec.shard_numel, p.spec.dtype)
                    buffer = buffers[p.input.untyped_storage().data_ptr()]
                    self._slices[id(p.shard)] = ShardSlice(p.shard, local, buffer, begin, end)


def _shared(state: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Return what parameters of one run must agree on: names, and values that are not of a parameter's shape."""
    return {k: _is_like(v, p) or (v.tolist() if isinstance(v, Tensor) else v) for k, v in state.items()}
