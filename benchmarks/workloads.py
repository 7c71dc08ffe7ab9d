"""What the benchmarks train: a GPT (``examples/gpt.py``) or a Hugging Face Llama, random weights, text that can be
learnt. The same on every machine, in every process and for every implementation.

Tokens follow ``next = (5 * token + 3) % vocab``, from a first token that the step and the rank decide: the loss falls,
so that an implementation that trains wrongly is soon told from one that does not, and each rank has a batch of its own.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig
from llama import causal_attention

SEED = 1234


@functools.cache
def checkpointed(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a block whose activations are computed again in backward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(kind.forward, self), *args, use_reentrant=False, **kwargs)

    return type(f"Checkpointed{kind.__name__}", (kind,), {"forward": forward})


@dataclass(frozen=True)
class Workload:
    """A model and its batches. ``batch`` and ``length``: sequences per rank, tokens per sequence. ``checkpointed``:
    with ``torch.utils.checkpoint`` around each block."""

    model: Literal["gpt", "llama"] = "gpt"
    layers: int = 6
    width: int = 512
    heads: int = 8
    vocab: int = 256
    batch: int = 4
    length: int = 128
    checkpointed: bool = False

    def make(self, device: torch.device) -> nn.Module:
        """The model with its values, float32, the same on every rank."""
        torch.manual_seed(SEED)
        with device:
            model = self._gpt() if self.model == "gpt" else self._llama()
        if self.checkpointed:
            for block in self.blocks(model):
                block.__class__ = checkpointed(type(block))
        return model.train()

    def blocks(self, model: nn.Module) -> nn.ModuleList:
        """The repeated blocks of what ``make`` returned."""
        blocks = model.get_submodule("blocks" if self.model == "gpt" else "model.layers")
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def tokens(self, step: int, rank: int, device: torch.device) -> dict[str, Tensor]:
        """A rank's batch as keyword arguments of the model: int64, of shape (batch, length)."""
        generator = torch.Generator().manual_seed(SEED + 100_003 * rank + step)
        sequence = [torch.randint(self.vocab, (self.batch,), generator=generator)]
        for _ in range(self.length):
            sequence.append((5 * sequence[-1] + 3) % self.vocab)
        text = torch.stack(sequence, dim=1).to(device)
        if self.model == "gpt":
            return {"inputs": text[:, :-1].contiguous(), "targets": text[:, 1:].contiguous()}
        inputs = text[:, :-1].contiguous()
        return {"input_ids": inputs, "labels": inputs}  # which the model shifts by one

    def _gpt(self) -> nn.Module:
        return GPT(GPTConfig(self.vocab, self.layers, self.width, self.heads, self.length))

    def _llama(self) -> nn.Module:
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

        AttentionInterface.register("causal", causal_attention)
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.width,
            intermediate_size=7 * self.width // 2,  # as Llama-3-8B
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=max(1, self.heads // 4),
            max_position_embeddings=self.length,
            use_cache=False,
            attn_implementation="causal",
        )
        return LlamaForCausalLM(config)


def loss_of(output: Any) -> Tensor:
    """The mean loss, a scalar, of what a model of a workload returns."""
    loss: Tensor = output if isinstance(output, Tensor) else output.loss
    return loss
