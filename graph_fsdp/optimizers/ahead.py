"""An optimizer steps what the next forward reads first, and its gathers run beside the rest of the step.

Ranks start these gathers where the program calls ``step()``, which compares them as ``unshard()`` does: nothing of a
rank's own decides. Where ``step()`` was not called (a ``GradScaler`` that skips it), the forward starts them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, optim

from graph_fsdp.optimizers.slices import Run, Slice, Slices
from graph_fsdp.parameters.shards import Storage


class Ahead(Slices):
    """Steps the first ``count`` units of each model, starts to gather them, and steps the rest."""

    def __init__(self, optimizer: optim.Optimizer, count: int) -> None:
        super().__init__(optimizer)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        models = [s for s in Storage.installed if any(id(p.shard) in stepped for p in s.parameters.values())]
        self._units = [(storage, storage.updates.units_ahead(count)) for storage in models]
        members = [(p, units) for storage, units in self._units for p in storage.parameters.values()]
        self._first = {id(p.shard) for p, units in members if p.spec.unit in units}
        self._started: list[tuple[Storage, list[str]]] = []
        for storage, units in self._units:
            storage.updates.gather_ahead(units)

    def joins(self, before: Slice, m: Slice) -> bool:
        return super().joins(before, m) and (id(before.p) in self._first) is (id(m.p) in self._first)

    def step(self, optimizer: optim.Optimizer, own_step: Callable[[], Any]) -> None:
        super().step(optimizer, own_step)
        for storage, units in self._started:
            storage.updates.stepped(units)

    def step_runs(
        self,
        groups: Sequence[dict[str, Any]],
        runs: Sequence[Sequence[Run]],
        others: Sequence[list[Tensor]],
        own_step: Callable[[], Any],
    ) -> None:
        first, rest = (
            [[run for run in of_group if bool(run.ids & self._first) is is_first] for of_group in runs]
            for is_first in (True, False)
        )
        others_first, others_rest = (
            [[p for p in of_group if (id(p) in self._first) is is_first] for of_group in others]
            for is_first in (True, False)
        )
        super().step_runs(groups, first, others_first, own_step)
        self._started = [(storage, storage.updates.start_ahead(units)) for storage, units in self._units]
        super().step_runs(groups, rest, others_rest, own_step)
