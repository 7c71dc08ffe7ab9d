"""Read what is in a checkpoint, and check whether it is whole."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from typing import Any

from graph_fsdp.checkpoint.checksums import Extent
from graph_fsdp.checkpoint.extra import saved_extra
from graph_fsdp.checkpoint.folder import METADATA
from graph_fsdp.checkpoint.metadata import Checkpoint, nbytes_of
from graph_fsdp.checkpoint.state import RNG
from graph_fsdp.errors import CheckpointError
from graph_fsdp.initialise.safetensors_files import AnyPath
from graph_fsdp.report.text import columns

_SIMPLE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorEntry:
    key: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    pieces: int


@dataclass(frozen=True)
class Contents:
    path: str
    ranks: int | None  # that saved it; None: another program wrote it
    torch: str | None  # the version that wrote it
    files: dict[str, int]  # name → bytes
    tensors: list[TensorEntry]
    values: int  # entries that are no tensors
    extra: dict[str, Any]  # numbers and text as they are, of all else the type
    random_states: int  # the number of ranks whose states are there
    step: int | None  # what was saved as ``extra["step"]``

    def __str__(self) -> str:
        by = "not by graph_fsdp" if self.ranks is None else f"by {self.ranks} ranks, torch {self.torch}"
        step = "" if self.step is None else f"step {self.step}, "
        lines = [f"{self.path}: {step}saved {by}; {sum(self.files.values()):,} bytes in {len(self.files)} files"]
        for part in dict.fromkeys(tensor.key.split(".")[0] for tensor in self.tensors):
            held = [tensor for tensor in self.tensors if tensor.key.split(".")[0] == part]
            pieces, size = sum(tensor.pieces for tensor in held), sum(tensor.bytes for tensor in held)
            lines.append(f"  {part}: {len(held)} tensors in {pieces} pieces, {size:,} bytes")
        if self.extra:
            lines.append("  extra: " + ", ".join(f"{name} = {value}" for name, value in self.extra.items()))
        if self.random_states:
            lines.append(f"  random states of {self.random_states} ranks")
        return "\n".join(lines)

    def table(self) -> str:
        """Return a text with a line for each tensor."""
        rows = [(t.key, t.dtype, str(list(t.shape)), f"{t.bytes:,}", str(t.pieces)) for t in self.tensors]
        return columns(("tensor", "dtype", "shape", "bytes", "pieces"), rows, texts=3)


def contents(path: AnyPath) -> Contents:
    """Read the description of a checkpoint, and nothing of its tensors. Raises CheckpointError if it is not complete or
    its description is damaged."""
    checkpoint = Checkpoint.open(path)
    header = checkpoint.header
    extra, _ = saved_extra(checkpoint)
    return Contents(
        path=str(checkpoint.path),
        ranks=None if header is None else header.ranks,
        torch=None if header is None else header.torch,
        files={file.name: file.stat().st_size for file in sorted(checkpoint.path.iterdir()) if file.is_file()},
        tensors=[
            TensorEntry(key, tuple(e.size), str(e.properties.dtype).removeprefix("torch."), nbytes_of(e), len(e.chunks))
            for key, e in checkpoint.tensors.items()
        ],
        values=len(checkpoint.entries) - len(checkpoint.tensors),
        extra={k: v if isinstance(v, _SIMPLE) else f"a {type(v).__name__}" for k, v in extra.items()},
        random_states=len({name.split(".")[0] for name in checkpoint.under(RNG)}),
        step=extra["step"] if isinstance(extra.get("step"), int) else None,
    )


@dataclass(frozen=True)
class Checked:
    bytes: int  # that were read
    entries: int
    sums: int  # entries whose sum is known and right; 0 where another program wrote them


def check(path: AnyPath) -> Checked:
    """Read all of a checkpoint: check the lengths of its files, graph_fsdp's sums and the CRC32 of ``torch.save``.
    Raises CheckpointError with all that is damaged."""
    checkpoint = Checkpoint.open(path)
    checkpoint.check_files()
    problems = []
    nbytes = entries = sums = 0
    try:
        checkpoint.check_sums(extent for extent in checkpoint.checksums if extent.file == METADATA)
    except CheckpointError:
        problems.append(f"{METADATA} is not what was written")
    for name, extents in checkpoint.extents().items():
        size = (checkpoint.path / name).stat().st_size
        if checkpoint.checksums and size != extents[-1].end:
            problems.append(f"{name} has {size:,} bytes, and more than was written")
        for extent in extents:
            entries, nbytes = entries + 1, nbytes + extent.length
            try:
                checkpoint.check_sums([extent])
                _check_crc(checkpoint, extent)
                sums += extent in checkpoint.checksums
            except CheckpointError:
                problems.append(f"{name} is damaged from byte {extent.offset:,} to {extent.end:,}")
    if problems:
        raise CheckpointError(f"{checkpoint.path} is damaged: {'; '.join(problems)}")
    return Checked(nbytes, entries, sums)


def _check_crc(checkpoint: Checkpoint, extent: Extent) -> None:
    """Check the CRC32 of an entry, a ZIP file as ``torch.save`` writes it."""
    try:
        with zipfile.ZipFile(checkpoint.read(extent)) as archive:
            for record in archive.infolist():
                if record.CRC:  # 0: whoever wrote it has switched that off
                    archive.read(record)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError) as error:
        raise CheckpointError(str(error)) from error
