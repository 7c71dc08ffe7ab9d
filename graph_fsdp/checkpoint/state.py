"""A training is saved as the tree that ``torch.distributed.checkpoint`` writes.

    model.NAME                          parameters and buffers, by the model's own names
    optimizer.state.NAME.exp_avg        as ``get_optimizer_state_dict`` gives it
    optimizer.param_groups.0.lr
    extra.structure, extra.tensors.…    see extra.py
    rng.RANK.…                          random states of each rank

Each rank gives its parts of DTensors and its random states. All else is the first rank's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graph_fsdp import compat
from graph_fsdp.checkpoint.extra import EXTRA, extra_tree, put_together, take_apart
from graph_fsdp.initialise.materialise import random_states, set_random_states
from graph_fsdp.optimizers.groups import parameters_of

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    several = () if optimizer is None else optimizer
    found = tuple(several) if isinstance(several, Iterable) else (several,)
    for each in found:
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer, some of them, or None, got {type(each).__name__}"
            )
    return found


def parameter_names(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Tensor, str]:
    """Return the names by which optimizers' states are saved: the model's, without what wrappers put into them. Raises
    ValueError if an optimizer has parameters of something else."""
    names: dict[Tensor, str] = {
        p: name.replace("_orig_mod.", "").removeprefix("module.") for name, p in model.named_parameters()
    }
    for optimizer in optimizers:
        unknown = sum(p not in names for p in parameters_of(optimizer))
        if unknown and any("_graph_fsdp_whole" in vars(p) for p in names):
            raise ValueError(
                "model: its parameters are whole, and the optimizer has their shards; save and load outside of the "
                "block of graph_fsdp.unsharded"
            )
        if unknown:
            raise ValueError(f"optimizer has {unknown} parameters that are not the model's; make it after compile")
    return names


def training_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    extra: Mapping[str, Any],
    rank: int,
    to_write: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Return the tree that this rank writes, in containers of its own: the optimizer's change in the next step. Raises
    TypeError or ValueError for what could not be loaded again."""
    tree: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizers:
        tree[OPTIMIZER] = _optimizer_state(model, optimizers)
    tree = {key: put_together(*take_apart(value, key)) for key, value in tree.items()}
    if extra:
        tree[EXTRA] = extra_tree(extra)
    if rank:
        tree = {key: value for _, _, value, key in leaves(tree, "") if isinstance(value, DTensor)}
    tree[RNG] = {str(rank): _random_state(model)}
    written: dict[str, Any] = compat.tree_map_only(Tensor, to_write, tree)
    return written


def _optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    names = parameter_names(model, optimizers)
    for optimizer in optimizers:
        made["state"].update(states_by_name(optimizer, names))
        for group in optimizer.param_groups:
            made["param_groups"].append({**group, "params": [names[p] for p in group["params"]]})
    return made


def states_by_name(optimizer: Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """Return the states that an optimizer has, by the names of their parameters. (``get_optimizer_state_dict`` would
    have one without states take a step.) Raises TypeError for a state of no parameter, which has no such name."""
    parameters, states = parameters_of(optimizer), optimizer.state_dict()["state"]
    if others := [key for key in states if not isinstance(key, int)]:
        raise TypeError(
            f"optimizer: {type(optimizer).__name__} keeps a state {others[0]!r} that is no parameter's, which "
            "checkpoints have no place for, torch.distributed.checkpoint's neither; have each rank torch.save its "
            "optimizer.state_dict() instead"
        )
    return {names[parameters[number]]: state for number, state in states.items()}


def leaves(value: Any, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
    """Yield what torch.distributed.checkpoint has as entries: (container, place in it, value, path)."""
    items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
    for place, item in items:
        key = f"{path}.{place}" if path else str(place)
        if _has_entries(item):
            yield from leaves(item, key)
        else:
            yield value, place, item, key


def nested(values: Mapping[tuple[Any, ...], Any]) -> Any:
    """Return the dicts, and lists where keys are numbers, that have these values at these paths: what ``leaves`` takes
    apart, but for the keys of dicts, which are text."""
    if () in values:
        return values[()]
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (first, *rest), value in values.items():
        parts.setdefault(first, {})[tuple(rest)] = value
    made = {place: nested(inside) for place, inside in parts.items()}
    return made if any(isinstance(place, str) for place in made) else [made[place] for place in sorted(made)]


def _has_entries(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, Tensor) or _has_entries(item) for item in value)
    return isinstance(value, Mapping)


def _random_state(model: nn.Module) -> dict[str, Any]:
    """Return this rank's random states as tensors, and as tuples of tensors and numbers."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {**random_states(_device_of(model)), "python": (version, torch.tensor(numbers), gauss)}
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = (name, torch.tensor(keys.tolist()), *rest)
    return state


def set_random_state(model: nn.Module, state: dict[str, Any]) -> None:
    set_random_states(state, _device_of(model))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        name, keys, *rest = state["numpy"]
        sys.modules["numpy"].random.set_state((name, keys.numpy(), *rest))


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
