"""A policy gradient: some ranks train a GPT, and another process generates with the weights that they send it.

    python examples/policy_gradient.py
    python -m torch.distributed.run --standalone --nproc-per-node 3 examples/policy_gradient.py

Of several processes the last one generates, and holds a plain model, as a serving engine does: it is in none of the
trained model's meshes. In each iteration it is sent the weights, bucket by bucket, and gives them to ``load_weights``,
whose name and signature are those of vLLM's models; then it samples sequences, which the others train on by REINFORCE
(Williams 1992). A sequence is rewarded for its even tokens. One process does both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from ranks import Ranks, arguments, launched
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graph_fsdp


class Policy(GPT):
    def forward(self, tokens: Tensor, advantages: Tensor | None = None) -> Tensor:
        """``tokens``: int64 (batch, length). The logits of the next token; with ``advantages`` (batch), the loss."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        if advantages is None:
            return logits[:, -1]
        nats = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return (advantages * nats.view(len(tokens), -1).mean(dim=1)).mean()


class Engine:
    """Generates with a plain model; what a serving engine is here."""

    def __init__(self, config: GPTConfig, device: torch.device) -> None:
        self.model, self.device = Policy(config).to(device), device
        self.length, self.vocab = config.context, config.vocab

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """As vLLM's models: take each tensor as it comes, and return the names."""
        targets, loaded = self.model.state_dict(), set()
        for name, tensor in weights:
            targets[name].copy_(tensor)
            loaded.add(name)
        return loaded

    @torch.no_grad()
    def generate(self, batch: int, draws: torch.Generator) -> Tensor:
        """Sequences that begin with token 0, int64 (batch, length)."""
        tokens = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
        while tokens.shape[1] < self.length:
            chances = self.model(tokens).softmax(-1).cpu()
            chosen = torch.multinomial(chances, 1, generator=draws)
            tokens = torch.cat([tokens, chosen.to(self.device)], dim=1)
        return tokens


class Roles:
    """Which ranks train, and which one generates; ``sends``: the group over which weights go."""

    def __init__(self, ranks: Ranks) -> None:
        self.trainers = max(1, ranks.world - 1)
        self.trains, self.generates = ranks.rank < self.trainers, ranks.rank == ranks.world - 1
        self.mesh: DeviceMesh | None = None
        self.sends = None
        if ranks.world > 1:
            training, self.sends = dist.new_group(list(range(self.trainers))), dist.new_group([0, ranks.world - 1])
            if self.trains:
                assert isinstance(training, dist.ProcessGroup)
                self.mesh = DeviceMesh.from_group(training, ranks.device.type)


def weights_to(engine: Engine | None, model: Policy | None, roles: Roles) -> None:
    if engine is not None and model is not None:
        engine.load_weights(graph_fsdp.export(model))
    elif engine is not None:
        engine.load_weights(graph_fsdp.receive(roles.sends, src=0, device=engine.device))
    elif model is not None:
        for _ in graph_fsdp.export(model, rank=0, group=roles.sends):
            pass  # the engine gets them


def run(given: Sequence[str] | None = None) -> list[float]:
    """Train, and return the mean reward of each iteration, 0 to 1, on every rank."""
    numbers = {"iterations": 30, "batch": 32, "layers": 2, "width": 64, "heads": 2, "context": 12, "vocab": 16}
    args = arguments(__doc__, **numbers, lr=3e-3).parse_args(given)
    names = ("vocab", "layers", "width", "heads", "context")
    config = GPTConfig(**{name: getattr(args, name) for name in names})
    rewards = []
    with launched(args.device) as ranks:
        roles = Roles(ranks)
        model = optimizer = None
        torch.manual_seed(args.seed)
        if roles.trains:
            policy = Policy(config).to(ranks.device)
            # Also where only one process trains, it shards over no other.
            model = graph_fsdp.compile(policy, roles.mesh, backend=args.backend)
            optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        engine = Engine(config, ranks.device) if roles.generates else None
        draws = torch.Generator().manual_seed(args.seed)
        for iteration in range(1, args.iterations + 1):
            weights_to(engine, model, roles)
            tokens = torch.empty(args.batch, args.context, dtype=torch.long, device=ranks.device)
            if engine is not None:
                tokens = engine.generate(args.batch, draws)
            if ranks.world > 1:
                dist.broadcast(tokens, src=ranks.world - 1)
            reward = (tokens[:, 1:] % 2 == 0).float().mean(dim=1)
            rewards.append(reward.mean().item())
            ranks.say(f"iteration {iteration} reward {rewards[-1]:.3f}")
            if model is not None and optimizer is not None:
                advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
                mine = slice(ranks.rank, None, roles.trainers)
                model(tokens[mine].contiguous(), advantages[mine].contiguous()).backward()
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    return rewards


if __name__ == "__main__":
    run()
