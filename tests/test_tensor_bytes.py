"""Reading tensors of a checkpoint straight into memory: where their bytes are found, and what is left to torch.load."""

from __future__ import annotations

import io
import itertools
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import MLP
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

import graph_fsdp
from graph_fsdp import CheckpointError
from graph_fsdp.checkpoint import load, save, storage, tensor_bytes
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.checkpoint.tensors import read_tensors

BEFORE, AFTER = b"what is before", b"and what is after"
DTYPES = list(tensor_bytes.DTYPES.values())


def entry(path: Path, tensor: Any) -> tuple[io.FileIO, int, int]:
    """A file with an entry in its middle, at an odd place: (file, offset, length)."""
    stream = io.BytesIO()
    torch.save(tensor, stream)
    path.write_bytes(BEFORE + stream.getvalue() + AFTER)
    return open(path, "rb", buffering=0), len(BEFORE), len(stream.getvalue())


def found(path: Path, value: Any) -> tensor_bytes.TensorBytes | None:
    file, offset, length = entry(path, value)
    with file:
        return tensor_bytes.find(file, offset, length)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 4), (1, 1, 7)], ids=str)
def test_a_tensor_is_found_and_read(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 9).to(dtype)
    file, offset, length = entry(tmp_path / "file", tensor)
    with file:
        saved = tensor_bytes.find(file, offset, length)
        assert saved is not None and (saved.dtype, saved.shape) == (dtype, shape)
        into = torch.empty(shape, dtype=dtype)
        assert tensor_bytes.fits(into, dtype)
        tensor_bytes.read_into(file, saved.offset, into)
    assert torch.equal(into, tensor)


def test_every_part_whose_bytes_lie_together_is_found_and_no_other(tmp_path: Path) -> None:
    """A rank's rows. All boxes of a small tensor: which are contiguous in it, torch says too."""
    tensor = torch.arange(3 * 2 * 4).reshape(3, 2, 4)
    file, offset, length = entry(tmp_path / "file", tensor)
    with file:
        saved = tensor_bytes.find(file, offset, length)
        assert saved is not None
        sides = [[(a, n) for a in range(size) for n in range(1, size - a + 1)] for size in tensor.shape]
        together = 0
        for box in itertools.product(*sides):
            at, lengths = [a for a, _ in box], [n for _, n in box]
            part = tensor[tuple(slice(a, a + n) for a, n in box)]
            begin = saved.part(at, lengths)
            assert (begin is not None) == part.is_contiguous()
            if begin is not None:
                into = torch.empty_like(part)
                tensor_bytes.read_into(file, begin, into)
                assert torch.equal(into, part)
                together += 1
        assert together > 20
    for at, lengths in (([0, 0], [3, 2]), ([1, 0, 0], [3, 2, 4]), ([-1, 0, 0], [1, 2, 4])):
        assert saved.part(at, lengths) is None, "not in the tensor"


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3, 4).T,
        torch.ones(4, 4)[:, :2],
        torch.ones(8)[2:],
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(3).to_sparse(),
        torch.ones(4).to(torch.float8_e4m3fn),
        {"a": torch.ones(3)},
        "text",
    ],
    ids=["transposed", "columns", "a view", "conjugated", "a parameter", "sparse", "float8", "a dict", "no tensor"],
)
def test_what_is_no_plain_contiguous_tensor_is_not_found(tmp_path: Path, value: Any) -> None:
    assert found(tmp_path / "file", value) is None


def test_what_is_damaged_is_not_found_or_is_within_its_entry(tmp_path: Path) -> None:
    file, offset, length = entry(tmp_path / "file", torch.ones(4))
    file.close()
    content = (tmp_path / "file").read_bytes()
    lost = 0
    for at in range(offset, offset + length):
        changed = bytearray(content)
        changed[at] ^= 0xFF
        (tmp_path / "file").write_bytes(changed)
        with open(tmp_path / "file", "rb", buffering=0) as damaged:
            saved = tensor_bytes.find(damaged, offset, length)
        lost += saved is None
        if saved is not None and (begin := saved.part([0], [4])) is not None:
            assert offset <= begin <= offset + length - 4 * saved.dtype.itemsize, f"byte {at}"
    assert lost > 100, "those of its description"


def test_bytes_that_are_compressed_are_not_found(tmp_path: Path) -> None:
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(400), plain)
    with zipfile.ZipFile(plain) as a, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as b:
        for name in a.namelist():
            b.writestr(name, a.read(name))
    (tmp_path / "file").write_bytes(packed.getvalue())
    with open(tmp_path / "file", "rb", buffering=0) as file:
        assert tensor_bytes.find(file, 0, len(packed.getvalue())) is None


def test_a_file_that_ends_too_early_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(bytes(10))
    with (
        open(tmp_path / "short", "rb", buffering=0) as file,
        pytest.raises(EOFError, match="short ends 6 bytes too early"),
    ):
        tensor_bytes.read_into(file, 0, torch.empty(4))


def test_reading_counts_as_a_write(tmp_path: Path) -> None:
    """Autograd refuses a backward that needs what was there before."""
    (tmp_path / "file").write_bytes(bytes(16))
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * weight).sum()
    with open(tmp_path / "file", "rb", buffering=0) as file:
        tensor_bytes.read_into(file, 0, weight.detach())
    assert not weight.any()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(4, dtype=torch.float16),
        torch.empty(2, 8)[:, :4],
        torch.empty(4, device="meta"),
        torch.nn.Parameter(torch.empty(4)),
        torch.empty(4, dtype=torch.complex64).imag,
        torch.inference_mode()(torch.empty)(4),
    ],
    ids=["dtype", "strides", "device", "class", "strides of a part", "inference"],
)
def test_other_tensors_are_not_read_into(tensor: Tensor) -> None:
    assert not tensor_bytes.fits(tensor, torch.float32)
    assert tensor_bytes.fits(torch.empty(4), torch.float32)


# Through a checkpoint


class Left:
    """How many tensors were left to torch.distributed.checkpoint, of how many."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = self.all = 0
        straight = storage.read_straight

        def counted(file: Any, place: Any, item: ReadItem, planner: Any) -> bool:
            done = straight(file, place, item, planner)
            self.all += 1
            self.left += not done
            return done

        monkeypatch.setattr(storage, "read_straight", counted)


def test_a_training_isread_straight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = graph_fsdp.compile(MLP(), backend="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 16)).sum().backward()
    optimizer.step()
    save(tmp_path / "step_1", model, optimizer)
    count = Left(monkeypatch)
    load(tmp_path / "step_1", model, optimizer)
    parameters = len(list(model.parameters()))
    assert (count.left, count.all) == (0, 4 * parameters), "weights, two moments and a step"


def test_what_cannot_beread_straight_has_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {
        "plain": torch.randn(4, 4),
        "transposed": torch.randn(3, 5).T,
        "cast": torch.randn(6),
        "columns": torch.randn(3, 3),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    dcp.save(dict(values), checkpoint_id=tmp_path / "saved", no_dist=True)
    count = Left(monkeypatch)
    read = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in values.items()}
    read["cast"], read["columns"] = torch.zeros(6, dtype=torch.float64), torch.zeros(3, 9)[:, ::3]
    reader = storage.Reader(Checkpoint.open(tmp_path / "saved"), verify=True)
    dcp.load(dict(read), storage_reader=reader, planner=storage.FillPlanner(), no_dist=True)
    assert (count.left, count.all) == (4, 5)
    for key, value in values.items():
        assert torch.equal(read[key].to(torch.float64), value.to(torch.float64)), key


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
    reader = storage.Reader(checkpoint, verify=False)
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        reader.read_data(LoadPlan(_items(checkpoint)), storage.FillPlanner())


def _items(checkpoint: Checkpoint) -> list[ReadItem]:
    planner = storage.FillPlanner()
    planner.set_up_planner({"weight": torch.zeros(3)}, checkpoint.metadata, is_coordinator=True)
    return planner.create_local_plan().items
