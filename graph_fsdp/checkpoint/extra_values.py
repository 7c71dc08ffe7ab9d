"""Entries of a checkpoint that belong neither to the model nor to the optimizer are read here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from graph_fsdp.checkpoint import extra as extras
from graph_fsdp.checkpoint.metadata import Checkpoint, empty
from graph_fsdp.checkpoint.model_values import listed, unfit
from graph_fsdp.checkpoint.state import EXTRA
from graph_fsdp.errors import CheckpointError


class ExtraValues:
    """Matched when made with what the caller has under the same names. ``wanted``: tensors that are read into. The
    caller's DTensors are; of all else each rank gets a copy of its own."""

    def __init__(self, given: Mapping[str, Any], checkpoint: Checkpoint) -> None:
        self.given = given
        self.wanted: dict[str, Tensor] = {}
        self.structure: dict[str, Any] = {}
        self.tensors: dict[extras.Path, Tensor] = {}
        paths: dict[str, extras.Path] = {}
        if f"{EXTRA}.structure" in checkpoint.entries:
            self.structure, paths = extras.decode(checkpoint.value(f"{EXTRA}.structure"))
        if unknown := sorted(set(given) - set(self.structure)):
            raise CheckpointError(
                f"{checkpoint.path} has no extra {listed(unknown)}; it has {listed(sorted(self.structure)) or 'none'}"
            )
        _, here = extras.take_apart({name: extras.state_of(value) for name, value in given.items()}, EXTRA)
        entries = checkpoint.tensors
        for name, path in paths.items():
            at, mine = f"{EXTRA}.tensors.{name}", here.get(path)
            if at not in entries:
                raise CheckpointError(f"{checkpoint.path} has no tensor {at!r}")
            if not isinstance(mine, DTensor):
                mine = empty(entries[at])
            elif problem := unfit(at, entries[at], mine):
                raise CheckpointError(f"{checkpoint.path} is of another training: {problem}")
            self.tensors[path] = self.wanted[at] = mine

    def finish(self) -> dict[str, Any]:
        """After the tensors were read into: what has a state gets it. All that was saved."""
        found: dict[str, Any] = extras.put_together(self.structure, self.tensors)
        for name, value in self.given.items():
            if extras.is_stateful(value):
                value.load_state_dict(found[name])
        return found
