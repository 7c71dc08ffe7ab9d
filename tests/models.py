"""Small models of every kind that must train sharded, each with a way to make batches for it.

``CASES`` names them. A case's batch is a dict of tensors with the rows first; the models of this file take
``x`` and are scored against ``target``, those of Hugging Face take the whole dict and compute their loss.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

Batch = dict[str, Tensor]

VOCABULARY = 32
SEQUENCE = 8
WIDTH = 16
CLASSES = 5


class MLPBlock(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class MLP(nn.Module):
    def __init__(self, depth: int = 2, width: int = WIDTH, block: Callable[[int], nn.Module] = MLPBlock) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        # No bias: the gradient of a key's bias is zero but for rounding, which Adam would blow up to a step.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(self, *, depth: int = 2, dropout: float = 0.0, tied: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(SEQUENCE, WIDTH)
        self.blocks = nn.ModuleList(GPTBlock(WIDTH, 2, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class CNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class UnevenBlock(nn.Module):
    """Rows that no world size divides, fewer rows than ranks, and a scalar."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 7)
        self.gate = nn.Parameter(torch.randn(1, 7))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.down = nn.Linear(7, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)) * self.gate)


def frozen_mlp() -> nn.Module:
    """One unit frozen whole, one in part."""
    model = MLP(depth=3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)
    return model


class LSTMClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.tokens(x))
        return self.head(y.mean(1))


# Hugging Face: random weights from small configurations; attention and dropout as they come


def llama(depth: int = 2) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2 * SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=2 * SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2 * SEQUENCE,
    )
    return BertForMaskedLM(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=8,
        patch_size=4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


# Batches


def vectors(rows: int, generator: torch.Generator) -> Batch:
    x = torch.randn(rows, WIDTH, generator=generator)
    return {"x": x, "target": x[:, :CLASSES].argmax(1)}


def images(rows: int, generator: torch.Generator) -> Batch:
    return {
        "x": torch.randn(rows, 3, 8, 8, generator=generator),
        "target": torch.randint(CLASSES, (rows,), generator=generator),
    }


def tokens(rows: int, generator: torch.Generator) -> Batch:
    x = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    return {"x": x, "target": (5 * x + 3) % VOCABULARY}


def sequences(rows: int, generator: torch.Generator) -> Batch:
    length = 3  # Dynamo writes a recurrent layer out, step by step
    return {
        "x": torch.randint(VOCABULARY, (rows, length), generator=generator),
        "target": torch.randint(CLASSES, (rows,), generator=generator),
    }


def hf_tokens(rows: int, generator: torch.Generator) -> Batch:
    text = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    return {"input_ids": text, "attention_mask": torch.ones_like(text), "labels": text}


def hf_images(rows: int, generator: torch.Generator) -> Batch:
    batch = images(rows, generator)
    return {"pixel_values": batch["x"], "labels": batch["target"]}


# Cases


@dataclass(frozen=True)
class Case:
    """A model and its data; both the same on every rank and in every process."""

    make: Callable[[], nn.Module]
    make_batch: Callable[[int, torch.Generator], Batch]

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make()

    def batch(self, rows: int, step: int) -> Batch:
        return self.make_batch(rows, torch.Generator().manual_seed(1000 + step))


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """The model's scores, whatever it wraps them in."""
    return _scores(_call(model, batch))


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's mean loss on a batch; a scalar."""
    output = _call(model, batch)
    if not isinstance(output, Tensor):
        return output.loss
    if "target" not in batch:
        return output
    return F.cross_entropy(output.flatten(0, -2), batch["target"].flatten())


def _call(model: nn.Module, batch: Batch) -> Any:
    return model(batch["x"]) if "x" in batch else model(**batch)


def _scores(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


SMALL_CASES = {
    "mlp": Case(MLP, vectors),
    "one_block": Case(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)), vectors),
    "gpt": Case(GPT, tokens),
    "gpt_of_one_block": Case(lambda: GPT(depth=1), tokens),
    "mlp_dropout": Case(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, CLASSES)), vectors
    ),
    "gpt_dropout": Case(lambda: GPT(dropout=0.2), tokens),
    "gpt_tied": Case(lambda: GPT(tied=True), tokens),
    "gpt_checkpoint": Case(lambda: GPT(checkpointed=True), tokens),
    "gpt_checkpoint_dropout": Case(lambda: GPT(checkpointed=True, dropout=0.2), tokens),
    "gpt_tied_checkpoint_dropout": Case(lambda: GPT(tied=True, checkpointed=True, dropout=0.2), tokens),
    "cnn_batchnorm": Case(CNN, images),
    "frozen": Case(frozen_mlp, vectors),
    "uneven": Case(lambda: MLP(block=UnevenBlock), vectors),
    "lstm": Case(LSTMClassifier, sequences),
}

HUGGING_FACE_CASES = {
    "hf_llama": Case(llama, hf_tokens),
    "hf_gpt2": Case(gpt2, hf_tokens),
    "hf_bert": Case(bert, hf_tokens),
    "hf_vit": Case(vit, hf_images),
}

CASES = {**SMALL_CASES, **HUGGING_FACE_CASES}


SAVES_PRODUCTS = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


class Selective(MLP):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=SAVES_PRODUCTS)
        return self.head(x)


class SelectiveAnew(MLP):
    """Makes a policy for each layer; ``different``: the last two have another one."""

    def __init__(self, depth: int, different: bool = False) -> None:
        super().__init__(depth)
        gelu, addmm = torch.ops.aten.gelu.default, torch.ops.aten.addmm.default
        self.saved = [gelu if different and layer > 1 else addmm for layer in range(depth)]

    def forward(self, x: Tensor) -> Tensor:
        for block, operator in zip(self.blocks, self.saved, strict=True):
            policy = functools.partial(create_selective_checkpoint_contexts, [operator])
            x = checkpoint(block, x, use_reentrant=False, context_fn=policy)
        return self.head(x)
