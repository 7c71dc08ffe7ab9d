"""Fine-tune a Llama with LoRA in bfloat16: the frozen weights are read from safetensors, each rank its own rows.

    python examples/llama_lora.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/llama_lora.py --model DIR --text FILE

`--model` is a folder of Hugging Face's with config.json and safetensors; without it, a tiny one of random weights is
written first. The text is the Python standard library's own source, or any file or folder given by `--text`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from ranks import Ranks, arguments, launched
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from train_gpt import load_text
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import graph_fsdp
from graph_fsdp.checkpoint import Safetensors


class Outcome(NamedTuple):
    losses: list[float]  # of each step, nats per token, mean over ranks
    adapter: Path


def write_tiny(folder: Path, seed: int) -> None:
    """A Llama of random weights whose tokens are bytes."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def tokens_of(folder: Path, text: Path | None) -> Tensor:
    """The text by the model's tokenizer, or as bytes where it has none."""
    data = load_text(text)[0]
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return torch.tensor(tokenizer(bytes(data.numpy()).decode(errors="replace")).input_ids)
    return data


def with_adapters(folder: Path, rank: int) -> PeftModel:
    """On the meta device: the frozen weights in bfloat16, the adapters beside them in float32."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(model, lora)


def name_in_files(name: str) -> str | None:
    """Adapters are in no file, and peft has given other names to what is."""
    return None if "lora_" in name else name.removeprefix("base_model.model.").replace(".base_layer", "")


def initialisation(model: PeftModel) -> Callable[[nn.Module], None]:
    """Of what is in no file: adapters, and the buffers of rotary embeddings."""
    base = model.get_base_model()

    def initialise(module: nn.Module) -> None:
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters("default", True)
        else:
            base._init_weights(module)

    return initialise


def train(model: PeftModel, data: Tensor, args: argparse.Namespace, ranks: Ranks) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)
    draws = torch.Generator().manual_seed(args.seed + ranks.rank)
    losses = []
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(data) - args.context, (args.batch, 1), generator=draws)
        tokens = data[starts + torch.arange(args.context)].long().to(ranks.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(ranks.sums(loss.item())[0] / ranks.world)
        if step % 10 == 0 or step == 1:
            ranks.say(f"step {step} loss {losses[-1]:.4f}")
    return losses


def run(given: Sequence[str] | None = None) -> Outcome:
    parser = arguments(str(__doc__), steps=100, batch=8, context=128, lr=1e-2, lora_rank=8)
    parser.add_argument("--model", type=Path, help="folder with config.json and safetensors (default: a tiny one)")
    parser.add_argument("--text", type=Path, help="file or folder of text (default: the standard library)")
    parser.add_argument("--adapter", type=Path, default=Path("adapter"), help="where the adapter is written")
    args = parser.parse_args(given)
    with launched(args.device) as ranks, tempfile.TemporaryDirectory() as temporary:
        if args.model is None:
            if ranks.rank == 0:
                write_tiny(Path(temporary), args.seed)
            args.model = Path(ranks.from_first(temporary))
        model = with_adapters(args.model, args.lora_rank)
        torch.manual_seed(args.seed)
        graph_fsdp.compile(
            model,
            ranks.mesh,
            backend=args.backend,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            checkpoint=Safetensors(args.model, rename=name_in_files),
            param_init_fn=initialisation(model),
        )
        if ranks.rank == 0:
            model.print_trainable_parameters()
        losses = train(model, tokens_of(args.model, args.text), args, ranks)

        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        adapter = get_model_state_dict(model, options=options)  # on all ranks; whole on the first
        if ranks.rank == 0:
            model.save_pretrained(args.adapter, state_dict=adapter)
        ranks.say(f"loss {losses[0]:.4f} → {losses[-1]:.4f}, adapter in {args.adapter}")
        return Outcome(losses, args.adapter)


if __name__ == "__main__":
    run()
