"""Checkpoints for tests: models' values in safetensors files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from models import MLP, UnevenBlock
from reference import whole
from safetensors.torch import save_file
from torch import Tensor, nn


def uneven() -> nn.Module:
    return MLP(block=UnevenBlock)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def saved(state: dict[str, Tensor], path: Path) -> Path:
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


def check_equal(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = {name: whole(value) for name, value in model.state_dict().items()}
    assert list(found) == list(expected)
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


class Split:
    """A checkpoint of a model, in one file and in two with an index."""

    def __init__(self, folder: Path, model: nn.Module) -> None:
        self.folder, self.state = folder, state_of(model)
        names = list(self.state)
        parts = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
        for file, keys in parts.items():
            saved({key: self.state[key] for key in keys}, folder / file)
        self.files = [folder / file for file in parts]
        (folder / "whole").mkdir()
        self.whole = saved(self.state, folder / "whole" / "model.safetensors")
        self.index = folder / "whole" / "model.safetensors.index.json"
        self.weight_map = {key: f"../{file}" for file, keys in parts.items() for key in keys}

    def write_index(self) -> Path:
        self.index.write_text(json.dumps({"weight_map": self.weight_map}))
        return self.index


def without(state: dict[str, Tensor]) -> dict[str, Tensor]:
    left = {name: value for name, value in state.items() if not name.startswith("head.")}
    return {**left, "tail.a": torch.ones(2), "tail.b": torch.ones(3)}
