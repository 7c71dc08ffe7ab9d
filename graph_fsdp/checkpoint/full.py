"""Load weights into compiled models, from safetensors files or from a whole state dict that one rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from graph_fsdp.checkpoint.together import mesh_of_all
from graph_fsdp.initialise.initial_values import agreeing_on_values, checkpoint_facts
from graph_fsdp.initialise.safetensors_files import AnyPath, Safetensors
from graph_fsdp.initialise.state_keys import IncompatibleKeys, Rename, check_whole, match_keys
from graph_fsdp.passes.ir.settings import check_flags
from graph_fsdp.report.report import engine_of


def load_safetensors(
    model: nn.Module, path: AnyPath | Sequence[AnyPath], *, strict: bool = True, rename: Rename | None = None
) -> IncompatibleKeys:
    """Load safetensors files into a compiled model. All ranks call it, and each reads its own rows.

    Floating-point values are cast to the shards' dtype. Takes the arguments of :class:`Safetensors`, and returns what
    ``load_state_dict`` returns.

    Raises:
        CheckpointError: on every rank, before anything is written: the files cannot be read or do not fit the model.
        RankDisagreement: ranks were given different files, or another rank cannot read its own; on every rank, before
            anything is written.
    """
    mesh = engine_of(model).storage.mesh
    facts: list[str] = []
    with agreeing_on_values(mesh, facts):
        check_flags(strict=strict)
        files, matched = Safetensors(path, strict, rename).match(model)
        facts += checkpoint_facts(files, matched)
    files.read((key, value) for value, key in matched.key_of.items())
    return matched.incompatible


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True
) -> IncompatibleKeys:
    """Load whole tensors of rank 0 into a compiled model. All ranks call it; the ``state_dict`` of others is not looked
    at (None). Tensors go whole to all ranks, one after the other, by ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: on rank 0, before anything is written: the keys or shapes do not fit the model.
        TypeError: likewise: it is no dict of whole tensors, or one is on the meta device or sparse.
        RankDisagreement: the same, on the other ranks.
        ValueError: the default process group has ranks that hold nothing of the model.
    """
    mesh = mesh_of_all(engine_of(model))
    if mesh is not None and len(mesh.ranks) != dist.get_world_size():
        raise ValueError(
            f"model: its mesh has {len(mesh.ranks)} of {dist.get_world_size()} ranks, and load_full_state_dict takes a "
            "model on all of them; write the state dict to a safetensors file, and use load_safetensors"
        )
    first = mesh is None or dist.get_rank() == 0
    values: dict[str, Tensor] = {}
    incompatible = IncompatibleKeys([], [])
    with agreeing_on_values(mesh, []):
        check_flags(strict=strict)
        if first:
            values, incompatible = _fitting(model, state_dict, strict)
    if mesh is not None:
        box = [incompatible]
        dist.broadcast_object_list(box, src=0)
        (incompatible,) = box
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=mesh is not None, strict=False)
    set_model_state_dict(model, dict(values), options=options)
    return incompatible


def _fitting(
    model: nn.Module, state_dict: Mapping[str, Tensor] | None, strict: bool
) -> tuple[dict[str, Tensor], IncompatibleKeys]:
    """Return what of a whole state dict goes into the model, under the first of a tied parameter's names, the only one
    that torch.distributed.checkpoint knows of a module that is registered twice."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict of whole tensors on rank 0, got {type(state_dict).__name__}")
    for key, value in state_dict.items():
        check_whole("state_dict", key, value, subclasses=False)
    shapes = {key: value.shape for key, value in state_dict.items()}
    matched = match_keys(model, shapes, strict=strict, where="a state dict")
    last_first = reversed(model.state_dict(keep_vars=True).items())
    first_name = {value: name for name, value in last_first if isinstance(value, Tensor)}
    return {first_name[value]: state_dict[key] for value, key in matched.key_of.items()}, matched.incompatible
