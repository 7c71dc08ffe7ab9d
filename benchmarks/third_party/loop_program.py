"""Training loops as people write them, on a rank of torchrun: under DistributedDataParallel or graph_fsdp.

``peft`` is a plain loop around a model of ``get_peft_model``; ``lightning`` is Lightning's Trainer; ``nanogpt`` is the
loop of nanoGPT's ``train.py`` with the lines of docs/migrating.md changed. Losses, norms of gradients and what is saved
are written for the comparison.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import graph_fsdp
from third_party.vision_operators import declare_where_missing

VOCABULARY, LENGTH, WIDTH, STEPS = 64, 16, 32, 4
Found = dict[str, dict[str, list[float]]]


def tokens(seed: int, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def sums(state: dict[str, Tensor]) -> dict[str, list[float]]:
    """Of the squares of each tensor that is saved."""
    return {name: [float(value.double().square().sum())] for name, value in state.items()}


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def clip(model: nn.Module, bound: float) -> float:
    norm = nn.utils.clip_grad_norm_(model.parameters(), bound)
    return float(getattr(norm, "full_tensor", lambda: norm)())


def peft(way: str, out: Path) -> Found:
    """A frozen model with LoRA; the adapters are saved as PEFT names them."""
    import transformers
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")
    model = plain = get_peft_model(transformers.LlamaForCausalLM(config), lora)
    if way == "ddp":
        model = DistributedDataParallel(plain)
    else:
        graph_fsdp.compile(model, backend="eager", fullgraph=False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        batch = tokens(10 * step + dist.get_rank())
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norms.append(clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = plain.state_dict() if way == "ddp" else whole_state(plain)
    saved = get_peft_model_state_dict(plain, state_dict=state) if dist.get_rank() == 0 else {}
    return {"trained": {"loss": losses, "grad_norm": norms}, "saved": sums(saved)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn(self.ln_1(x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's, in short: tied embeddings, and logits of the last position alone where there are no targets."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        x = self.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self, weight_decay: float) -> torch.optim.Optimizer:
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))


def nanogpt(way: str, out: Path) -> Found:
    """Each rank seeds for itself, as nanoGPT does: rank 0's values count."""
    rank, accumulation = dist.get_rank(), 2
    torch.manual_seed(1337 + rank)
    model = raw_model = GPT()
    if way == "ddp":
        model = DistributedDataParallel(raw_model)
    else:
        graph_fsdp.compile(model, backend="eager", sync_module_states=True)
    optimizer = raw_model.configure_optimizers(weight_decay=1e-1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_batch() -> tuple[Tensor, Tensor]:
        rows = torch.randint(VOCABULARY, (2, LENGTH + 1))
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    @torch.no_grad()
    def estimate_loss() -> float:
        model.eval()
        found = torch.tensor([model(*get_batch())[1].item() for _ in range(2)]).mean()
        model.train()
        return found.item()

    def get_lr(it: int) -> float:
        return 1e-3 * it / 2 if it < 2 else 1e-4 + 0.5 * (1 + math.cos(math.pi * it / STEPS)) * 9e-4

    losses, norms, evaluated = [], [], []
    X, Y = get_batch()
    for iter_num in range(2 * STEPS):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % 4 == 0:
            evaluated.append(estimate_loss())
        for micro_step in range(accumulation):
            last = micro_step == accumulation - 1
            if way == "ddp":
                model.require_backward_grad_sync = last
            else:
                model.set_requires_gradient_sync(last)
            _, loss = model(X, Y)
            loss = loss / accumulation
            X, Y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(clip(model, 1.0))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * accumulation)
    state = raw_model.state_dict() if way == "ddp" else whole_state(raw_model)
    saved = sums(state) if rank == 0 else {}
    return {"trained": {"loss": losses, "grad_norm": norms, "eval_loss": evaluated}, "saved": saved}


def lightning(way: str, out: Path) -> Found:
    """With accumulation, clipping and evaluation; a second trainer resumes from the checkpoint of the first epoch."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader, TensorDataset

    from graph_fsdp.integrations.lightning import shard

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: nn.Module | None = None
            self.found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "eval_loss": []}

        def configure_model(self) -> None:
            if self.model is None:
                torch.manual_seed(0)
                self.model = GPT()
                if way == "graph_fsdp":
                    shard(self.model, self.device_mesh, backend="eager")

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.model(batch[0], batch[0].roll(-1, 1))[1]
            self.found["loss"].append(loss.item())
            return loss

        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.found["grad_norm"].append(clip(self, 0.5))

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.found["eval_loss"].append(self.model(batch[0], batch[0])[1].item())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def fit(resumed: str | None = None) -> dict[str, list[float]]:
        strategies: dict[str, Any] = {
            "ddp": lambda: DDPStrategy(process_group_backend="gloo"),
            "graph_fsdp": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        }
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=strategies[way](),
            max_epochs=2,
            accumulate_grad_batches=2,
            gradient_clip_val=0.5,
            callbacks=[ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        loader = DataLoader(TensorDataset(tokens(1, 32)), batch_size=4)
        module = Module()
        trainer.fit(module, loader, loader, ckpt_path=resumed)
        return module.found

    return {"trained": fit(), "resumed": fit(str(out / "epoch=0.ckpt"))}


LOOPS = {"peft": peft, "nanogpt": nanogpt, "lightning": lightning}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=LOOPS, required=True)
    parser.add_argument("--way", choices=("ddp", "graph_fsdp"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    declare_where_missing()
    if options.library != "lightning":  # which makes its own
        dist.init_process_group("gloo")
    found = LOOPS[options.library](options.way, options.out)
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "losses.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
