"""Read safetensors files: what is in them, and the rows of a rank.

A file's header says where each tensor lies, and the file is mapped into memory: the bytes of other ranks' rows are
never touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graph_fsdp import compat
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.state_keys import Matched, Rename, match_keys
from graph_fsdp.parameters.placements import part_of_rank
from graph_fsdp.passes.ir.settings import check_flags, check_path

AnyPath: TypeAlias = "str | os.PathLike[str]"
INDEX = "model.safetensors.index.json"
_WHAT = (
    "the path of a safetensors file or of a folder that has some, a list of files, or a "
    "graph_fsdp.checkpoint.Safetensors"
)


@dataclass(frozen=True)
class Safetensors:
    """Says where a model's values come from: ``graph_fsdp.compile(model, checkpoint=Safetensors(…))``.

    Args:
        path: a file; a folder with ``model.safetensors.index.json``, ``model.safetensors`` or other ``*.safetensors``;
            the index itself; or a list of files.
        strict: every key of the model is in the files and every key of theirs in the model. Without it, what the files
            lack keeps its value, or, on the meta device, is initialised.
        rename: a name in ``model.state_dict()`` → the key in the files. None: not from the files, whatever ``strict``
            (a LoRA adapter's).
    """

    path: AnyPath | Sequence[AnyPath]
    strict: bool = True
    rename: Rename | None = None

    def __post_init__(self) -> None:
        paths = self.path if isinstance(self.path, (list, tuple)) else [self.path]
        for path in paths:
            check_path("a checkpoint", path, _WHAT)
        check_flags(strict=self.strict)
        if self.rename is not None and not callable(self.rename):
            raise TypeError(f"rename must be a function of a name in the model, or None, got {self.rename!r}")

    def match(self, model: nn.Module) -> tuple[SafetensorsFiles, Matched]:
        """Open the files and find what goes where.

        Raises:
            CheckpointError: files are not there or cannot be read, or do not fit the model.
            ImportError: the safetensors library is not installed.
        """
        files = SafetensorsFiles(self.path)
        shapes = {key: entry.shape for key, entry in files.entries.items()}
        where = str(self.path)
        matched = match_keys(model, shapes, strict=self.strict, where=where, rename=self.rename, unfit=files.unfit)
        return files, matched


@dataclass(frozen=True)
class SafetensorsEntry:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors writes it: "BF16"


class SafetensorsFiles:
    """Lists the tensors in some files, by key."""

    def __init__(self, path: AnyPath | Sequence[AnyPath]) -> None:
        self.entries: dict[str, SafetensorsEntry] = {}
        for file in _find(path):
            with open_file(file) as reader:
                for key in reader.keys():  # noqa: SIM118  # no dict
                    if key in self.entries:
                        raise CheckpointError(
                            f"{key!r} is in {self.entries[key].file} and in {file}; pass a list of files, each key in "
                            "one of them"
                        )
                    part = reader.get_slice(key)
                    self.entries[key] = SafetensorsEntry(file, tuple(part.get_shape()), part.get_dtype())

    def unfit(self, key: str, value: Tensor) -> str | None:
        """Return why a value cannot be loaded: floating point, and nothing else, goes into floating point of any
        width."""
        dtype = self.entries[key].dtype
        if dtype.startswith(("F", "BF")) != value.is_floating_point() or dtype.startswith("C") != value.is_complex():
            return f"{dtype} in the file cannot be loaded into {str(value.dtype).removeprefix('torch.')}"
        return None

    def read(self, wanted: Iterable[tuple[str, Tensor]]) -> None:
        """Copy each (key, into), cast to its dtype and device; of a DTensor this rank's part into its local tensor."""
        by_file: dict[Path, list[tuple[str, Tensor]]] = {}
        for key, into in wanted:
            by_file.setdefault(self.entries[key].file, []).append((key, into))
        for file, items in by_file.items():
            with open_file(file) as reader, torch.no_grad():
                for key, into in items:
                    _read(reader, key, into)


def _read(reader: Any, key: str, into: Tensor) -> None:
    local = compat.local_part(into).detach()
    if local.shape == into.shape:
        local.copy_(reader.get_tensor(key))
    elif isinstance(into, DTensor) and local.numel():
        local.copy_(part_of_rank(into, reader.get_slice(key)))


def _find(path: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """Return the files that a user means."""
    if not isinstance(path, (str, os.PathLike)):
        files = [Path(file) for file in path]
    elif (found := Path(path)).is_dir():
        if (found / INDEX).exists():
            return _find(found / INDEX)
        whole = found / "model.safetensors"
        files = [whole] if whole.exists() else sorted(found.glob("*.safetensors"))
        if not files and (found / ".metadata").exists():
            raise CheckpointError(
                f"{found} is a checkpoint of torch.distributed.checkpoint, and safetensors are asked for; load it by "
                "graph_fsdp.checkpoint.load after compile, or make safetensors of it by graph-fsdp consolidate"
            )
        if not files:
            raise CheckpointError(f"{found} has neither {INDEX} nor any *.safetensors; pass the folder that has them")
    elif found.name.endswith(".index.json") and found.exists():
        try:
            names = set(json.loads(found.read_text())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{found} is no index of safetensors files (weight_map): {error!r}") from error
        files = [found.parent / name for name in sorted(names)]
    else:
        files = [found]
    if not files:
        raise CheckpointError("an empty list of safetensors files; pass a file, a folder, or a list of files")
    absent = [str(file) for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"no such safetensors file: {', '.join(absent)}; is the checkpoint complete?")
    return files


def open_file(file: Path) -> Any:
    """Return a reader of a file, to be entered. Raises CheckpointError where it cannot be read."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(f"reading {file} takes the safetensors library: pip install safetensors") from error
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
