"""The examples do what they say, on one process and on two."""

from __future__ import annotations

import gzip
import math
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import run_ranks
from PIL import Image
from torch import Tensor

import graph_fsdp

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

import custom_schedule  # noqa: E402
import digits  # noqa: E402
import llama_lora  # noqa: E402
import moe_gpt  # noqa: E402
import pipeline_gpt  # noqa: E402
import policy_gradient  # noqa: E402
import resnet  # noqa: E402
import vit  # noqa: E402
from ranks import Ranks, launched  # noqa: E402


@pytest.mark.long
def test_a_custom_schedule_moves_the_collectives_and_changes_no_number() -> None:
    of_ranks = run_ranks(custom_schedule.compare, 2, 3)
    for default, ours in of_ranks:
        assert len(ours.losses) == 3
        assert ours.losses == default.losses, "bit for bit"
        for phase in ("forward", "backward"):
            before, after = default.starts[phase], ours.starts[phase]
            assert {entry[:2] for entry in before} == {entry[:2] for entry in after}, "the same collectives"
            moved = [name for kind, name, at in after if kind == "gather" and (kind, name, at) not in before]
            assert {"blocks.0", "blocks.2"} <= set(moved)
    (default, ours), (default_there, ours_there) = of_ranks
    assert (default.starts, ours.starts) == (default_there.starts, ours_there.starts), "ranks agree"
    assert default.losses != default_there.losses, "each rank has its own batches"
    assert "prefetch" in default.report and "halfway_through" in ours.report
    assert "ms of it only communication" in ours.report and "most bytes gathered at once: " in ours.report


@pytest.mark.long
def test_a_custom_schedule_runs_alone() -> None:
    command = [sys.executable, str(EXAMPLES / "custom_schedule.py"), "--steps", "1"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("nothing to gather or reduce on one rank") == 4
    assert finished.stdout.count("predicted: ") == 4


MIXTURE = ["--backend", "eager", "--device", "cpu", "--steps", "4", "--layers", "1"]


@pytest.mark.long
def test_a_mixture_of_experts_on_four_ranks_has_the_losses_of_one_process() -> None:
    alone = moe_gpt.run(MIXTURE)
    assert alone == sorted(alone, reverse=True)
    for losses in run_ranks(moe_gpt.run, 4, MIXTURE, backend=None):
        assert losses == pytest.approx(alone, abs=1e-4)


STAGES = ["--backend", "eager", "--device", "cpu", "--steps", "3"]


@pytest.mark.long
def test_a_pipeline_on_four_ranks_has_the_losses_of_one_process() -> None:
    """With one schedule: those of torch are in ``test_pipelining.py``."""
    alone = pipeline_gpt.run(STAGES)
    assert alone == sorted(alone, reverse=True)
    schedule = "ZBVZeroBubble" if torch.__version__ >= (2, 13) else "Interleaved1F1B"  # see docs/parallelism.md
    for losses in run_ranks(pipeline_gpt.run, 4, [*STAGES, "--schedule", schedule], backend=None):
        assert losses == pytest.approx(alone, abs=1e-4)


POLICY = ["--backend", "eager", "--device", "cpu", "--iterations", "16"]


@pytest.mark.long
def test_a_policy_is_rewarded_more_by_what_another_process_generates_with_its_weights() -> None:
    """Two ranks train, and a third generates."""
    alone = policy_gradient.run(POLICY)
    of_ranks = run_ranks(policy_gradient.run, 3, POLICY, backend=None)
    assert all(rewards == of_ranks[0] for rewards in of_ranks)
    assert of_ranks[0][0] == alone[0], "the same weights, sent"
    # Half of the tokens are even at first. How fast that grows depends on how the processor rounds, as samples do.
    assert min(alone[-1], of_ranks[0][-1]) > 0.8 > 0.65 > alone[0]


# The short forms, under what torchrun sets

# Of ten classes a model that learnt nothing finds a tenth, and these find four fifths and more: what they find after so
# few steps depends on how the processor rounds, but not by that much.
LEARNT = 0.5


def short_forms(model: str, text: str, adapter: str) -> dict[str, Any]:
    """On a rank."""
    torch.set_num_threads(1)
    lora = ["--model", model, "--text", text, "--adapter", adapter, "--steps", "25", "--context", "32"]
    forms: dict[str, tuple[Callable[[list[str]], Any], list[str]]] = {
        "digits": (digits.run, ["--epochs", "10", "--save", str(Path(adapter).parent / "digits.pt")]),
        "resnet": (resnet.run, ["--epochs", "3", "--width", "8"]),
        "vit": (vit.run, ["--epochs", "8", "--layers", "2", "--lr", "4e-3"]),
        "llama_lora": (llama_lora.run, lora),
    }
    outcomes = {}
    with launched("cpu"):  # makes the process group, once for all of them
        for name, (run, arguments) in forms.items():
            torch._dynamo.reset()
            outcomes[name] = run(["--backend", "eager", "--device", "cpu", *arguments])
    outcomes["digits"] = outcomes["digits"].accuracy
    return outcomes


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    llama_lora.write_tiny(folder / "model", seed=3)
    (folder / "text").write_text("to be or not to be, that is the question; " * 200)
    return folder


@pytest.fixture(scope="module")
def on_two_ranks(lora_folder: Path) -> list[dict[str, Any]]:
    paths = [str(lora_folder / name) for name in ("model", "text", "adapter")]
    return run_ranks(short_forms, 2, *paths, backend=None)


@pytest.mark.long
def test_digits_are_learnt_and_saved(on_two_ranks: list[dict[str, Any]], lora_folder: Path) -> None:
    first, second = (outcome["digits"] for outcome in on_two_ranks)
    assert first == second > LEARNT
    _, test = digits.load_digits()
    model = digits.CNN(8)
    model.load_state_dict(torch.load(lora_folder / "digits.pt"))
    assert digits.accuracy(model, test, Ranks(0, 1, torch.device("cpu"), None)) == pytest.approx(first)


@pytest.mark.long
def test_a_resnet_learns_images(on_two_ranks: list[dict[str, Any]]) -> None:
    first, second = (outcome["resnet"] for outcome in on_two_ranks)
    assert first == second
    assert first.losses[-1] < first.losses[0] and first.accuracy > LEARNT


@pytest.mark.long
def test_a_vision_transformer_learns(on_two_ranks: list[dict[str, Any]]) -> None:
    first, second = (outcome["vit"] for outcome in on_two_ranks)
    assert first == second > LEARNT


@pytest.mark.long
def test_an_adapter_is_trained_and_works_without_graph_fsdp(
    on_two_ranks: list[dict[str, Any]], lora_folder: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    first, second = (outcome["llama_lora"] for outcome in on_two_ranks)
    assert first.losses == second.losses and first.losses[-1] < first.losses[0] - 2
    base = AutoModelForCausalLM.from_pretrained(lora_folder / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, lora_folder / "adapter")
    text = torch.frombuffer(bytearray((lora_folder / "text").read_bytes()[:320]), dtype=torch.uint8)
    tokens = text.long().view(10, 32)
    with torch.no_grad():
        adapted = model(input_ids=tokens, labels=tokens).loss.item()
        with model.disable_adapter():
            plain = model(input_ids=tokens, labels=tokens).loss.item()
    assert abs(adapted - first.losses[-1]) < 0.5 and abs(plain - first.losses[0]) < 0.5


# Alone, in this process


def alone(run: Callable[[list[str]], Any], *arguments: object) -> Any:
    return run(["--backend", "eager", "--device", "cpu", *map(str, arguments)])


def plainly(run: Callable[[list[str]], Any], *arguments: object) -> Any:
    """The same without graph_fsdp."""
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_fsdp, "compile", lambda model, *_, **__: model)
        return alone(run, *arguments)


def write_idx(path: Path, values: Tensor) -> None:
    header = struct.pack(f">HBB{values.dim()}I", 0, 8, values.dim(), *values.shape)
    data = header + values.numpy().tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def test_digits_of_mnists_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = {}
    for prefix, count, ending in (("train", 320, ""), ("t10k", 50, ".gz")):
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        images = torch.randint(60, (count, 28, 28), dtype=torch.uint8)
        images[torch.arange(count), 2 * labels.long() + 4] = 255  # a line whose height is the label
        write_idx(tmp_path / f"{prefix}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / f"{prefix}-labels-idx1-ubyte{ending}", labels)
        written[prefix] = (images, labels)
    for data, (images, labels) in zip(digits.load_mnist(tmp_path), written.values(), strict=True):
        assert data.images.shape == (len(labels), 1, 28, 28) and data.labels.dtype == torch.int64
        assert torch.equal(data.labels, labels.long())
        assert torch.equal((data.images[:, 0] * 0.3081 + 0.1307).mul(255).round().byte(), images)
    arguments = ("--mnist", tmp_path, "--epochs", 2, "--batch", 32)
    ours = alone(digits.run, *arguments)
    assert capsys.readouterr().out.count("test accuracy") == 2
    assert ours[:2] == plainly(digits.run, *arguments)[:2], "losses and accuracy, bit for bit"

    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match="no t10k-labels"):
        digits.load_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"hello")
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte is no idx file"):
        digits.load_mnist(tmp_path)


@pytest.mark.long
def test_a_resnet_of_a_folder_of_images(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no folder with images"):
        resnet.Folder(tmp_path, 16)
    for index in range(40):
        name, colour = [("blue", (0, 0, 200)), ("red", (200, index, 0))][index % 2]
        (tmp_path / name).mkdir(exist_ok=True)
        Image.fromarray(np.full((20, 30, 3), colour, dtype=np.uint8)).save(tmp_path / name / f"{index}.png")
    (tmp_path / "red" / "notes.txt").write_text("no image")
    data = resnet.Folder(tmp_path, 16)
    assert len(data.labels) == 40 and data.classes == 2
    images = data.images(torch.arange(40))
    assert images.shape == (40, 3, 16, 16)
    is_red = images[:, 0].mean((1, 2)) > images[:, 2].mean((1, 2))
    assert torch.equal(is_red.long(), data.labels)
    arguments = ("--images", tmp_path, "--size", 16, "--width", 8, "--epochs", 2, "--batch", 8)
    assert alone(resnet.run, *arguments) == plainly(resnet.run, *arguments), "bit for bit"


@pytest.mark.long
def test_a_vision_transformer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 < alone(vit.run, "--epochs", 1, "--layers", 1, "--width", 16, "--heads", 2) <= 1
    size, held = (int(word.replace(",", "")) for word in capsys.readouterr().out.split()[:3:2])
    assert size == held == 16 * 4 + 16 + 16 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16 + 170


def test_a_llama_of_random_weights_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("to be or not to be; " * 50)
    arguments = ("--text", tmp_path / "text", "--adapter", tmp_path / "adapter", "--steps", 2, "--context", 8)
    losses, adapter = alone(llama_lora.run, *arguments)
    assert len(losses) == 2 and all(map(math.isfinite, losses))
    assert (adapter / "adapter_model.safetensors").exists()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 40])
def test_every_rank_gets_as_many_batches_and_all_rows_come_once(count: int) -> None:
    ranks = [Ranks(rank, 2, torch.device("cpu"), None) for rank in range(2)]
    parts = [r.batches(count, 4) for r in ranks]
    assert len(parts[0]) == len(parts[1]) and all(len(rows) <= 4 for part in parts for rows in part)
    assert sorted(torch.cat([*parts[0], *parts[1]]).tolist()) == list(range(count))
    shuffled = [r.batches(count, 4, torch.Generator().manual_seed(0)) for r in ranks]
    assert [len(part) for part in shuffled] == [count // 8] * 2
    rows = [row for part in shuffled for batch in part for row in batch.tolist()]
    assert len(set(rows)) == len(rows) == count // 8 * 8
