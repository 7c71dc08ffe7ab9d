"""Accelerate's own test scripts, on a rank of torchrun: with Accelerate's class, which is DistributedDataParallel, or
with ours in its place, which is the one line that a script changes.

They download a model, its tokenizer, a data set and a metric. Here these are a tiny model of random values, rows of
random words and a metric of the same name, so that the scripts run without a network. Nothing else of them is changed,
but that the process group outlives a script.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from third_party.vision_operators import declare_where_missing

declare_where_missing()

SCRIPTS = "accelerate.test_utils.scripts"
WORDS = 60


class Metric:
    """Accuracy, as ``evaluate`` has it."""

    def __init__(self) -> None:
        self.right: list[bool] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        self.right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        found, self.right = sum(self.right) / len(self.right), []
        return {"accuracy": found}


def data_set(*names: str, split: Any = None) -> Any:
    """``load_dataset``'s place: pairs of sentences, and whether they begin alike."""
    from datasets import Dataset, DatasetDict

    def rows(count: int, seed: int) -> Dataset:
        drawn = torch.randint(WORDS, (count, 2, 6), generator=torch.Generator().manual_seed(seed))
        drawn[::2, 1, 0] = drawn[::2, 0, 0]
        sentences = [[" ".join(f"w{word}" for word in sentence) for sentence in pair] for pair in drawn.tolist()]
        labels = (drawn[:, 0, 0] == drawn[:, 1, 0]).long().tolist()
        pairs = zip(sentences, labels, strict=True)
        return Dataset.from_list(
            [{"sentence1": a, "sentence2": b, "label": label, "idx": i} for i, ((a, b), label) in enumerate(pairs)]
        )

    return DatasetDict({"train": rows(96, 1), "validation": rows(40, 2)})


def save_model(folder: Path) -> None:
    """A tiny BERT and its tokenizer, for ``--model_name_or_path``."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["[PAD]", "[UNK]", *(f"w{index}" for index in range(WORDS))]
    made = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        hidden_dropout_prob=0.0,  # DistributedDataParallel and FSDP draw other numbers
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)


def run(script: str, way: str, *arguments: str) -> None:
    """``main`` of a script of Accelerate."""
    # A script ends the process group, which those after it in this process need.
    accelerate.Accelerator.end_training = accelerate.Accelerator.wait_for_everyone  # type: ignore[method-assign]
    module = importlib.import_module(f"{SCRIPTS}.{script}")
    module.load_dataset = data_set  # type: ignore[attr-defined]
    if way == "graph_fsdp":
        from graph_fsdp.integrations.accelerate import Accelerator

        options = {"backend": "eager", "fullgraph": False}
        module.Accelerator = functools.partial(Accelerator, compile_options=options)  # type: ignore[attr-defined]
    sys.argv = [script, *arguments]
    module.main()  # type: ignore[attr-defined]


def checkpointing(way: str, model: str, out: Path) -> dict[str, Any]:
    """Train two epochs, and load each of the checkpoints: the script compares what it finds with what it had."""
    script = "external_deps.test_checkpointing"
    common = ("--model_name_or_path", model, "--output_dir", str(out))
    run(script, way, *common)
    for epoch in range(2):
        run(script, way, *common, "--resume_from_checkpoint", str(out / f"epoch_{epoch}"))
    states = [json.loads((out / f"state_{epoch}.json").read_text()) for epoch in range(2)]
    return {"epochs": {key: [state[key] for state in states] for key in ("accuracy", "lr", "optimizer_lr", "step")}}


def performance(way: str, model: str, out: Path) -> dict[str, Any]:
    """Train, and save the model; the script looks at accuracy, learning rates and the file."""
    from safetensors.torch import load_file

    run("external_deps.test_performance", way, "--model_name_or_path", model, "--output_dir", str(out))
    found = json.loads((out / "all_results.json").read_text())
    saved = load_file(out / "model.safetensors")
    squares = {name: [float(value.double().square().sum())] for name, value in sorted(saved.items())}
    return {"accuracy": {epoch: [value] for epoch, value in found.items()}, "saved": squares}


PROGRAMS = {"accelerate-checkpointing": checkpointing, "accelerate-performance": performance}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=PROGRAMS, required=True)
    parser.add_argument("--way", choices=("ddp", "graph_fsdp"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.modules["evaluate"] = types.SimpleNamespace(load=lambda *names: Metric())  # type: ignore[assignment]
    folder = options.out / f"model_{os.environ['RANK']}"
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(folder)
    found = PROGRAMS[options.library](options.way, str(folder), options.out)
    if os.environ["RANK"] == "0":
        (options.out / "losses.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
