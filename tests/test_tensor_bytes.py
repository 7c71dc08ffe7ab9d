"""Reading tensors of a checkpoint straight into memory: what is read so, and what is left to torch.load."""

from __future__ import annotations

import io
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MLP
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import files, load, save
from graph_fsdp.checkpoint.files import read_tensors
from graph_fsdp.checkpoint.metadata import Checkpoint

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float16),
    *(torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


class Left:
    """How many tensors were left to torch.distributed.checkpoint, of how many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.all = 0
        copied = files.Reader.copied

        def counted(reader: files.Reader, *arguments: Any) -> bool:
            done = copied(reader, *arguments)
            self.all += 1
            self.left += not done
            return done

        monkeypatch.setattr(files.Reader, "copied", counted)


def test_a_training_is_read_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    save(tmp_path / "step_1", model, optimizer)
    count = Left(monkeypatch)
    load(tmp_path / "step_1", model, optimizer)
    parameters = len(list(model.parameters()))
    assert (count.left, count.all) == (0, 4 * parameters), "weights, two moments and a step"


class Kinds(nn.Module):
    """A tensor of each dtype and some shapes, and what lies in another order in memory than in a contiguous tensor."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        for at, dtype in enumerate(DTYPES):
            for shape in ((), (5,), (3, 4), (0, 4)):
                value = torch.arange(math.prod(shape)).reshape(shape) * scale + at
                self.register_buffer(f"{str(dtype).partition('.')[2]}_{len(shape)}_{math.prod(shape)}", value.to(dtype))
        self.register_buffer("transposed", torch.arange(15.0).reshape(3, 5).T * scale)
        self.register_buffer("conjugated", (torch.ones(3, dtype=torch.complex64) * 1j * scale).conj())


def same(a: nn.Module, b: nn.Module) -> bool:
    both = zip(a.buffers(), b.buffers(), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.to(torch.complex128), y.to(torch.complex128)) for x, y in both)


def test_tensors_of_every_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Kinds(3)
    save(tmp_path / "saved", saved)
    count = Left(monkeypatch)
    loaded = Kinds(0)
    load(tmp_path / "saved", loaded)
    assert same(loaded, saved) and count.left == 2 and count.all == sum(b.numel() > 0 for b in saved.buffers())


def test_a_checkpoint_that_does_not_say_where_bytes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Format 1, and what something else has written: ``torch.load`` reads it."""
    saved = Kinds(3)
    path = save(tmp_path / "saved", saved).path
    table = json.loads((path / "checksums.json").read_text())
    shorter = {name: [[o, n, (total - data) % 2**64] for o, n, total, data in rows] for name, rows in table.items()}
    (path / "checksums.json").write_text(json.dumps(shorter))
    header = json.loads((path / "graph_fsdp.json").read_text())
    (path / "graph_fsdp.json").write_text(json.dumps({**header, "format": 1}))
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for folder in (path, tmp_path / "theirs"):
        count = Left(monkeypatch)
        loaded = Kinds(0)
        load(folder, loaded)
        assert same(loaded, saved) and count.left == count.all > 0


def test_a_part_is_read_straight_where_its_bytes_lie_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All boxes of a small tensor, as ranks might hold them: which are contiguous in it, torch says too."""
    tensor = torch.arange(3 * 2 * 4).reshape(3, 2, 4)
    module = nn.Module()
    module.register_buffer("x", tensor)
    checkpoint = Checkpoint.open(save(tmp_path / "saved", module).path)
    reader = files.Reader(checkpoint, verify=True)
    reader.set_up_storage_reader(checkpoint.metadata, is_coordinator=True)
    (whole,) = (index for index in checkpoint.metadata.storage_data if index.fqn == "model.x")
    count = Left(monkeypatch)
    straight = 0
    sides = [[(a, n) for a in range(size) for n in range(1, size - a + 1)] for size in tensor.shape]
    for box in itertools.product(*sides):
        at, lengths = torch.Size([a for a, _ in box]), torch.Size([n for _, n in box])
        part = tensor[tuple(slice(a, a + n) for a, n in box)]
        into = {"x": torch.zeros_like(part)}
        planner = files.FillPlanner()
        planner.set_up_planner(into, checkpoint.metadata)
        nothing = torch.Size([0] * 3)
        item = ReadItem(LoadItemType.TENSOR, MetadataIndex("x"), nothing, whole, at, lengths)
        reader.read_data(LoadPlan([item]), planner)
        assert torch.equal(into["x"], part)
        straight += part.is_contiguous()
        assert count.all - count.left == straight
    assert straight > 20


@pytest.mark.parametrize("change", [1, 64, -(10**9), 10**9])
def test_a_place_that_was_changed_is_noticed(tmp_path: Path, change: int) -> None:
    path = save(tmp_path / "saved", Kinds(3)).path
    table = json.loads((path / "checksums.json").read_text())
    row = max(table["__0_0.distcp"], key=lambda row: row[3])
    row[3] += change
    (path / "checksums.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        load(path, Kinds(0))


def test_reading_counts_as_a_write(tmp_path: Path) -> None:
    """Autograd refuses a backward that needs what was there before."""
    model = nn.Linear(4, 4)
    save(tmp_path / "saved", model)
    loss = (model.weight * model.weight).sum()
    load(tmp_path / "saved", model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_other_dtypes_and_strides_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.register_buffer("cast", torch.randn(6))
    module.register_buffer("columns", torch.randn(3, 3))
    save(tmp_path / "saved", module)
    count = Left(monkeypatch)
    into = nn.Module()
    into.register_buffer("cast", torch.zeros(6, dtype=torch.float64))
    into.register_buffer("columns", torch.zeros(3, 9)[:, ::3])
    load(tmp_path / "saved", into)
    assert (count.left, count.all) == (2, 2)
    assert torch.equal(into.cast, module.cast.double()) and torch.equal(into.columns, module.columns)


def test_a_tensor_with_a_payload_is_not_run(tmp_path: Path) -> None:
    """A description that asks for other functions than a tensor's is left to torch.load, which refuses it."""
    marker = tmp_path / "was run"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    checkpoint = Checkpoint.open(tmp_path / "saved")
    ((_, info),) = checkpoint.metadata.storage_data.items()
    stream = io.BytesIO()
    torch.save(Payload(), stream)
    (tmp_path / "saved" / info.relative_path).write_bytes(stream.getvalue())
    info.offset, info.length = 0, len(stream.getvalue())
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        read_tensors(checkpoint, ["weight"])
    assert not marker.exists()


def test_a_file_outside_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    checkpoint = Checkpoint.open(tmp_path / "saved")
    ((_, info),) = checkpoint.metadata.storage_data.items()
    (tmp_path / "outside").write_bytes((tmp_path / "saved" / info.relative_path).read_bytes())
    info.relative_path = "../outside"
    reader = files.Reader(checkpoint, verify=False)
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        reader.read_data(LoadPlan(_items(checkpoint)), files.FillPlanner())


def _items(checkpoint: Checkpoint) -> list[ReadItem]:
    planner = files.FillPlanner()
    planner.set_up_planner({"weight": torch.zeros(3)}, checkpoint.metadata, is_coordinator=True)
    return planner.create_local_plan().items
