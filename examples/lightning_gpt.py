"""Train a small GPT on bytes of text with Lightning's Trainer, sharded by graph_fsdp.

    python examples/lightning_gpt.py --devices 2                    # Lightning starts the processes
    python examples/lightning_gpt.py --devices 2 --folder runs      # saves there, and resumes from what is there

The text is the Python standard library's own source, or any file or folder given by `--text`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from gpt import GPT, GPTConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from train_gpt import load_text

from graph_fsdp.integrations.lightning import shard


class Windows(Dataset):
    """Pieces of the text, and the same bytes one position later."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text, self.context = text, context
        self.starts = torch.linspace(0, len(text) - context - 1, count).long()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = int(self.starts[index])
        chunk = self.text[start : start + self.context + 1].long()
        return chunk[:-1], chunk[1:]


class LanguageModel(lightning.LightningModule):
    def __init__(self, config: GPTConfig, lr: float, backend: str) -> None:
        super().__init__()
        self.config, self.lr, self.backend = config, lr, backend
        self.model: GPT | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:  # before each of fit, validate and test
        if self.model is None:
            self.model = shard(GPT(self.config), self.device_mesh, backend=self.backend)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.model(*batch)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("validation", self.model(*batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)  # the shards: after configure_model


def run(given: Sequence[str] | None = None) -> tuple[list[float], float]:
    """Train and validate: this rank's loss of each step, and that of the validation text over all ranks."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--text", type=Path, help="file or folder of text (default: the standard library)")
    parser.add_argument("--backend", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--accelerator", default="auto", help="cpu, cuda, or as Lightning finds it; of it, --devices")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="32-true", help="bf16-true, bf16-mixed")
    parser.add_argument("--folder", type=Path, help="save there after each epoch, and resume from what is there")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--windows", type=int, default=512, help="of the text, in an epoch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    args = parser.parse_args(given)

    lightning.seed_everything(0, verbose=False)
    training, validation = load_text(args.text)
    loader = DataLoader(Windows(training, args.context, args.windows), args.batch, shuffle=True)
    held_out = DataLoader(Windows(validation, args.context, args.windows // 8), args.batch)
    trainer = lightning.Trainer(
        accelerator=args.accelerator,
        devices=args.devices,
        strategy=ModelParallelStrategy(data_parallel_size=args.devices, tensor_parallel_size=1),
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(args.folder, save_last=True)] if args.folder else None,
        enable_checkpointing=args.folder is not None,
        logger=False,
    )
    module = LanguageModel(
        GPTConfig(layers=args.layers, width=args.width, heads=args.heads, context=args.context), args.lr, args.backend
    )
    saved = args.folder is not None and (args.folder / "last.ckpt").exists()
    trainer.fit(module, loader, held_out, ckpt_path=args.folder / "last.ckpt" if saved else None)
    if "validation" not in trainer.callback_metrics:  # all epochs were trained before
        trainer.validate(module, held_out, verbose=False)
    return module.losses, float(trainer.callback_metrics["validation"])


if __name__ == "__main__":
    run()
