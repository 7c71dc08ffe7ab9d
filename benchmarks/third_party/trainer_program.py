"""Transformers' Trainer, or one of TRL's, on a rank of torchrun: under DistributedDataParallel or graph_fsdp.

It trains with accumulation, evaluates, saves in the middle, and writes its losses and those of a second trainer that
resumes from what was saved.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from third_party.vision_operators import declare_where_missing

declare_where_missing()

from graph_fsdp.integrations.transformers import Trainer  # noqa: E402

VOCABULARY, LENGTH, STEPS = 64, 16, 4
OF_TRL = {"trl": "SFT", "trl-lora": "SFT", "trl-dpo": "DPO", "trl-reward": "Reward", "trl-grpo-lora": "GRPO"}


def model(cls: Any = transformers.LlamaForCausalLM, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_labels=1,
        pad_token_id=0,
    )
    return cls(config)


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    drawn = torch.randint(3, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in drawn.tolist()]


def texts(count: int, seed: int, names: tuple[str, ...]) -> list[dict[str, str]]:
    """Columns of words that are numbers."""
    drawn = iter(rows(count * len(names), seed))
    return [{name: " ".join(map(str, next(drawn)["input_ids"][:6])) for name in names} for _ in range(count)]


def tokenizer() -> Any:
    """Of words that are numbers."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"{number}": number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(int, completion.split())) % 7) for completion in completions]


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

    kind, training = OF_TRL[library], settings(way, out)
    base = getattr(trl, f"{kind}Trainer")
    cls = type(base.__name__, (Trainer, base), {}) if way == "graph_fsdp" else base
    made, draw = model(), rows
    if kind == "DPO":
        draw, options["ref_model"] = partial(texts, names=("prompt", "chosen", "rejected")), model(seed=1)
    elif kind == "Reward":
        draw, made = partial(texts, names=("chosen", "rejected")), model(transformers.LlamaForSequenceClassification)
    elif kind == "GRPO":
        draw, options["reward_funcs"] = partial(texts, names=("prompt",)), rewards
        each = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
        training |= {**each, "num_generations": 4, "max_completion_length": 6}
    if kind != "GRPO":
        training["max_length"] = LENGTH
    if library.endswith("-lora"):
        from peft import LoraConfig

        options["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    torch.manual_seed(0)
    return cls(
        model=made,
        args=getattr(trl, f"{kind}Config")(**training),
        train_dataset=Dataset.from_list(draw(64, 1)),
        eval_dataset=Dataset.from_list(draw(8, 2)),
        processing_class=tokenizer(),
        **options,
    )


def history(made: transformers.Trainer, library: str) -> dict[str, list[float]]:
    """GRPO's loss is zero but for rounding where nothing has been learnt."""
    keys = ("reward", "entropy", "grad_norm") if OF_TRL.get(library) == "GRPO" else ("loss", "grad_norm", "eval_loss")
    return {key: [entry[key] for entry in made.state.log_history if key in entry] for key in keys}


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
        found = {"trained": history(first, options.library), "resumed": history(second, options.library)}
        (options.out / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
