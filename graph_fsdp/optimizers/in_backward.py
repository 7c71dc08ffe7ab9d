"""An optimizer steps a bucket's parameters in backward, when their gradients are reduced, which are then freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, optim

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.optimizers.groups import copied, parameters_of, restored, shards_of, values_kept, values_of
from graph_fsdp.optimizers.slices import Slices
from graph_fsdp.parameters.gradients import as_gradient
from graph_fsdp.parameters.sharded import ShardedParameter


class InBackward:
    """Steps the sharded parameters of ``optimizer`` in backward, by ``own_step``, its class's. ``step`` as that of
    ``Slices``: it steps what has a gradient then, and says that all backwards before it are over."""

    def __init__(self, optimizer: optim.Optimizer, own_step: Callable[[optim.Optimizer], Any]) -> None:
        self._slices, self._own_step = Slices(optimizer), own_step
        # Of each group: name → value and version, in the last bucket that backward has stepped since the last ``step``.
        self._stepped_with: list[dict[str, tuple[Any, int]]] | None = None
        self._found = [
            (storage, members)
            for storage, held in shards_of(parameters_of(optimizer))
            if (members := {name: p for name, p in held.items() if is_stepped(p)})
        ]
        if not self._found:
            raise UnsupportedError(
                "in_backward=True: no parameter of optimizer is sharded over several ranks, so that no reduction is to "
                "be waited for; leave it out, and call optimizer.step()"
            )
        for storage, members in self._found:
            storage.updates.check_available(list(members))
        for storage, members in self._found:
            storage.updates.start(list(members), partial(self._update, optimizer, members))

    def step(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        for storage, _ in self._found:
            storage.updates.check_once()
        self._check_values(optimizer)
        self._slices.step(optimizer, own_step)
        self._stepped_with = None
        for storage, members in self._found:
            storage.updates.done -= members.keys()

    def _check_values(self, optimizer: optim.Optimizer) -> None:
        """Raise if a group has other values than those that backward has stepped with."""
        for index, (group, used) in enumerate(zip(optimizer.param_groups, self._stepped_with or (), strict=False)):
            for name, value in used.items():
                if not _is_same(group.get(name), value):
                    raise UnsupportedError(
                        f"step() of an optimizer that has stepped in backward (in_backward=True): {name!r} of group "
                        f"{index} was {value[0]!r} in backward, and is {group.get(name)!r} now; set it before the "
                        "forward, behind the step before, or distribute the optimizer without in_backward"
                    )

    @torch.no_grad()
    def _update(
        self, optimizer: optim.Optimizer, members: dict[str, ShardedParameter], gradients: dict[str, Tensor]
    ) -> None:
        """Step the parameters that have these gradients, and nothing else: what the optimizer has of a group, or of all
        parameters, such as a number of steps, ``step`` changes, once for all buckets."""
        stepped = {id(p.shard): p.shard for p in map(members.__getitem__, gradients)}
        for name, gradient in gradients.items():
            p = members[name]
            p.shard.grad = as_gradient(p, gradient)
        gradients.clear()
        state = optimizer.state
        own: defaultdict[Any, Any] = defaultdict(dict, {p: state[p] for p in stepped.values() if p in state})
        own.update((key, copied(value)) for key, value in state.items() if not isinstance(key, Tensor))
        try:
            with values_kept(optimizer.param_groups), restored(optimizer):
                optimizer.state = own
                for group in optimizer.param_groups:
                    group["params"] = [p for p in group["params"] if id(p) in stepped]
                self._slices.step_slices(optimizer, partial(self._own_step, optimizer))
        finally:
            state.update((p, values) for p, values in own.items() if isinstance(p, Tensor))
            for shard in stepped.values():
                shard.grad = None
        self._stepped_with = [
            {name: (copied(value), _version(value)) for name, value in values_of(group).items()}
            for group in optimizer.param_groups
        ]
        members_of = next(storage for storage, found in self._found if found is members)
        members_of.updates.done.update(p.spec.name for p in members.values() if id(p.shard) in stepped)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) else 0


def _is_same(now: Any, used: tuple[Any, int]) -> bool:
    """Say whether a group's value is the one that was ``used``; of a tensor, whether nobody has written to it, as its
    value would be waited for."""
    if isinstance(used[0], Tensor) or isinstance(now, Tensor):
        return isinstance(used[0], type(now)) and _version(now) == used[1]
    return bool(now == used[0])


class StepsInBackward:
    """Comes before the class of an optimizer that steps in backward."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise UnsupportedError(
            "GradScaler.step() was called with an optimizer that has stepped in backward (in_backward=True), with "
            "scaled gradients; train without a GradScaler (bfloat16 needs none), or distribute without in_backward"
        )


def is_stepped(p: ShardedParameter) -> bool:
    """Say whether backward can step a parameter: computing reads memory that a gather has filled, and not the shard."""
    return p.spec.world_size > 1 and not p.spec.replicated and not p.spec.empty
