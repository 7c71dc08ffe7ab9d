"""Entries of a checkpoint are matched with optimizers' states and read into them.

[Note: states that are not there yet]
An optimizer makes a parameter's state when it first steps with a gradient. So a new one is given its states, by
``get_optimizer_state_dict``, which has it take a step with gradients of zero and a learning rate of zero; what the
checkpoint has is read into them; and states that the checkpoint does not have, as of an expert that had had no
gradient, are taken away again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from graph_fsdp.checkpoint.metadata import Checkpoint, empty, joined
from graph_fsdp.checkpoint.model_values import StateMatch
from graph_fsdp.checkpoint.state import parameter_names
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.state_keys import listed

_GROUPS = "param_groups"


class OptimizerValues:
    """Matched when made, as far as that goes without changing the optimizers: CheckpointError if the checkpoint is of
    others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint, key: str) -> None:
        self.model, self.optimizers, self.checkpoint, self.key = model, optimizers, checkpoint, joined(key, "state")
        self.names = parameter_names(model)
        self.wanted: dict[str, Tensor] = {}
        self._before: list[tuple[Optimizer, dict[Any, Any]]] = []
        self._state: dict[str, Any] = {}
        self._groups = self._read_groups(joined(key, _GROUPS)) if optimizers else []
        if optimizers and not self._groups:
            raise CheckpointError(
                f"{checkpoint.path} has no optimizer under {key!r}; its keys begin with {listed(checkpoint.roots)}: "
                "say by optimizer_key which is its, or load without the optimizer"
            )
        self._owned = {name for o in optimizers for group in o.param_groups for name in self._names(group["params"])}
        self._match_parameters()
        self._states = checkpoint.under(self.key) if optimizers else {}
        self._saved = self._owned & {name for path in self._states for name in _beginnings(path)}

    def prepare(self) -> None:
        """Make the states that the checkpoint has; ``wanted`` is complete afterwards.

        Raises:
            CheckpointError: the checkpoint's are of another kind of optimizer. Call ``undo`` then.
        """
        for optimizer in self.optimizers:
            here = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
            held = {parameter for parameter, state in optimizer.state.items() if state}
            if here - held and not self._saved.isdisjoint(self._names(here)):
                self._before.append((optimizer, dict(optimizer.state)))
                _initialise(self.model, optimizer)
            if optimizer.state:
                state = get_optimizer_state_dict(self.model, optimizer)["state"]
                assert isinstance(state, dict)
                self._state.update(state)
        matched = StateMatch(self._state, self._states, self.key, self.checkpoint)
        self.wanted.update(matched.wanted)
        problems = [f"the optimizer has no {listed(matched.unexpected)}"] if matched.unexpected else []
        problems += [f"{name} is not in the checkpoint" for name in matched.absent if self._saved & _beginnings(name)]
        if problems := problems + matched.problems:
            lines = "\n\t".join(problems[:20])
            raise CheckpointError(f"{self.checkpoint.path} is of another optimizer:\n\t{lines}")

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

    def _names(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self.names[parameter] for parameter in parameters]

    def _read_groups(self, key: str) -> list[dict[str, Any]]:
        """The saved groups, each with its "params", by name. Of a flattened state dict, each parameter is a group."""
        found: dict[str, dict[str, Any]] = {}
        for path, entry in self.checkpoint.under(key).items():
            rest, _, option = path.rpartition(".")
            if isinstance(entry, BytesStorageMetadata):
                value = self.checkpoint.value(joined(key, path))
            else:
                value = self.wanted[joined(key, path)] = empty(entry)
            found.setdefault(rest, {})[option] = value
        if all("params" in group for group in found.values()):
            return list(found.values())
        return [{**options, "params": [name]} for name, options in found.items()]

    def _match_parameters(self) -> None:
        """The same parameters have the same options together."""
        saved = {name for group in self._groups for name in group["params"]}
        problems: list[str] = []
        if missing := sorted(self._owned - saved):
            problems.append(f"it has no state of {listed(missing)}")
        if foreign := sorted(saved - self._owned):
            problems.append(f"the optimizer does not have {listed(foreign)}")
        mine = [(at, group) for optimizer in self.optimizers for at, group in enumerate(optimizer.param_groups)]
        for at, group in mine if not problems else ():
            names = set(self._names(group["params"]))
            if any(len(names & set(g["params"])) not in (0, len(g["params"])) for g in self._groups):
                problems.append(f"parameters of group {at} are in a group with others, as {listed(sorted(names))}")
        if problems:
            raise CheckpointError(f"{self.checkpoint.path} is of another optimizer: {'; '.join(problems)}")

    def _saved_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of an optimizer with what was saved of it; options that torch has only now stay."""
        names = self._names(group["params"])
        saved = next((g for g in self._groups if not names or names[0] in g["params"]), {})
        return {**group, **saved, "params": names}


def _beginnings(path: str) -> set[str]:
    """What stands before each dot of a path, and all of it: one is the name of the parameter whose state it is."""
    return set(itertools.accumulate(path.split("."), "{}.{}".format))


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
