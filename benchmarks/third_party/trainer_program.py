"""Transformers' Trainer, or TRL's SFTTrainer, on a rank of torchrun: under DistributedDataParallel or graph_fsdp.

It trains with accumulation, evaluates, saves in the middle, and writes its losses and those of a second trainer that
resumes from what was saved.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from third_party.vision_operators import declare_where_missing

declare_where_missing()

from graph_fsdp.integrations.transformers import Trainer  # noqa: E402

VOCABULARY, LENGTH, STEPS = 64, 16, 4


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    drawn = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in drawn.tolist()]


def tokenizer() -> Any:
    """Of words that are numbers; the rows have their numbers already."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"{number}": number for number in range(VOCABULARY)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


def settings(way: str, out: Path) -> dict[str, Any]:
    sharded = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}}
    return {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,  # TRL's default is True, which is autocast under DDP and param_dtype under FSDP
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **(sharded if way == "graph_fsdp" else {}),
    }


def trainer(library: str, way: str, out: Path) -> transformers.Trainer:
    options: dict[str, Any] = {"compile_options": {"backend": "eager", "fullgraph": False}} if way != "ddp" else {}
    if library == "transformers":
        cls = Trainer if way == "graph_fsdp" else transformers.Trainer
        arguments = transformers.TrainingArguments(**settings(way, out))
        return cls(model(), arguments, train_dataset=rows(64, 1), eval_dataset=rows(8, 2), **options)
    import trl
    from datasets import Dataset

    class SFTTrainer(Trainer, trl.SFTTrainer):  # type: ignore[misc]
        """TRL's, with ours as what it derives from."""

    if library == "trl-lora":
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    torch.manual_seed(0)
    return (SFTTrainer if way == "graph_fsdp" else trl.SFTTrainer)(
        model=model(),
        args=trl.SFTConfig(max_length=LENGTH, **settings(way, out)),
        train_dataset=Dataset.from_list(rows(64, 1)),
        eval_dataset=Dataset.from_list(rows(8, 2)),
        processing_class=tokenizer(),
        **options,
    )


def history(made: transformers.Trainer) -> dict[str, list[float]]:
    return {
        key: [entry[key] for entry in made.state.log_history if key in entry]
        for key in ("loss", "grad_norm", "eval_loss")
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", required=True)
    parser.add_argument("--way", choices=("ddp", "graph_fsdp"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = trainer(options.library, options.way, options.out)
    first.train()
    second = trainer(options.library, options.way, options.out)
    second.train(resume_from_checkpoint=str(options.out / f"checkpoint-{STEPS // 2}"))
    if first.is_world_process_zero():
        found = {"trained": history(first), "resumed": history(second)}
        (options.out / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
