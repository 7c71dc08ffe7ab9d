"""A pretrained model end to end: examples/minilm.py on two ranks, beside plain transformers."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_ranks
from safetensors.torch import load_file, save_file
from test_checkpoint_ranks import counted_reads, local_elements
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import minilm
from ranks import launched
from transformers import AutoModel, AutoTokenizer

PARAMETERS = 22_713_216
LAYERS, OF_A_LAYER = 6, 1_774_464
FEWER = 2  # layers that the ranks have: more are more of the same
COUNT, LENGTH = 16, 16


def on_a_rank(folder: str, backend: str, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    given = ["--backend", backend, "--device", "cpu", "--model", f"{folder}/pretrained", "--save", f"{folder}/tuned"]
    given += ["--steps", str(steps), "--batch", "8"]
    given += ["--length", str(LENGTH), "--pairs", "64", "--held-out", str(COUNT)]
    with launched("cpu"), counted_reads() as elements:
        outcome = minilm.run(given)
    held = local_elements(outcome.model)
    return {**outcome._asdict(), "model": type(outcome.model).__name__, "read": elements, "held": held}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the first layers of the pretrained model, and, when the ranks have run, what they made of it."""
    folder = tmp_path_factory.mktemp("minilm")
    shutil.copytree(minilm.pretrained(), folder / "pretrained")
    config = json.loads((folder / "pretrained" / "config.json").read_text())
    assert config["num_hidden_layers"] == LAYERS
    (folder / "pretrained" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": FEWER}))
    weights = load_file(folder / "pretrained" / "model.safetensors")
    others = tuple(f"encoder.layer.{index}." for index in range(FEWER, LAYERS))
    kept = {name: value for name, value in weights.items() if not name.startswith(others)}
    save_file(kept, folder / "pretrained" / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, 2, str(folder), "eager", 4, backend=None)


def texts() -> list[str]:
    pairs = minilm.documented(64 + COUNT)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
    return [pairs[row][1] for row in order[:COUNT]]


@torch.no_grad()
def by_transformers(folder: Path) -> Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return minilm.embed(model, AutoTokenizer.from_pretrained(folder), texts(), LENGTH)


@pytest.mark.long
def test_each_rank_reads_the_rows_that_it_holds(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["read"] == rank["held"] and rank["model"] == "FSDPBertModel"
    assert [sum(rank["held"].values()) for rank in ranks] == [(PARAMETERS - (LAYERS - FEWER) * OF_A_LAYER) // 2] * 2


@pytest.mark.long
def test_embeddings_are_those_of_the_unsharded_model_bit_for_bit(ranks: list[dict[str, Any]], folder: Path) -> None:
    expected = by_transformers(folder / "pretrained")
    assert expected.shape == (COUNT, 384)
    for rank in ranks:
        assert torch.equal(rank["embeddings"][0], expected)


@pytest.mark.long
def test_it_learns(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["losses"] == second["losses"] and len(first["losses"]) == 4
    assert first["losses"][-1] < first["losses"][0]
    assert first["found"] == second["found"]


@pytest.mark.long
def test_plain_transformers_loads_what_was_saved_and_embeds_bit_for_bit_the_same(
    ranks: list[dict[str, Any]], folder: Path
) -> None:
    tuned = by_transformers(folder / "tuned")
    before = ranks[0]["embeddings"][0]
    for rank in ranks:
        assert torch.equal(rank["embeddings"][1], tuned)
    assert (tuned - before).norm(dim=1).min() > 1e-3, "it was trained"
    saved, original = (load_file(where / "model.safetensors") for where in (folder / "tuned", folder / "pretrained"))
    assert saved.keys() == original.keys() - {"embeddings.position_ids"}
    assert all(saved[name].shape == original[name].shape for name in saved)


@torch.no_grad()
def test_one_process_embeds_as_transformers_does_bit_for_bit() -> None:
    folder, some = minilm.pretrained(), ["reads a file", "the sum of all"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with launched("cpu") as alone:
        model = minilm.load(folder, alone, "eager").eval()
        found = minilm.embed(model, tokenizer, some, LENGTH)
    plain = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    assert torch.equal(found, minilm.embed(plain, tokenizer, some, LENGTH))
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS
