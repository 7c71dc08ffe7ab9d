"""Hugging Face's Trainer trains, evaluates and saves a small Llama on the accelerator; a check starts it."""

from __future__ import annotations

import tempfile

import torch
import transformers

from graph_fsdp.integrations.transformers import Trainer

VOCABULARY, LENGTH = 256, 128


def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = (torch.arange(64)[:, None] + 3 * torch.arange(LENGTH)) % VOCABULARY
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            bf16=True,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=20,
            logging_steps=1,
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(transformers.LlamaForCausalLM(config), settings, train_dataset=dataset, eval_dataset=dataset)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        assert losses[-1] < losses[0], losses
        assert trainer.evaluate()["eval_loss"] < losses[0]
        trainer.save_model(folder)
        assert "GraphFSDP" in "".join(base.__name__ for base in type(trainer.model).__mro__)
    print(f"losses {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
