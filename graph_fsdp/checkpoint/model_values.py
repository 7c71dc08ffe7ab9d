"""Entries of a checkpoint are matched with a model's tensors and read into them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from graph_fsdp.checkpoint.metadata import Checkpoint, Entries, joined, unfit
from graph_fsdp.checkpoint.state import leaves
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.state_keys import IncompatibleKeys, check_fit, listed


class StateMatch:
    """A nested state dict beside the entries below a key: ``wanted`` tensors are to be read, and what is no tensor, of
    which there may be several entries, is in the state when this is made. ``entries``: by their names in the state."""

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


class ModelValues:
    """Matched when made: CheckpointError, worded as by ``nn.Module.load_state_dict``, if the checkpoint is another
    model's. ``others``: top-level keys that are not the model's, where its names are keys without a prefix."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, key: str, others: Sequence[str]) -> None:
        self.model = model
        self.state = get_model_state_dict(model)
        entries = checkpoint.under(key)
        if not key:
            entries = {name: entry for name, entry in entries.items() if name.split(".")[0] not in others}
        if not entries:
            raise CheckpointError(
                f"{checkpoint.path} has nothing under {key!r}; its keys begin with {listed(checkpoint.roots)}: say by "
                'model_key which is the model\'s ("" for none)'
            )
        matched = StateMatch(self.state, entries, key, checkpoint)
        self.wanted = matched.wanted
        tied = dict(model.named_parameters(remove_duplicate=False))  # one of a parameter's names is enough
        read = {tied.get(name, name) for name in matched.names.difference(matched.absent)}
        missing = [name for name in matched.absent if tied.get(name, name) not in read]
        where = str(checkpoint.path)
        check_fit(model, where, IncompatibleKeys(missing, matched.unexpected), matched.problems)

    def finish(self) -> None:
        """After the tensors were read into: what modules do when a state is loaded."""
        set_model_state_dict(self.model, self.state, options=StateDictOptions(strict=False))
