"""``copy.deepcopy`` of a compiled model makes another one, with shards, settings and graphs of its own.

While it is copied the model is the plain one: its modules have their own classes and hold placeholders, and what
``compile`` has added is put aside. The plain copy is then built by the decisions that were made for the model.
Functions that ``compile`` was given are not asked again: they may know parameters of the model, and not those of the
copy. Gradients, monitors and graphs are not copied, nor what is whole; process groups and meshes are the model's.
Nothing is communicated, and of the model nothing changes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from graph_fsdp.engine.engine import Engine
from graph_fsdp.errors import EmptyPlaceholderError, UnsupportedError
from graph_fsdp.module.build import Decisions, build
from graph_fsdp.module.module import GraphFSDPModule, compiled_modules, plain_class
from graph_fsdp.parameters.mixed_precision import cast_hooks
from graph_fsdp.parameters.placeholder import set_guarded
from graph_fsdp.parameters.sharded import Owners, ShardedParameter

_GIVE_MEMO = "If a class of the model has a __deepcopy__, have it give memo to copy.deepcopy."
_State = tuple[nn.Module, type[nn.Module], dict[str, Any]]


def let_be_copied(model: nn.Module, decisions: Decisions) -> None:
    """Have ``copy.deepcopy`` copy a model that was built by ``decisions``."""
    place = dataclasses.replace(decisions.place, quantized={})  # which has whole weights
    vars(model)["_graph_fsdp_copied"] = functools.partial(_deep_copied, dataclasses.replace(decisions, place=place))


def _deep_copied(decisions: Decisions, model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a compiled model. ``memo``: that of ``copy.deepcopy``, which knows the copies of modules
    and shards afterwards.

    Raises:
        UnsupportedError: this model, or what it holds now, cannot be copied; nothing was changed.
        ParameterChangedError: as in a forward.
    """
    engine: Engine = vars(model)["_graph_fsdp"]
    storage = engine.storage
    _check(model, engine, decisions, memo)
    engine.structure.check()
    storage.refresh()
    parameters, modules = storage.parameters, compiled_modules(model, engine)
    originals = {name: storage.plain_copy(p) for name, p in parameters.items()}
    for name, p in parameters.items():
        memo.update((id(value), originals[name]) for value in (p.shard, p.placeholder, p.whole) if value is not None)
    for module in model.modules():
        groups = (value for value in vars(module).values() if isinstance(value, (dist.ProcessGroup, DeviceMesh)))
        memo.update((id(value), value) for value in (*cast_hooks(module), *groups))
    with storage.placeholders_registered(), _plain(modules) as later:
        storage.active = False
        # No forward runs: who reads a placeholder is told. XLA has no guards.
        set_guarded((p.placeholder for p in parameters.values() if "_graph_fsdp" in vars(p.placeholder)), True)
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
            found = copy.deepcopy(later, memo)
        except EmptyPlaceholderError as error:
            told = "the model cannot be deep-copied: code of it reads a parameter meanwhile, and this rank has a shard"
            raise UnsupportedError(f"{told}. {_GIVE_MEMO}") from error
    owners = {name: _copied_owners(p, originals[name], memo) for name, p in parameters.items()}
    units = [
        dataclasses.replace(unit, modules={name: memo[id(module)] for name, module in unit.modules.items()})
        for unit in decisions.units
    ]
    named = {memo[id(module)]: policy for module, policy in decisions.policies.named.items() if id(module) in memo}
    policies = dataclasses.replace(decisions.policies, model=copied, named=named)
    decided = dataclasses.replace(decisions, spec=engine.spec, policies=policies, units=units)
    with torch.inference_mode(False):
        extensions = {name: gather.of_copy(owners[name][0][0]) for name, gather in engine.extensions.items()}
        build(copied, decided, originals, owners, lambda shards: shards.fill_from(storage), extensions)
    let_be_copied(copied, decided)
    new: Engine = vars(copied)["_graph_fsdp"]
    new.take_settings(engine)
    new.structure.take_late(engine.structure)
    for name, p in new.storage.parameters.items():
        memo[id(parameters[name].shard)] = p.shard
    for module, name, value in found:
        set_again: Any = setattr if name == "forward" else GraphFSDPModule._register
        set_again(module, name, value)
    return copied


def _check(model: nn.Module, engine: Engine, decisions: Decisions, memo: dict[int, Any]) -> None:
    """Refuse what cannot be copied."""
    reason, parameters, inside = "", engine.storage.parameters, set(model.modules())
    known = [name for name, p in parameters.items() if id(p.shard) in memo]
    quantized = [name for name, p in parameters.items() if p.used_like is not None]
    owners = {module for p in parameters.values() for module, _ in p.owners}
    if quantized:
        reason = f"its parameter {quantized[0]!r} is quantized: copy it before graph_fsdp.compile"
    elif engine.unsharded.held:
        reason = "parameters are whole in a block of graph_fsdp.unsharded: copy it outside of the block"
    elif engine.storage.active:
        reason = "its forward runs: copy it before or after"
    elif engine.settings.over_groups:
        reason = "torchft's manager counts its gradients: copy it before graph_fsdp.integrations.torchft replicates it"
    elif known:
        reason = f"its parameter {known[0]!r} was copied before it, with another object: copy the model first"
    elif not owners <= inside or not {m for unit in decisions.units for m in unit.modules.values()} <= inside:
        reason = "modules of it were exchanged after graph_fsdp.compile: copy it before"
    if reason:
        kind = type(model).__name__.removeprefix("FSDP")
        raise UnsupportedError(f"{kind}, compiled by graph_fsdp, cannot be deep-copied: {reason}")


@contextlib.contextmanager
def _plain(modules: list[nn.Module]) -> Iterator[list[tuple[nn.Module, str, Any]]]:
    """Let modules be those of the plain model. Yields what users have set on them since, in places where it is to be
    set again: (module, name, value)."""
    before: list[_State] = [(module, type(module), vars(module)) for module in modules]
    later: list[tuple[nn.Module, str, Any]] = []

    def restore() -> None:
        for module, kind, state in before:
            object.__setattr__(module, "__dict__", state)
            object.__setattr__(module, "__class__", kind)

    try:
        for module, _, state in before:
            plain, set_later = _plain_state(module, state)
            later += [(module, name, value) for name, value in set_later.items()]
            object.__setattr__(module, "__class__", plain_class(type(module)))
            object.__setattr__(module, "__dict__", plain)
        yield later
    finally:
        try:
            restore()
        except BaseException:  # [Note: Ctrl-C] in sharded.py
            restore()
            raise


def _plain_state(module: nn.Module, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the plain module had, and what was set on the compiled one that is to be set on a compiled one."""
    given: dict[str, Any] = state.get("_graph_fsdp_given", {})
    later = {name: value for name, (made, value) in given.items() if state.get(name) is made}
    if "forward" in state and getattr(state["forward"], "__func__", None) is not type(module).forward:
        later.setdefault("forward", state["forward"])
    plain = {k: v for k, v in state.items() if not k.startswith("_graph_fsdp") and k not in later and k != "forward"}
    if "_graph_fsdp_forward" in state:
        plain["forward"] = state["_graph_fsdp_forward"]
    return plain, later


def _copied_owners(p: ShardedParameter, original: nn.Parameter, memo: dict[int, Any]) -> Owners:
    found: Owners = tuple((memo[id(module)], leaf) for module, leaf in p.owners if id(module) in memo)
    if len(found) < len(p.owners) or any(module._parameters.get(leaf) is not original for module, leaf in found):
        raise UnsupportedError(
            f"the model cannot be deep-copied: the copy of {type(p.owners[0][0]).__name__} has another parameter "
            f"{p.spec.name!r} than copy.deepcopy knows. {_GIVE_MEMO}"
        )
    return found
