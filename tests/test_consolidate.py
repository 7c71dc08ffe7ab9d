"""From checkpoints to model files, and what ``graph-fsdp`` says of checkpoints."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from resuming import Training, compiled
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from graph_fsdp.checkpoint import CheckpointError, load, load_safetensors, save
from graph_fsdp.checkpoint.consolidate import consolidate
from graph_fsdp.checkpoint.contents import check, contents
from graph_fsdp.checkpoint.files import read_tensors
from graph_fsdp.checkpoint.metadata import Checkpoint
from graph_fsdp.cli.main import main


class Kinds(nn.Module):
    """A tensor of each dtype that has a name in safetensors, empty ones and scalars, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 3
        self.weight = nn.Parameter(torch.randn(5, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.none = nn.Parameter(torch.empty(0, 3))
        for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64", "complex64"):
            self.register_buffer(f"b_{name}", torch.randn(7).mul(50).to(getattr(torch, name)))

    def get_extra_state(self) -> object:
        return {"version": self.version}

    def set_extra_state(self, state: object) -> None:
        self.version = state["version"]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    training = Training(compiled())
    training.train(1)
    training.save(tmp_path / "step_1")
    return tmp_path / "step_1"


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[n], v) and found[n].dtype == v.dtype for n, v in expected.items()
    )


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("ending", ["safetensors", "pt"])
def test_a_model_of_all_dtypes(tmp_path: Path, ending: str) -> None:
    torch.manual_seed(0)
    model = Kinds()
    save(tmp_path / "a", model)
    expected = tensors_of(model)
    other = Kinds()
    other.version = 0
    load(tmp_path / "a", other)
    assert other.version == 3 and same(tensors_of(other), expected)
    done: list[int] = []
    out = tmp_path / f"model.{ending}"
    made = consolidate(tmp_path / "a", out, progress=done.append)
    assert made.files == [out] and made.left_out == ["_extra_state.version"]
    assert sum(done) == made.bytes == sum(value.nbytes for value in expected.values())
    assert same(load_file(out) if ending == "safetensors" else torch.load(out), expected)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    if ending == "safetensors":
        header = json.loads(out.read_bytes()[8 : 8 + int.from_bytes(out.read_bytes()[:8], "little")])
        widths = {"F64": 8, "I64": 8, "C64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
        aligned = [e["data_offsets"][0] % widths.get(e["dtype"], 1) for n, e in header.items() if n != "__metadata__"]
        assert not any(aligned) and int.from_bytes(out.read_bytes()[:8], "little") % 8 == 0


def test_a_large_model_becomes_several_files_with_an_index(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    made = consolidate(saved, out / "model.safetensors", shard_size=500)
    *files, index = made.files
    assert [file.name for file in files] == [
        f"model-{at:05}-of-{len(files):05}.safetensors" for at in range(1, len(files) + 1)
    ]
    assert len(files) > 2 and index.name == "model.safetensors.index.json"
    for file in files:
        tensors = load_file(file)
        assert sum(value.nbytes for value in tensors.values()) <= 500 or len(tensors) == 1
    table = json.loads(index.read_text())
    assert table["metadata"]["total_size"] == made.bytes and len(table["weight_map"]) == made.tensors
    training = Training(compiled())
    training.load(saved)
    other = Training(compiled(), seed=1)
    load_safetensors(other.model, out)
    assert same(other.model.state_dict(), training.model.state_dict())


def test_a_checkpoint_of_torch_with_other_keys(tmp_path: Path) -> None:
    state = nn.Linear(3, 2).state_dict()
    dcp.save(dict(state), checkpoint_id=tmp_path / "a")
    with pytest.raises(CheckpointError, match='its keys begin with "bias", "weight": say by model_key'):
        consolidate(tmp_path / "a", tmp_path / "m.safetensors")
    consolidate(tmp_path / "a", tmp_path / "m.safetensors", model_key="")
    assert same(load_file(tmp_path / "m.safetensors"), state)


def peak() -> int:
    """Most bytes resident since the last call. (Of getrusage's the parent's would be a part.)"""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def peaks(folder: str) -> list[int]:
    """In a process of its own: most resident memory, above that before, of writing a model twice, and of holding it."""
    small, large = Path(folder) / "small", Path(folder) / "large"
    before = written = 0
    for path in (small, large):
        peak()
        before = peak()  # with what the first use of everything takes
        for ending in ("safetensors", "pt"):
            consolidate(path, path.with_suffix(f".{ending}"))
        written = peak()
    checkpoint = Checkpoint.open(large)
    held = read_tensors(checkpoint, checkpoint.tensors)
    assert held
    return [written - before, peak() - before]


def test_memory_is_that_of_a_tensor_and_not_of_a_model(tmp_path: Path) -> None:
    count, nbytes = 32, 4 << 20
    save(tmp_path / "small", nn.Linear(2, 2))
    save(tmp_path / "large", nn.ParameterList(nn.Parameter(torch.zeros(nbytes // 4)) for _ in range(count)))
    code = f"import test_consolidate as t; print(t.peaks({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    written, held = json.loads(done.stdout)
    assert held > 0.9 * count * nbytes, "the measure sees a model that is held"
    assert written < 0.5 * count * nbytes, "several tensors, as memory comes back late, but not all"


def test_what_cannot_be_written(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'m.bin' must end with .safetensors or .pt"):
        consolidate(saved, tmp_path / "m.bin")
    with pytest.raises(ValueError, match=r"shard_size is a number of bytes for .safetensors files"):
        consolidate(saved, tmp_path / "m.pt", shard_size=5)
    save(tmp_path / "a", nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.complex128))]))
    with pytest.raises(ValueError, match=r"0: .safetensors has no torch.complex128; write a .pt file"):
        consolidate(tmp_path / "a", tmp_path / "m.safetensors")
    first = Checkpoint.open(saved).extent(MetadataIndex("model.blocks.0.up.weight", torch.Size([0, 0])))
    flip(saved / first.file, first.offset + first.length // 2)
    for out in ("m.safetensors", "m.pt"):
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
            consolidate(saved, tmp_path / out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "step_1"], "no half of a file"


def test_the_contents_of_a_checkpoint(saved: Path) -> None:
    found = contents(saved)
    assert found.step == 1 and found.ranks == 1 and found.torch == torch.__version__ and found.random_states == 1
    assert set(found.files) == {".metadata", "__0_0.distcp", "checksums.json", "graph_fsdp.json"}
    by_key = {tensor.key: tensor for tensor in found.tensors}
    assert by_key["model.blocks.0.up.weight"].shape == (7, 16)
    assert by_key["model.blocks.0.up.weight"].bytes == 7 * 16 * 4
    assert found.extra == {"step": 1, "schedule": "a dict", "position": "a dict", "average": "a dict"}
    checked = check(saved)
    assert checked.entries == checked.sums == len(found.tensors) + found.values


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_is_found(saved: Path) -> None:
    size = (saved / "__0_0.distcp").stat().st_size
    for at in range(0, size, size // 25):
        flip(saved / "__0_0.distcp", at)
        with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged from byte"):
            check(saved)
        flip(saved / "__0_0.distcp", at)
    check(saved)


def test_values_of_a_checkpoint_of_torch_are_compared_with_its_crc(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(5000)}, checkpoint_id=tmp_path / "a")
    assert check(tmp_path / "a").sums == 0
    flip(tmp_path / "a" / "__0_0.distcp", 10000)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged from byte 0"):
        check(tmp_path / "a")


def test_on_the_command_line(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect-checkpoint", str(saved), "--tensors"]) == 0
    printed = capsys.readouterr().out
    assert f"{saved}: step 1, saved by 1 ranks" in printed and "whole: " in printed
    assert "model.blocks.0.up.weight" in printed and "extra: step = 1, schedule = a dict" in printed
    assert main(["inspect-checkpoint", str(saved), "--json", "--no-check"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 1 and found["checked"] is None
    assert main(["inspect-checkpoint", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checked"] == asdict(check(saved))

    assert main(["consolidate", str(saved), "-o", str(tmp_path / "m.safetensors"), "--shard-size", "1KB"]) == 0
    assert "m.safetensors.index.json" in capsys.readouterr().out
    assert main(["consolidate", str(saved), "-o", str(tmp_path / "m.zip")]) == 2
    assert "must end with .safetensors or .pt" in capsys.readouterr().err
    for name in ("m.pt", "m.safetensors"):
        assert main(["consolidate", str(saved), "-o", str(tmp_path / "none" / name)]) == 2
        assert f"out: there is no folder '{tmp_path / 'none'}'; make it first" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["consolidate", str(saved), "-o", "m.safetensors", "--shard-size", "2 apples"])
    assert "'2 apples' is no size: give bytes, or as 500MB, 2GB, 1GiB" in capsys.readouterr().err
    flip(saved / "__0_0.distcp", 300)
    assert main(["inspect-checkpoint", str(saved)]) == 2
    assert "__0_0.distcp is damaged from byte" in capsys.readouterr().err
    assert main(["inspect-checkpoint", str(saved), "--json"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["checked"] is None and "__0_0.distcp is damaged from byte" in said.err
    assert main(["inspect-checkpoint", str(tmp_path)]) == 2
    assert "has no .metadata" in capsys.readouterr().err
