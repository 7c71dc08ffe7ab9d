"""Units say which parameters are gathered together.

A unit is a submodule; it owns the parameters below it that no unit inside it owns. The root unit holds what is left.
When a unit is gathered and freed is decided on the graph.

[Note: tied parameters]
A parameter with several names has several owners, and its gathered value must be alive where any of them is used. It
therefore belongs to the innermost unit that contains all of its owners: often the root, but the unit itself when both
owners lie inside it, or when one module with the parameter is registered twice.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from graph_fsdp.compat import WrapPolicy, select_by_function
from graph_fsdp.passes.ir.settings import check_signature

# torch's wrap policies: policy objects (ModuleWrapPolicy, CustomPolicy), functions of
# (module, recurse, nonwrapped_numel), or, our shorthand, the classes or modules themselves; a tuple or list of
# modules is one unit, as in ``fully_shard([a, b])``.
AutoWrapPolicy: TypeAlias = Callable[..., bool] | Iterable[type[nn.Module]] | Any

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_MAX_CLASSES_IN_MESSAGE = 12
_ACCEPTED = (
    "pass None (repeated blocks become units), a set of module classes, a list of modules (a tuple in it is one unit "
    "of several), torch's ModuleWrapPolicy or CustomPolicy, or a function of (module, recurse, nonwrapped_numel) such "
    "as functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})"
)


@dataclass(frozen=True)
class Unit:
    """A unit is a group of parameters that is gathered, freed and reduced as one.

    ``name``: the qualified name of its first module, ``""`` for the root. ``modules``: its modules by name.
    ``parameters``: canonical names in registration order (see :func:`parameter_names`). ``gathered_by``: where all
    parameters of the module are tied to other units', the name of a unit that has them; ``parameters`` is then empty.
    """

    name: str
    modules: dict[str, nn.Module]
    parameters: tuple[str, ...]
    gathered_by: str | None = None


def find_units(
    model: nn.Module, auto_wrap_policy: AutoWrapPolicy | None = None, ignored_params: Collection[nn.Parameter] = ()
) -> list[Unit]:
    """Divide the model's parameters into units.

    Without a policy, repeated blocks are units: the children of a ``ModuleList``, ``Sequential`` or ``ModuleDict`` that
    share their class with a sibling, have submodules and hold parameters; of nested ones only the outermost. With a
    policy, which means what it means to :class:`torch.distributed.fsdp.FullyShardedDataParallel`, units may be nested.

    Returns:
        The root unit first, then units in the order of ``model.named_modules()``. Each parameter that is not ignored is
        in exactly one. Units without parameters are dropped, except chosen modules whose parameters are tied to others
        outside of them, since they can be called by themselves.

    Raises:
        TypeError: ``auto_wrap_policy`` is nothing that can select modules.
        ValueError: ``auto_wrap_policy`` selects no module that holds parameters, modules that are not the model's, or
            one in two units.
    """
    ignored = set(ignored_params)
    chosen = _select(model, auto_wrap_policy, ignored)
    groups = [group for modules in chosen if (group := tuple(filter(_has_parameters, modules)))]
    if not groups and _has_parameters(model) and auto_wrap_policy is not None:
        raise ValueError(_nothing_selected(model, auto_wrap_policy))

    names = {module: name for name, module in model.named_modules()}
    groups = [tuple(sorted(group, key=list(names).index)) if len(group) > 1 else group for group in groups]
    first_of = {module: group[0] for group in groups for module in group} | {model: model}
    parameters: dict[nn.Module, list[str]] = {module: [] for module in first_of.values()}
    owner: dict[str, nn.Module] = {}
    for parameter, parameters_names in parameter_names(model).items():
        if parameter not in ignored:
            unit = _owning_unit(model, parameters_names, first_of)
            parameters[unit].append(parameters_names[0])
            owner.update(dict.fromkeys(parameters_names, unit))
    modules_of = {group[0]: {names[module]: module for module in group} for group in groups}
    units = []
    for module, name in names.items():
        own = tuple(parameters.get(module, ()))
        tied = _tied_elsewhere(module, name, owner, names) if module in parameters and not own else None
        if own or tied is not None:
            units.append(Unit(name, modules_of.get(module, {name: module}), own, tied))
    return units


def _tied_elsewhere(
    module: nn.Module, name: str, owner: dict[str, nn.Module], names: dict[nn.Module, str]
) -> str | None:
    """Return the unit that has a parameter of ``module``, where ``module`` and the units below it have none."""
    below = set(module.modules())
    found = (owner.get(own) for own, _ in module.named_parameters(name, remove_duplicate=False))
    return next((names[unit] for unit in found if unit is not None and unit not in below), None)


def parameter_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return all qualified names of each parameter (tied ones have several) as registered, the canonical first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []
    for container in model.modules():
        if not isinstance(container, _CONTAINERS):
            continue
        # ``is not None``: an empty Sequential, as of a shortcut, is false.
        composite = [c for c in container.children() if next(c.children(), None) is not None and _has_parameters(c)]
        count = Counter(type(child) for child in composite)
        blocks += [child for child in composite if count[type(child)] > 1]
    inside = {module for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if block not in inside]


def _select(model: nn.Module, policy: AutoWrapPolicy, ignored: set[nn.Parameter]) -> list[tuple[nn.Module, ...]]:
    """Return the modules that the policy chooses, by unit; the root is among them if the policy says so."""
    if policy is None:
        return [(block,) for block in _repeated_blocks(model)]
    if isinstance(policy, WrapPolicy):
        return [(module,) for module in policy._run_policy(model, ignored_modules=set(), root_kwargs={})]
    if isinstance(policy, type):
        hint = f" did you mean {{{policy.__name__}}}?" if issubclass(policy, nn.Module) else ""
        raise TypeError(f"auto_wrap_policy is the class {policy.__name__};{hint} {_ACCEPTED}.")
    if callable(policy) and not isinstance(policy, nn.Module):
        what = f"auto_wrap_policy {_describe(policy)}"
        check_signature(what, policy, f"{_ACCEPTED}.", module=None, recurse=True, nonwrapped_numel=0)
        return [(module,) for module in select_by_function(model, policy, ignored)]
    if isinstance(policy, Iterable) and not isinstance(policy, nn.Module | str | bytes | Mapping):
        return _select_listed(model, tuple(policy))
    raise TypeError(f"auto_wrap_policy is {_describe(policy)} of type {type(policy).__name__}; {_ACCEPTED}.")


def _select_listed(model: nn.Module, listed: tuple[Any, ...]) -> list[tuple[nn.Module, ...]]:
    """Return the units of listed classes, modules, and tuples or lists of modules; a module goes before its class."""
    classes: list[type[nn.Module]] = []
    groups: list[tuple[nn.Module, ...]] = []
    for value in listed:
        if isinstance(value, type) and issubclass(value, nn.Module):
            classes.append(value)
            continue
        group = (value,) if isinstance(value, nn.Module) else value
        if not isinstance(group, (tuple, list)) or not all(isinstance(module, nn.Module) for module in group):
            raise TypeError(
                f"auto_wrap_policy holds {value!r}, which is not a module class, a module or modules; {_ACCEPTED}."
            )
        groups.append(tuple(dict.fromkeys(group)))
    _check_groups(model, groups)
    grouped = {module for group in groups for module in group}
    found = [module for module in model.modules() if isinstance(module, tuple(classes)) and module not in grouped]
    return [*groups, *((module,) for module in found)]


def _check_groups(model: nn.Module, groups: list[tuple[nn.Module, ...]]) -> None:
    names = {module: name for name, module in model.named_modules()}
    seen: set[nn.Module] = set()
    for group in groups:
        for module in group:
            if module not in names:
                raise ValueError(
                    f"auto_wrap_policy lists a {type(module).__name__} that is no module of the model; list modules "
                    "of the model that is compiled"
                )
            if module in seen:
                raise ValueError(f"auto_wrap_policy lists module {names[module]!r} twice; a module is in one unit")
            seen.add(module)
            inner = next((names[other] for other in module.modules() if other is not module and other in group), None)
            if inner is not None:
                raise ValueError(
                    f"auto_wrap_policy makes one unit of {names[module] or 'the model'!r} and of {inner!r} inside it; "
                    "a unit has all that is inside its modules: list the outer one alone, or both by themselves"
                )


def _owning_unit(model: nn.Module, names: list[str], first_of: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return the first module of the innermost unit that is on the path to every name ([Note: tied parameters])."""
    paths = [[first_of[m] for m in modules_on_path(model, name.rpartition(".")[0]) if m in first_of] for name in names]
    return next(unit for unit in reversed(paths[0]) if all(unit in path for path in paths))


def modules_on_path(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the modules from ``model`` down to the one of this name, both included."""
    path = [model]
    for part in name.split(".") if name else ():
        path.append(path[-1].get_submodule(part))
    return path


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _describe(policy: object) -> str:
    """Return a policy as the user wrote it, without the memory addresses in the reprs of functions."""
    if isinstance(policy, functools.partial):
        keywords = [f"{key}={_describe(value)}" for key, value in policy.keywords.items()]
        arguments = [_describe(policy.func), *map(_describe, policy.args), *keywords]
        return f"functools.partial({', '.join(arguments)})"
    if isinstance(policy, set | frozenset | list | tuple):
        return "{" + ", ".join(_describe(element) for element in policy) + "}"
    if isinstance(policy, nn.Module):
        return type(policy).__name__
    return getattr(policy, "__qualname__", None) or repr(policy)


def _nothing_selected(model: nn.Module, policy: AutoWrapPolicy) -> str:
    modules = list(model.modules())
    classes = Counter(type(module).__name__ for module in modules if _has_parameters(module))
    listed = ", ".join(f"{name} ({count})" for name, count in classes.most_common(_MAX_CLASSES_IN_MESSAGE))
    if len(classes) > _MAX_CLASSES_IN_MESSAGE:
        listed += f" and {len(classes) - _MAX_CLASSES_IN_MESSAGE} more"
    return (
        f"auto_wrap_policy {_describe(policy)} was asked about all {len(modules)} modules of {type(model).__name__} "
        f"and selects none that holds parameters. The classes that do: {listed}. Name one of these classes (or lower "
        "min_num_params), pass auto_wrap_policy=None to make each repeated block a unit, or "
        f"{{{type(model).__name__}}}, the model's own class, to make all of it one unit."
    )
