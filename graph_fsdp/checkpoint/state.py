"""A training as the tree that ``torch.distributed.checkpoint`` writes.

    model.NAME                          parameters and buffers, by the model's own names
    optimizer.state.NAME.exp_avg        as ``get_optimizer_state_dict`` gives it
    optimizer.param_groups.0.lr
    extra.structure, extra.tensors.…    see extra.py
    rng.RANK.…                          random states of each rank

Each rank gives its parts of DTensors and its random states. All else is the first rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from graph_fsdp.checkpoint import extra as extras
from graph_fsdp.checkpoint.random_state import random_state
from graph_fsdp.checkpoint.storage import TensorAccess

MODEL, OPTIMIZER, EXTRA, RNG = "model", "optimizer", "extra", "rng"


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer] | None) -> tuple[Optimizer, ...]:
    found = () if optimizer is None else (optimizer,) if isinstance(optimizer, Optimizer) else tuple(optimizer)
    wrong = next((o for o in found if not isinstance(o, Optimizer)), None)
    if wrong is not None:
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, some of them, or None, got {type(wrong).__name__}")
    return found


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """The names by which optimizers' states are saved: those of the model without what wrappers put into them."""
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        names[parameter] = name.replace("_orig_mod.", "").removeprefix("module.")
    return names


def training_state(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    extra: Mapping[str, Any],
    rank: int,
    access: TensorAccess,
) -> dict[str, Any]:
    """Return the tree that this rank writes.

    Raises:
        TypeError, ValueError: there is something in it that could not be loaded again.
    """
    tree: dict[str, Any] = {MODEL: get_model_state_dict(model)}
    if optimizers:
        tree[OPTIMIZER] = _optimizer_state(model, optimizers)
    for key, value in tree.items():
        extras.take_apart(value, key)
    if extra:
        structure, tensors = extras.take_apart({key: extras.state_of(value) for key, value in extra.items()}, EXTRA)
        keys = extras.tensor_keys(tensors)
        tree[EXTRA] = {
            "structure": extras.encode(structure, keys),
            "tensors": {key: tensors[path] for key, path in keys.items()},
        }
    if rank:
        tree = _sharded_part(tree) or {}
    tree[RNG] = {str(rank): random_state(model)}
    return {key: _written(value, access) for key, value in tree.items()}


def _optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    used = [optimizer for optimizer in optimizers if optimizer.state]
    made: dict[str, Any] = {"state": {}, "param_groups": []}
    names = parameter_names(model)
    for optimizer in optimizers:
        unknown = sum(p not in names for group in optimizer.param_groups for p in group["params"])
        if unknown:
            raise ValueError(f"optimizer has {unknown} parameters that are not the model's; make it after compile")
        if optimizer in used:
            state = get_optimizer_state_dict(model, optimizer)
            made["state"].update(state["state"])
            made["param_groups"] += state["param_groups"]
        else:  # get_optimizer_state_dict would have it take a step
            made["param_groups"] += [
                {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
            ]
    return made


def _sharded_part(value: Any) -> Any:
    """What of a tree is DTensors."""
    if isinstance(value, Mapping):
        found = {key: _sharded_part(item) for key, item in value.items()}
        return {key: item for key, item in found.items() if item is not None} or None
    if isinstance(value, (list, tuple)):  # as it is: places in it are part of keys
        return value if any(_sharded_part(item) is not None for item in value) else None
    return value if isinstance(value, DTensor) else None


def _written(value: Any, access: TensorAccess) -> Any:
    """A tree with what is written of its tensors, in new containers: those of the optimizer change in the next step."""
    if isinstance(value, Tensor):
        return access.to_write(value)
    if isinstance(value, Mapping):
        return {key: _written(item, access) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_written(item, access) for item in value)
    return value


def copied(value: Any) -> Any:
    """Return the tree with copies of its tensors on the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(item) for item in value)
    return value


def leaves(value: Any, path: str) -> Iterator[tuple[Any, Any, Any, str]]:
    """What torch.distributed.checkpoint has as entries: (container, place in it, value, path)."""
    items: Iterator[tuple[Any, Any]] = iter(value.items()) if isinstance(value, Mapping) else enumerate(value)
    for place, item in items:
        key = f"{path}.{place}" if path else str(place)
        if isinstance(item, Mapping) or (isinstance(item, list) and _has_entries(item)):
            yield from leaves(item, key)
        else:
            yield value, place, item, key


def _has_entries(value: list[Any]) -> bool:
    return any(isinstance(item, (Tensor, Mapping)) or (isinstance(item, list) and _has_entries(item)) for item in value)
