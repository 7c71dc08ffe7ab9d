"""A mixture of experts that drops no token: how many an expert gets depends on the tokens, and so do the sizes of the
all-to-alls that exchange them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


class Experts(nn.Module):
    """``forward`` takes ``[tokens, width]`` in the order of the experts here, and how many there are for each."""

    def __init__(self, count: int, width: int, *, grouped: bool) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, width, 2 * width) / width**0.5)
        self.w2 = nn.Parameter(torch.randn(count, 2 * width, width) / width**0.5)
        self.grouped = grouped

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        w1, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        if self.grouped:
            ends = counts.cumsum(0).to(torch.int32)
            hidden = torch.relu(torch._grouped_mm(tokens.bfloat16(), w1.bfloat16(), offs=ends))
            return torch._grouped_mm(hidden, w2.bfloat16(), offs=ends).to(tokens.dtype)
        parts = torch.split(tokens, counts.tolist())
        return torch.cat([torch.relu(part @ w1[i]) @ w2[i] for i, part in enumerate(parts)])


class Layer(nn.Module):
    """Each token goes to the expert that its router chooses. Nothing chooses the last expert."""

    def __init__(self, count: int, width: int, *, grouped: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, count)
        self.experts = Experts(count, width, grouped=grouped)
        self.group: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(self.norm(x))[:, :-1].softmax(-1)
        weight, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.nn.functional.one_hot(chosen, self.router.out_features).sum(0)
        tokens = x[order]
        out = self.experts(tokens, counts) if self.group is None else self._exchanged(tokens, counts)
        return x + torch.zeros_like(x).index_add(0, order, out) * weight[:, None]

    def _exchanged(self, tokens: Tensor, counts: Tensor) -> Tensor:
        group, ranks = self.group, self.group.size()
        sent = counts.view(ranks, -1)
        got = all_to_all_single_autograd(sent, None, None, group)  # [rank, own expert]
        sent_sizes, got_sizes = sent.sum(1).tolist(), got.sum(1).tolist()
        tokens = all_to_all_single_autograd(tokens, got_sizes, sent_sizes, group)
        # From the order of ranks to that of experts: sorted by expert, stable.
        expert = torch.arange(got.numel(), device=got.device) % got.shape[1]
        order = expert.repeat_interleave(got.flatten(), output_size=tokens.shape[0]).argsort(stable=True)
        out = self.experts(tokens[order], got.sum(0))
        back = torch.zeros_like(out).index_copy(0, order, out)
        return all_to_all_single_autograd(back, sent_sizes, got_sizes, group)


class MoE(nn.Module):
    def __init__(self, count: int, width: int = 16, layers: int = 2, *, grouped: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(count, width, grouped=grouped) for _ in range(layers))
        self.head = nn.Linear(width, width)

    def distribute(self, mesh: DeviceMesh) -> MoE:
        """Divide the experts over ``mesh``, of one dimension."""
        for layer in self.layers:
            layer.group = mesh
            for name, p in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
