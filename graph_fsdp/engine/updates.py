"""``Updates`` has what optimizers do beside a model's graphs: they step its parameters in backward
(``passes/transforms/update.py``), and gather those that the next forward reads first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING

from torch import Tensor

from graph_fsdp.errors import UnsupportedError
from graph_fsdp.passes.analysis.optimizers import Stepping
from graph_fsdp.passes.transforms.update import UpdateInBackward

if TYPE_CHECKING:
    from graph_fsdp.engine.engine import Engine


class Updates:
    """Holds which parameters of one model were stepped by a backward since their optimizer's ``step()`` (``done``)."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine  # a weak proxy
        self.done: set[str] = set()
        self.stepping: dict[str, Stepping] = {}  # parameter → what steps it, of optimizers that were distributed
        # Of optimizers that gather ahead: ids of the shards that one steps, and the units that it gathers.
        self._ahead: list[tuple[frozenset[int], frozenset[str]]] = []

    def check_available(self, names: Sequence[str]) -> None:
        """Raise UnsupportedError where backwards of this model cannot step these parameters."""
        engine = self._engine
        reasons = {
            "regions='whole' has the compiler run the model's collectives": engine.whole,
            "cuda_graphs=True replays what a backward writes": engine.cuda_graphs is not None,
            "gradients are not reduced now, or not over all ranks (set_requires_gradient_sync, no_sync, "
            "set_requires_all_reduce, set_manual_backward_finalization)": engine.settings.unsynced
            or engine.settings.unreplicated,
            "torchft says after a backward whether its gradients count": engine.settings.over_groups,
            "another optimizer steps its parameters in backward": engine.kept.updates.keys() & set(names),
        }
        if found := [reason for reason, holds in reasons.items() if holds]:
            raise UnsupportedError(f"in_backward=True is not available on this model: {found[0]}; call step() instead")

    def start(self, names: Sequence[str], step: Callable[[dict[str, Tensor]], None]) -> None:
        """Have backwards of later forwards call ``step`` with gradients of these parameters, a bucket's at once."""
        engine = self._engine
        engine.kept.updates.update(dict.fromkeys(names, step))
        engine.settings = dataclasses.replace(engine.settings, stepped=frozenset(engine.kept.updates))
        passes = list(engine.pipeline)
        if not any(isinstance(p, UpdateInBackward) for p in passes):
            free = next(p.name for p in passes if "freed" in p.provides and "backward" in p.runs_in())
            engine.pipeline = engine.pipeline.insert_before(free, UpdateInBackward())

    def units_ahead(self, count: int) -> list[str]:
        """Return the first units whose parameters are gathered, in the order of the model's parameters. Raises
        UnsupportedError where no unit of this model can be gathered before a forward."""
        engine, units = self._engine, self._engine.unsharded
        reason = units.unavailable()
        if not reason and engine.cuda_graphs is not None:
            reason = "cuda_graphs=True replays what a forward gathers"
        if reason:
            raise UnsupportedError(f"gather_ahead={count} is not available on this model: {reason}; leave it out")
        return [unit for unit in units.members if unit in units.sharded | units.units][:count]

    @property
    def ahead(self) -> frozenset[str]:
        """Return the units that forwards begin with, whole."""
        return frozenset[str]().union(*(units for _, units in self._ahead))

    def gather_ahead(self, shards: frozenset[int], units: Sequence[str]) -> None:
        """Have forwards begin with these units whole, until something else steps one of these shards (by their ids)."""
        self.drop_ahead(shards)
        self._ahead.append((shards, frozenset(units)))

    def drop_ahead(self, shards: Set[int]) -> None:
        """Have forwards gather as they go what an optimizer of any of these shards gathers ahead."""
        self._ahead = [(stepped, units) for stepped, units in self._ahead if not stepped & shards]

    def start_ahead(self, units: Sequence[str]) -> list[str]:
        """Start to gather units, of which an optimizer has stepped all that it steps; return those that it started, and
        that no block of ``graph_fsdp.unsharded`` holds."""
        unsharded = self._engine.unsharded
        free = [unit for unit in units if unit not in unsharded.held]
        for unit in free:
            unsharded.reshard(unit)  # a forward without a backward has left it whole, with the values before the step
            unsharded.start(unit, for_forward=True)
        return free

    def stepped(self, units: Sequence[str]) -> None:
        """Take what shards of these units hold now for what is gathered: a step that counts its writes has ended."""
        for unit in units:
            self._engine.unsharded.note_versions(unit)

    def check_new(self, names: Sequence[str]) -> None:
        """Raise, before a backward, if a parameter that it is to step has another gradient already, or will have one
        from code outside of graphs."""
        held, outside = self._engine.storage.parameters, self._engine.python_reads.gets_gradient
        again = [name for name in names if name in self.done or held[name].shard.grad is not None or outside(name)]
        again = [name for name in again if self._engine.kept.wanted(name)]
        if again:
            raise UnsupportedError(
                f"a second gradient of parameter {again[0]!r} before optimizer.step(): an optimizer that steps in "
                "backward (in_backward=True) accumulates none; call step() after each backward, or distribute the "
                "optimizer without in_backward to accumulate gradients"
            )

    def check_once(self) -> None:
        """Raise, before ``step()``, if a parameter that a backward has stepped has another gradient, which came later:
        from a graph that could not know that there would be one."""
        held = self._engine.storage.parameters
        again = [name for name in held if name in self.done and held[name].shard.grad is not None]
        if again:
            raise UnsupportedError(
                f"parameter {again[0]!r} was stepped in backward, and has a second gradient now, of which a step more "
                "would be another than that of their sum: several graphs of the model use it (fullgraph=False); "
                "distribute the optimizer without in_backward"
            )
