"""A training script for Accelerate, as people write them. ``--own`` trains with Accelerate's own FSDP2 instead.

``--then`` between arguments: one training after the other, in the same processes.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import graph_fsdp

WIDTH, VOCABULARY, LENGTH = 32, 64, 12


def make_model() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def own_fsdp2():
    """Accelerate itself ignores an FSDP configuration on the CPU; this is its FSDP2, on the CPU."""
    import accelerate

    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    plugin = accelerate.FullyShardedDataParallelPlugin()
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    for state in (accelerator.state, accelerate.PartialState()):
        state.distributed_type = accelerate.DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(arguments: list[str]):
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", action="store_true")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--epochs", type=int, default=1)
    args = parser.parse_args(arguments)

    if args.own:
        accelerator = own_fsdp2()
    else:
        from graph_fsdp.integrations.accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=2, compile_options={"backend": "eager"})

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    tokens = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume is not None:
        accelerator.load_state(args.resume)

    losses, norms = [], []
    for epoch in range(args.epochs):
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    norms.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
        if epoch == 0:
            accelerator.save_state(args.out / "state")
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.out / "pretrained", is_main_process=accelerator.is_main_process, state_dict=state
    )
    if accelerator.is_main_process:
        shards = {name: p.to_local().numel() for name, p in model.named_parameters() if hasattr(p, "to_local")}
        numel = sum(p.numel() for p in model.parameters())
        facts = {"losses": losses, "norms": norms, "sharded": sum(shards.values()) / numel}
        if not args.own:
            facts["report"] = str(graph_fsdp.inspect(model))
        (args.out / "facts.json").write_text(json.dumps(facts))
    accelerator.wait_for_everyone()
    return accelerator


if __name__ == "__main__":
    from accelerate.state import AcceleratorState, GradientState

    for then, arguments in itertools.groupby(sys.argv[1:], lambda word: word == "--then"):
        if not then:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            torch._dynamo.reset()
            accelerator = main(list(arguments))
    accelerator.end_training()
