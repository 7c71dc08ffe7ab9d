"""The replicas of HSDP come and go: torchft's Manager takes the mean over the replica groups that live.

::

    manager = torchft.Manager(pg=torchft.ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1)
    model = graph_fsdp.compile(model, mesh)  # of this replica group's ranks alone
    optimizer = torchft.Optimizer(manager, torch.optim.AdamW(model.parameters()))
    replicate(model, manager, optimizer)

Written for torchft 0.2, which it does not import.

[Note: what spans replica groups]
Each replica group has ranks, a process group and a store of its own, in which its ranks agree and keep in step as ever.
Two things cross groups, both through the manager: the mean of each bucket's reduced shard, between a rank and the ranks
of the same number in other groups, and the state that a group which comes back gets, likewise. A collective over groups
that fails is noted in the manager and raises nothing: ``should_commit()`` is then False on all ranks of the group, and
the step is repeated with the groups that are left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graph_fsdp import compat
from graph_fsdp.checkpoint.state import optimizers_of
from graph_fsdp.engine.engine import Engine
from graph_fsdp.errors import CheckpointError, RankDisagreement, UnsupportedError
from graph_fsdp.module.unit_methods import change, place
from graph_fsdp.optimizers.groups import parameters_of
from graph_fsdp.passes.ir.agreed_order import Plan
from graph_fsdp.report.report import engine_of


def replicate(
    model: nn.Module, manager: Any, optimizer: Optimizer | Iterable[Optimizer], *, key: str = "graph_fsdp"
) -> None:
    """Have the gradients of later forwards averaged over the replica groups that take part in a step, by ``manager``,
    and heal a group that comes back from one that lives. All ranks of all groups call it, before the first step.

    A bucket's gradients are reduced over the model's mesh, all of which is in this replica group, and then by
    ``manager.allreduce``; the graph says it (``mean_over_groups``). Backward waits for each. In ``.grad``, and so for
    ``clip_grad_norm_``, is the mean over groups. Microbatches may leave it out as ever (``no_sync``).

    A group heals when torchft says so: parameters, persistent buffers and the optimizers' states are copied from the
    rank of the same number in a live group, which has as many ranks. The order of collectives is taken from there, too.
    Random states and all else (schedulers, the data loader) are the user's: ``manager.register_state_dict_fn``. Take
    each batch by ``manager.current_step()``, so that a step that was not committed is repeated.

    Args:
        model: what ``graph_fsdp.compile`` has returned, on the ranks of one replica group, two or more.
        manager: a ``torchft.Manager``, of any process group of torchft's and any checkpoint transport.
        optimizer: one or several of the model's parameters, distributed or not; also a ``torchft.Optimizer``.
        key: under which the manager has this model's state: one of its own for each model of a manager.

    Raises:
        TypeError: an argument is none of these.
        UnsupportedError: the model is on one process, or has ``backend="xla"`` or ``regions="whole"``; an optimizer
            steps it in backward, before anything is voted on; a trainable parameter is on no other rank of the group;
            or it is replicated by a manager already.
    """
    engine = _checked(model, manager, key)
    state = _State(engine, model, optimizers_of(optimizer))
    if not state.optimizers:
        raise TypeError("optimizer must be one or several torch.optim.Optimizer: a group that comes back needs states")
    manager.register_state_dict_fn(key, state.load_state_dict, state.state_dict)
    engine.kept.mean_over_groups = partial(_mean_over_groups, manager)
    change(engine, over_groups=True)


def _checked(model: nn.Module, manager: Any, key: str) -> Engine:
    engine, unit = engine_of(model), place(model)[1]
    wanted = ("allreduce", "register_state_dict_fn", "errored")
    if missing := [name for name in wanted if not callable(getattr(manager, name, None))]:
        raise TypeError(f"manager must be a torchft.Manager, and this {type(manager).__name__} has no {missing[0]}()")
    if not isinstance(key, str) or not key:
        raise TypeError(f"key must be a name, got {key!r}")
    spec = engine.spec
    alone = [p.name for p in spec.parameters.values() if p.trainable and not p.empty and p.mesh.ranks == 1]
    reasons = {
        f"it was called on the unit {unit!r}; call it on the model": bool(unit),
        "backend='xla' runs the collectives in the compiler's programs; compile with another": (
            engine.backend.name == "xla"
        ),
        "regions='whole' has the compiler run the collectives; compile with regions='cut'": engine.whole,
        "this replica group is one process, which reduces nothing; take torchft.DistributedDataParallel, or give a "
        "group more ranks": spec.mesh.ranks == 1,
        f"parameter {alone[0] if alone else ''!r} is on no other rank of its mesh, and its gradient not reduced; give "
        "it a larger one (meshes=)": bool(alone),
        "an optimizer steps in backward (in_backward=True), before the manager says whether the step counts; "
        "distribute it without in_backward": bool(engine.settings.stepped),
        "it was replicated before": engine.settings.over_groups,
    }
    if found := [reason for reason, holds in reasons.items() if holds]:
        raise UnsupportedError(f"graph_fsdp.integrations.torchft.replicate is not available on this model: {found[0]}")
    return engine


def _mean_over_groups(manager: Any, of_all: str, reduced: Tensor) -> None:
    """Replace ``reduced``, this rank's flat shard of a bucket's gradients, by its mean over the groups of the step.
    Without another message where a collective of the step has failed. ``of_all``: what the buckets of a program are,
    with the first one; "" with the others."""
    if of_all and not manager.errored():
        _compare(manager, of_all, reduced.device)
    manager.allreduce(torch.view_as_real(reduced) if reduced.is_complex() else reduced).wait()


def _compare(manager: Any, of_all: str, device: torch.device) -> None:
    """Compare with the other groups what is about to be reduced. They have no store in common, and one small message
    does it. A group that heals sends zeros, and torchft may count it: so the number of groups is sent, too."""
    mine = int.from_bytes(hashlib.sha256(of_all.encode()).digest()[:5], "big")  # 8192 of them add up exactly
    numbers = torch.tensor([mine, 1], dtype=torch.float64, device=device)
    manager.allreduce(numbers).wait()
    total, groups = numbers.tolist()
    if not manager.errored() and groups and round(total / groups) != mine:
        raise RankDisagreement(
            f"this replica group is about to reduce {of_all}, over replica groups, and another one something else; use "
            "the same model, mesh, options and passes in all groups, and let no branch depend on a group's data"
        )


class _State:
    """What a group that heals gets of a live one, rank by rank. No collective runs for it, and it may be asked for in
    another thread while a forward runs."""

    def __init__(self, engine: Engine, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self.engine, self.model, self.optimizers = engine, model, optimizers
        sharded = {id(p.registered) for p in engine.storage.parameters.values()}
        self.others = {name: p for name, p in model.named_parameters() if id(p) not in sharded}
        self.persistent = model.state_dict(keep_vars=True).keys()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, in the memory that it has: plain tensors, numbers and texts."""
        return {
            "tensors": self._tensors(),
            "optimizers": [_optimizer_state(optimizer) for optimizer in self.optimizers],
            "plans": {kind: plan.to_json() for kind, plan in self.engine.schedules.plans.copy().items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of the same rank of another group. Raises CheckpointError if it is of another model or
        optimizer, or of a rank of a group of another size, before anything is changed."""
        given, mine = state["tensors"], self._tensors()
        wrong = [name for name in given.keys() | mine.keys() if _described(given, name) != _described(mine, name)]
        if wrong:
            name = min(wrong)
            raise CheckpointError(
                f"a live replica group has {_described(given, name)} for this rank's part of {name!r}, and this group "
                f"{_described(mine, name)}; start it with the same model and as many ranks"
            )
        if len(state["optimizers"]) != len(self.optimizers):
            raise CheckpointError(
                f"a live replica group has {len(state['optimizers'])} optimizers, and this group {len(self.optimizers)}"
                "; start it with the same ones"
            )
        optimizers = list(zip(self.optimizers, state["optimizers"], strict=True))
        loaded = [_as_here(optimizer, saved) for optimizer, saved in optimizers]
        self.engine.unsharded.release()
        for name, tensor in mine.items():
            tensor.copy_(given[name])
        increment_version([p.shard for p in self.engine.storage.parameters.values()])
        for (optimizer, _), found in zip(optimizers, loaded, strict=True):
            optimizer.load_state_dict(found)
        for kind, plan in state["plans"].items():
            self.engine.schedules.plans.setdefault(kind, Plan.from_json(plan))

    def _tensors(self) -> dict[str, Tensor]:
        """Return the rank's parts of parameters and buffers, in place. Those that are quantized, and frozen, are what
        the model was made of. The model's own names lead to placeholders while its forward runs."""
        found: dict[str, Any] = {
            name: p.shard for name, p in self.engine.storage.parameters.items() if p.used_like is None
        }
        found |= self.others
        found |= {name: buffer for name, buffer in self.model.named_buffers() if name in self.persistent}
        return {name: compat.local_part(tensor).detach() for name, tensor in found.items()}


def _described(tensors: dict[str, Tensor], name: str) -> str:
    return f"{tensors[name].dtype}{list(tensors[name].shape)}" if name in tensors else "nothing"


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's state dict with the rank's part in the place of each DTensor, and where it belongs."""

    def plain(value: DTensor) -> dict[str, Any]:
        where = {"placements": value.placements, "shape": value.shape, "stride": value.stride()}
        return {"local": compat.local_part(value).detach(), **where}

    found = optimizer.state_dict()
    state = {
        number: {k: plain(v) if isinstance(v, DTensor) else v for k, v in values.items()}
        for number, values in found["state"].items()
    }
    return {**found, "state": state}


def _as_here(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict that ``optimizer`` can load: DTensors on the mesh of their parameter."""
    parameters = parameters_of(optimizer)
    numbers = [len(group["params"]) for group in optimizer.param_groups]
    if numbers != (theirs := [len(group["params"]) for group in saved["param_groups"]]):
        raise CheckpointError(
            f"a live replica group has an optimizer of groups with {theirs} parameters, and this group one of groups "
            f"with {numbers}; start it with the same optimizer"
        )

    def placed(number: int, value: Any) -> Any:
        if not (isinstance(value, dict) and value.keys() >= {"local", "placements"}):
            return value
        mesh, where = parameters[number].device_mesh, value["placements"]
        return DTensor.from_local(
            value["local"], mesh, where, run_check=False, shape=value["shape"], stride=value["stride"]
        )

    state = {
        number: {name: placed(number, value) for name, value in values.items()}
        for number, values in saved["state"].items()
    }
    return {**saved, "state": state}
