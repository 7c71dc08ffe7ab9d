"""Load a training: check first all that can be known without changing anything, then read the values.

[Note: states that are not there yet]
An optimizer makes a parameter's state when it first steps with a gradient. A new one is given states by
``get_optimizer_state_dict``, which takes a step with gradients and a learning rate of zero. What the checkpoint has is
read into them, and states that it lacks (of an expert that had no gradient) are removed again.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer

from graph_fsdp.checkpoint.extra import EXTRA, ExtraValues, check_extra
from graph_fsdp.checkpoint.files import access_of, read
from graph_fsdp.checkpoint.group import Ranks
from graph_fsdp.checkpoint.hosts import is_in_memory
from graph_fsdp.checkpoint.in_memory import bring_tensors, bring_values
from graph_fsdp.checkpoint.metadata import Checkpoint, Entries, empty, joined, unfit
from graph_fsdp.checkpoint.saving import finish_pending
from graph_fsdp.checkpoint.state import (
    MODEL,
    OPTIMIZER,
    RNG,
    leaves,
    nested,
    optimizers_of,
    parameter_names,
    set_random_state,
    states_by_name,
)
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.initialise.state_keys import IncompatibleKeys, check_fit, listed
from graph_fsdp.optimizers.groups import parameters_of
from graph_fsdp.passes.ir.settings import check_flags, check_path

_NO_PATH = (
    "path is None: checkpoint.latest(…) has found no complete checkpoint in its folder; call load only where it has "
    "found one, and train from the beginning otherwise"
)


def load(
    path: AnyPath,
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    random_states: bool = True,
    verify: bool = True,
    model_key: str = MODEL,
    optimizer_key: str = OPTIMIZER,
) -> dict[str, Any]:
    """Load a checkpoint into a model, an optimizer and whatever else has a state. All ranks of the model call it, and
    each reads what it holds. Ranks, mesh, buckets and dtypes may differ from those that saved. Whatever
    ``torch.distributed.checkpoint`` has written can be loaded, as from FSDP2. Of one in memory, which
    ``latest(folder, model)`` has found, hosts send each other the files that they have lost, or that are damaged.

    Nothing in the checkpoint is run: what is not a tensor is loaded with ``weights_only=True``.

    Args:
        optimizer: one, or several, as was saved. None: its state stays unread.
        extra: by the names with which they were saved, objects with a ``load_state_dict()``, and DTensors to read into.
        random_states: set torch's, Python's and NumPy's random states to this rank's when it was saved. A rank that was
            not there then keeps its own.
        verify: compare what this rank will read with its saved sums before anything is changed, which reads memory
            once. Checkpoints of other programs have no sums.
        model_key, optimizer_key: where the two are in a checkpoint of another program; ``model_key=""``: the model's
            names are the keys.

    Returns:
        What was saved as ``extra``: of what has a ``load_state_dict()``, its state.

    Raises:
        CheckpointError: on all ranks. The checkpoint is not there, damaged, or does not fit the model or the optimizer;
            the message names what differs. Nothing was changed, unless it could not be read a second time.
        TypeError, ValueError: an argument is wrong, such as an optimizer of another model's parameters.
    """
    ranks = Ranks.of(model)
    with ranks.agreeing([]):  # an error of an earlier save may be known to one of them
        if path is None:  # on all ranks, or on one whose disk is its own
            raise TypeError(_NO_PATH)
        check_path("path", path)
        finish_pending()
        in_memory, mine = is_in_memory(path), f"{RNG}.{ranks.index}"
    if in_memory:
        bring_values(ranks, Path(path), mine, verify)
    facts = [] if in_memory else [os.path.abspath(path)]
    with ranks.agreeing(facts):
        check_flags(random_states=random_states, verify=verify)
        check_extra(extra)
        optimizers = optimizers_of(optimizer)
        facts.append(f"{len(optimizers)} optimizers")
        checkpoint = Checkpoint.open(path)
        if ranks.is_first and not in_memory:  # once is enough, and takes as long as there are files
            checkpoint.check_files()
        state, of_model = match_model(model, checkpoint, model_key, (optimizer_key, EXTRA, RNG))
        optimizer_values = OptimizerValues(model, optimizers, checkpoint, optimizer_key)
        extra_values = ExtraValues(extra or {}, checkpoint)
        names = checkpoint.under(mine) if random_states else {}
        random_values = {name: checkpoint.value(f"{mine}.{name}") for name in names}
    try:
        with ranks.agreeing([]):
            optimizer_values.prepare()
        wanted = {**of_model.wanted, **optimizer_values.wanted, **extra_values.wanted}
        access = access_of(model)
        filled = {key: access.to_fill(tensor, key in optimizer_values.wanted) for key, tensor in wanted.items()}
        if in_memory:
            bring_tensors(ranks, checkpoint, filled, verify)
        read(checkpoint, filled, ranks, verify and not in_memory)
        for key, tensor in wanted.items():
            access.filled(tensor, filled[key])
    except BaseException:
        optimizer_values.undo()
        raise
    set_model_state_dict(model, state, options=StateDictOptions(strict=False))  # runs the modules' load hooks
    optimizer_values.finish()
    found = extra_values.finish()
    if random_values:
        set_random_state(model, random_values)
    return found


class StateMatch:
    """Matches a nested state dict with the entries below a key. ``entries``: by their names in the state. ``wanted``:
    the tensors to read into; what is no tensor is read into the state when this is made."""

    def __init__(self, state: Any, entries: Entries, key: str, checkpoint: Checkpoint) -> None:
        self.wanted: dict[str, Tensor] = {}  # key of the checkpoint → what is read into
        self.absent: list[str] = []
        self.problems: list[str] = []
        self.names: set[str] = set()
        for container, place, value, name in leaves(state, ""):
            self.names.add(name)
            entry = entries.get(name)
            if entry is None:
                self.absent.append(name)
            elif isinstance(value, Tensor) != isinstance(entry, TensorStorageMetadata):
                self.problems.append(f"{name}: one is a tensor and the other is not")
            elif isinstance(entry, TensorStorageMetadata):
                if problem := unfit(name, entry, value):
                    self.problems.append(problem)
                self.wanted[joined(key, name)] = value
            else:
                container[place] = checkpoint.value(joined(key, name))
        self.unexpected = [name for name in entries if name not in self.names]


def match_model(model: nn.Module, checkpoint: Checkpoint, key: str, others: Sequence[str]) -> tuple[Any, StateMatch]:
    """Return the model's state dict, matched with the entries below ``key``. ``others``: top-level keys that are not
    the model's, where its names are keys without a prefix.

    Raises:
        CheckpointError: worded as by ``nn.Module.load_state_dict``, the checkpoint is another model's.
    """
    entries = checkpoint.under(key)
    if not key:
        entries = {name: entry for name, entry in entries.items() if name.split(".")[0] not in others}
    if not entries:
        raise CheckpointError(
            f"{checkpoint.path} has nothing under {key!r}; its keys begin with {listed(checkpoint.roots)}: say by "
            'model_key which is the model\'s ("" for none)'
        )
    state = get_model_state_dict(model)
    matched = StateMatch(state, entries, key, checkpoint)
    tied = dict(model.named_parameters(remove_duplicate=False))  # one of a parameter's names is enough
    read = {tied.get(name, name) for name in matched.names.difference(matched.absent)}
    missing = [name for name in matched.absent if tied.get(name, name) not in read]
    check_fit(model, str(checkpoint.path), IncompatibleKeys(missing, matched.unexpected), matched.problems)
    return state, matched


class OptimizerValues:
    """Matches optimizers with a checkpoint when made. Raises CheckpointError if it is of others."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], checkpoint: Checkpoint, key: str) -> None:
        self.model, self.optimizers, self.checkpoint, self.key = model, optimizers, checkpoint, joined(key, "state")
        self.names = parameter_names(model, optimizers)
        self.wanted: dict[str, Tensor] = {}
        self._before: list[tuple[Optimizer, dict[Any, Any]]] = []
        self._state: dict[str, Any] = {}
        self._groups = self._read_groups(joined(key, "param_groups")) if optimizers else []
        if optimizers and not self._groups:
            raise CheckpointError(
                f"{checkpoint.path} has no optimizer under {key!r}; its keys begin with {listed(checkpoint.roots)}: "
                "say by optimizer_key which is its, or load without the optimizer"
            )
        self._owned = {name for optimizer in optimizers for name in self._names(parameters_of(optimizer))}
        self._match_parameters()
        self._states = checkpoint.under(self.key) if optimizers else {}
        self._saved = self._owned & {name for path in self._states for name in _beginnings(path)}

    def prepare(self) -> None:
        """Make the states that the checkpoint has; ``wanted`` is complete afterwards. Raises CheckpointError, after
        which ``undo`` is to be called, if they are another kind of optimizer's."""
        for optimizer in self.optimizers:
            saved = {p for p in parameters_of(optimizer) if self.names[p] in self._saved}
            here = {p for p in parameters_of(optimizer) if p.requires_grad} | saved
            held = {parameter for parameter, state in optimizer.state.items() if state}
            if saved and here - held:
                self._before.append((optimizer, dict(optimizer.state)))
                _initialise(self.model, optimizer, here)
            self._state.update(states_by_name(optimizer, self.names))
        matched = StateMatch(self._state, self._states, self.key, self.checkpoint)
        self.wanted.update(matched.wanted)
        problems = [f"the optimizer has no {listed(matched.unexpected)}"] if matched.unexpected else []
        problems += [f"{name} is not in the checkpoint" for name in matched.absent if self._saved & _beginnings(name)]
        if problems := problems + matched.problems:
            lines = "\n\t".join(problems[:20])
            raise CheckpointError(f"{self.checkpoint.path} is of another optimizer:\n\t{lines}")

    def undo(self) -> None:
        """Make the optimizers what they were before ``prepare``."""
        for optimizer, state in self._before:
            optimizer.state.clear()
            optimizer.state.update(state)

    def finish(self) -> None:
        """Give the optimizers what was read. Called after the tensors were read into."""
        for optimizer in self.optimizers:
            groups = [self._saved_group(group) for group in optimizer.param_groups]
            names = [name for group in groups for name in group["params"]]
            state = {number: self._state[name] for number, name in enumerate(names) if name in self._saved}
            numbers = itertools.count()
            for group in groups:
                group["params"] = [next(numbers) for _ in group["params"]]
            optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _names(self, parameters: Iterable[Tensor]) -> list[str]:
        return [self.names[parameter] for parameter in parameters]

    def _read_groups(self, key: str) -> list[dict[str, Any]]:
        """Return the saved groups, each with its "params" by name; one per parameter of a flattened state dict."""
        places = self.checkpoint.metadata.planner_data or {}
        found: dict[Any, dict[tuple[Any, ...], Any]] = {}
        for path, entry in self.checkpoint.under(key).items():
            if isinstance(entry, BytesStorageMetadata):
                value = self.checkpoint.value(joined(key, path))
            else:
                value = self.wanted[joined(key, path)] = empty(entry)
            name, _, option = path.rpartition(".")
            group, *place = _below(key, places.get(joined(key, path), ())) or (name, option)
            found.setdefault(group, {})[tuple(place)] = value
        groups = {group: nested(options) for group, options in found.items()}
        if all("params" in group for group in groups.values()):
            return list(groups.values())
        return [{**options, "params": [name]} for name, options in groups.items()]

    def _match_parameters(self) -> None:
        """Check that the checkpoint has the optimizers' parameters, and that the same ones are in a group together."""
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
        """Return a group of an optimizer with what was saved of it; options of newer torch versions stay."""
        names = self._names(group["params"])
        saved = next((g for g in self._groups if not names or names[0] in g["params"]), {})
        return {**group, **saved, "params": names}


def _below(key: str, place: Sequence[Any]) -> Sequence[Any]:
    """Return the rest of an entry's place in what was saved, below a key; () where no part of it is that key."""
    beginnings = list(itertools.accumulate(map(str, place), "{}.{}".format))
    return place[beginnings.index(key) + 1 :] if key in beginnings else ()


def _beginnings(path: str) -> set[str]:
    """Return what stands before each dot of a path, and all of it: one is the name of the state's parameter."""
    return set(itertools.accumulate(path.split("."), "{}.{}".format))


def _initialise(model: nn.Module, optimizer: Optimizer, parameters: Collection[Tensor]) -> None:
    """Give these of its parameters new states, and others none. Frozen ones have states of steps before they were
    frozen. Gradients stay, as they would keep torch from making states."""
    optimizer.state.clear()
    before = [(p, p.grad, p.requires_grad) for p in parameters_of(optimizer)]
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    for p, _, _ in before:
        p.grad = None
        if p in parameters:
            p.requires_grad_(True)
    try:
        get_optimizer_state_dict(model, optimizer)
    except Exception as error:
        raise CheckpointError(
            f"optimizer: {type(optimizer).__name__} has no states yet, and its step with gradients of zero, which "
            f"makes them, failed: {type(error).__name__}: {error}; have it step once before its state is loaded"
        ) from error
    finally:
        for group, options in groups:  # where the step failed, the learning rate is zero
            group.update(options)
        for p, gradient, is_trained in before:
            p.grad = gradient
            p.requires_grad_(is_trained)
