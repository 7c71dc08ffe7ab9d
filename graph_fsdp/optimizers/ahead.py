"""An optimizer steps what the next forward reads first, and its gathers run beside the rest of the step.

Ranks start these gathers where the program calls ``step()``, which compares them as ``unshard()`` does: nothing of a
rank's own decides. Where ``step()`` was not called (a ``GradScaler`` that skips it), the forward starts them itself.

[Note: until when forwards begin with these units]
Until another optimizer steps one of the same parameters, or is given to ``distribute_optimizer`` with them; from its
own next ``step()`` on, they do so again. Programs do that alike on all ranks. When an optimizer is garbage-collected
differs between ranks, so that it decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graph_fsdp.optimizers.groups import parameters_of, shards_of
from graph_fsdp.optimizers.slices import GroupStep, ShardSlice, Slices
from graph_fsdp.parameters.shards import Storage


class Ahead(Slices):
    """Steps the first ``count`` units of each model, starts to gather them, and steps the rest."""

    _watching = False  # other optimizers' steps

    def __init__(self, optimizer: optim.Optimizer, count: int) -> None:
        super().__init__(optimizer)
        self.ahead = count
        places = {shard: place for place, shard in enumerate(_stepped_by(optimizer))}
        models = {  # a set's order is not that of other ranks
            min(places[id(p.shard)] for p in held.values()): storage
            for storage, held in shards_of(parameters_of(optimizer))
        }
        self._units = [(models[place], models[place].updates.units_ahead(count)) for place in sorted(models)]
        members = [(p, units) for storage, units in self._units for p in storage.parameters.values()]
        self._first = {id(p.shard) for p, units in members if p.spec.unit in units}
        self._started: list[tuple[Storage, list[str]]] = []
        self._begin_ahead(optimizer)
        if not Ahead._watching:
            register_optimizer_step_pre_hook(lambda other, args, kwargs: drop_ahead(other))
            Ahead._watching = True

    def _begin_ahead(self, optimizer: optim.Optimizer) -> None:
        stepped = frozenset(_stepped_by(optimizer))
        for storage, units in self._units:
            storage.updates.gather_ahead(stepped, units)

    def joins(self, before: ShardSlice, m: ShardSlice) -> bool:
        return super().joins(before, m) and (id(before.p) in self._first) is (id(m.p) in self._first)

    def step(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        self._begin_ahead(optimizer)  # another's step may have ended it
        super().step(optimizer, own_step)
        for storage, units in self._started:
            storage.updates.stepped(units)

    def step_runs(self, steps: Sequence[GroupStep], own_step: Callable[[], Any]) -> None:
        super().step_runs([self._part(step, True) for step in steps], own_step)
        there = [(storage, units) for storage, units in self._units if not storage.is_away]
        self._started = [(storage, storage.updates.start_ahead(units)) for storage, units in there]
        super().step_runs([self._part(step, False) for step in steps], own_step)

    def _part(self, step: GroupStep, is_first: bool) -> GroupStep:
        runs = [run for run in step.runs if bool(run.ids & self._first) is is_first]
        return GroupStep(step.group, runs, [p for p in step.others if (id(p) in self._first) is is_first])


def drop_ahead(optimizer: optim.Optimizer) -> None:
    """Have no forward begin with what an optimizer of these parameters gathers ahead."""
    for storage in Storage.installed:
        storage.updates.drop_ahead(frozenset(_stepped_by(optimizer)))


def _stepped_by(optimizer: optim.Optimizer) -> list[int]:
    return list(dict.fromkeys(map(id, parameters_of(optimizer))))
