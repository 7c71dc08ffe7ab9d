"""Entries of a checkpoint are matched with optimizers' states and read into them.

[Note: states that are not there yet]
An optimizer makes a parameter's state when it first steps with a gradient. So a new one is given its states, by
``get_optimizer_state_dict``, which has it take a step with gradients of zero and a learning rate of zero; what the
checkpoint has is read into them; and states that the checkpoint does not have, as of an expert that had had no
gradient, are taken away again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.checkpoint.model_values import listed, unfit
from graph_fsdp.checkpoint.state import leaves, parameter_names
from graph_fsdp.errors import CheckpointError

_GROUPS = "param_groups"
Entries: TypeAlias = "dict[str, TensorStorageMetadata | BytesStorageMetadata]"


class OptimizerValues:
    """Matched when made, as far as that goes without changing the optimizers: CheckpointError if the checkpoint is of
    others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint, key: str) -> None:
        self.model, self.optimizers, self.checkpoint, self.key = model, optimizers, checkpoint, key
        self.names = parameter_names(model)
        self.wanted: dict[str, Tensor] = {}
        self._before: list[tuple[Optimizer, dict[Any, Any]]] = []
        self._state: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        self._states: Entries = {}
        self._saved: set[str] = set()
        if not optimizers:
            return
        entries = checkpoint.under(key)
        if not any(name.startswith(f"{_GROUPS}.") for name in entries):
            found = sorted({name.split(".")[0] for name in checkpoint.entries})
            raise CheckpointError(
                f"{checkpoint.path} has no optimizer under {key!r}; its keys begin with {listed(found)}: say by "
                "optimizer_key which is its, or load without the optimizer"
            )
        self._states = {name.removeprefix("state."): e for name, e in entries.items() if name.startswith("state.")}
        self._groups = self._read_groups(entries)
        self._match_parameters()

    def prepare(self) -> None:
        """Make the states that the checkpoint has; ``wanted`` is complete afterwards.

        Raises:
            CheckpointError: the checkpoint's are of another kind of optimizer. Call ``undo`` then.
        """
        if not self.optimizers:
            return
        saved = {name for name in self._owned() if any(entry.startswith(f"{name}.") for entry in self._states)}
        for optimizer in self.optimizers:
            here = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            held = {parameter for parameter, state in optimizer.state.items() if state}
            if here - held and saved & {self.names[p] for p in here}:
                self._before.append((optimizer, dict(optimizer.state)))
                _initialise(self.model, optimizer)
        self._state = {}
        for optimizer in self.optimizers:
            if optimizer.state:
                state = get_optimizer_state_dict(self.model, optimizer)["state"]
                assert isinstance(state, dict)
                self._state.update(state)
        problems: list[str] = []
        known: set[str] = set()
        for container, place, value, path in leaves(self._state, ""):
            known.add(path)
            entry = self._states.get(path)
            if entry is None:
                if path.removesuffix(f".{place}") in saved:
                    problems.append(f"{path} is not in the checkpoint")
            elif isinstance(value, Tensor) != isinstance(entry, TensorStorageMetadata):
                problems.append(f"{path}: one is a tensor and the other is not")
            elif isinstance(entry, TensorStorageMetadata):
                if problem := unfit(path, entry, value):
                    problems.append(problem)
                self.wanted[f"{self.key}.state.{path}"] = value
            else:
                container[place] = self.checkpoint.value(f"{self.key}.state.{path}")
        foreign = [path for path in self._states if path not in known]
        if foreign:
            problems.insert(0, f"the optimizer has no {listed(foreign)}")
        if problems:
            lines = "\n\t".join(problems[:20])
            raise CheckpointError(f"{self.checkpoint.path} is of another optimizer:\n\t{lines}")
        self._saved = saved

    def undo(self) -> None:
        """Optimizers are as before ``prepare``."""
        for optimizer, state in self._before:
            optimizer.state.clear()
            optimizer.state.update(state)

    def finish(self) -> None:
        """After the tensors were read into."""
        for optimizer in self.optimizers:
            groups = [self._saved_group(group) for group in optimizer.param_groups]
            names = {name for group in groups for name in group["params"]}
            state = {name: value for name, value in self._state.items() if name in names}
            if names & self._saved:
                options = StateDictOptions(strict=False)
                set_optimizer_state_dict(self.model, optimizer, {"state": state, _GROUPS: groups}, options=options)
            else:
                for group, saved in zip(optimizer.param_groups, groups, strict=True):
                    group.update({name: value for name, value in saved.items() if name != "params"})
            for parameter in list(optimizer.state):
                if self.names[parameter] not in self._saved:
                    del optimizer.state[parameter]

    def _owned(self) -> set[str]:
        """Names of the parameters that the optimizers have."""
        return {self.names[p] for o in self.optimizers for group in o.param_groups for p in group["params"]}

    def _read_groups(self, entries: Entries) -> list[dict[str, Any]]:
        """The saved groups, each with its "params", by name. Of a flattened state dict, each parameter is a group."""
        found: dict[str, dict[str, Any]] = {}
        for path in (path for path in entries if path.startswith(f"{_GROUPS}.")):
            rest, _, option = path.removeprefix(f"{_GROUPS}.").rpartition(".")
            found.setdefault(rest, {})[option] = self._value(f"{self.key}.{path}", entries[path])
        if all("params" in group for group in found.values()):
            return list(found.values())
        return [{**options, "params": [name]} for name, options in found.items()]

    def _value(self, key: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> Any:
        if isinstance(entry, BytesStorageMetadata):
            return self.checkpoint.value(key)
        value = torch.empty(entry.size, dtype=entry.properties.dtype)
        self.wanted[key] = value
        return value

    def _match_parameters(self) -> None:
        """The same parameters have the same options together."""
        saved = {name for group in self._groups for name in group["params"]}
        problems: list[str] = []
        if missing := sorted(self._owned() - saved):
            problems.append(f"it has no state of {listed(missing)}")
        if foreign := sorted(saved - self._owned()):
            problems.append(f"the optimizer does not have {listed(foreign)}")
        if not problems:
            for optimizer in self.optimizers:
                for at, group in enumerate(optimizer.param_groups):
                    names = {self.names[p] for p in group["params"]}
                    if any(len(names & set(g["params"])) not in (0, len(g["params"])) for g in self._groups):
                        problems.append(
                            f"parameters of group {at} are in a group with others, as {listed(sorted(names))}"
                        )
        if problems:
            raise CheckpointError(f"{self.checkpoint.path} is of another optimizer: {'; '.join(problems)}")

    def _saved_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of an optimizer with what was saved of it; options that torch has only now stay."""
        names = [self.names[p] for p in group["params"]]
        saved = next((g for g in self._groups if not names or names[0] in g["params"]), {})
        return {**group, **saved, "params": names}


def _initialise(model: nn.Module, optimizer: Optimizer) -> None:
    """Every trainable parameter gets a new state. Gradients stay, as they would keep torch from making states."""
    optimizer.state.clear()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [(p, p.grad) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        get_optimizer_state_dict(model, optimizer)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
