"""Models whose parameters are on the meta device before they are compiled, and get their values by an option."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from random_cases import Case
from safetensors.torch import save_file
from torch import Tensor, nn


def without_values(case: Case, model: nn.Module, ignored: Set[nn.Parameter], rank: int, folder: Path) -> dict[str, Any]:
    """Move parameters to the meta device, but for those to be ignored. Return the options that give their values.
    ``folder``: for what they read."""
    how = case.options.compile.get("values")
    if how is None:
        return {}
    if how == "checkpoint" and any(p.is_complex() for p in model.parameters()):
        how = "param_init_fn"  # safetensors have no complex numbers of this size
    options: dict[str, Any] = {"sync_module_states": True}
    if how == "checkpoint":
        options = {"checkpoint": _saved(model.state_dict(), folder / "model.safetensors")}
    elif how == "param_init_fn":
        of_module = {m: {name: p.detach() for name, p in m.named_parameters(recurse=False)} for m in model.modules()}
        options = {"param_init_fn": lambda module: _initialise(module, of_module[module])}
    made = {p: nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}
    for module in model.modules() if how != "first rank" or rank else ():
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, p if p in ignored else made[p])  # which recurrent modules notice
    return options


def _saved(values: dict[str, Tensor], file: Path) -> Path:
    plain = {name: getattr(value, "_data", value) for name, value in values.items()}  # what an extension wraps
    save_file({name: value.clone().contiguous() for name, value in plain.items()}, file)
    return file


def _initialise(module: nn.Module, values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, value in values.items():
            getattr(module, name).copy_(value)
