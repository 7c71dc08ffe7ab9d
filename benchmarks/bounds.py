"""What no step of fully sharded training takes less than: its computing alone, and its bytes alone.

``Compute`` is the plain model under torch.compile, forward and backward, and AdamW over this rank's share of each
parameter. ``Link`` moves what FSDP moves, and computes nothing: each block and the rest of the model is gathered for
forward, each block again for backward (the rest stays gathered), and each is reduced; a message a block, the next one
launched before the last one has ended. The larger of the two is a bound where communication costs the cores that
compute nothing. gloo on one machine moves bytes with these cores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from implementations import Implementation, Setup, local
from torch import Tensor, nn
from training import Trainer
from workloads import Workload

from graph_fsdp.compat.distributed import all_gather_single, reduce_scatter_single


class Compute(Trainer):
    """Trains a part of each parameter: what it computes is no training, and takes as long."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        super().__init__(Implementation("", local, alone=True), workload, setup)
        self._whole = list(self.model.parameters())
        self._parts = [nn.Parameter(self._part(p.detach())) for p in self._whole]
        self.optimizer = torch.optim.AdamW(self._parts, lr=0.0, fused=True)

    @staticmethod
    def _part(whole: Tensor) -> Tensor:
        return whole.flatten().tensor_split(dist.get_world_size())[dist.get_rank()]

    def update(self) -> None:
        for whole, part in zip(self._whole, self._parts, strict=True):
            assert whole.grad is not None
            part.grad, whole.grad = self._part(whole.grad), None
        super().update()


class Link:
    """Sends the messages of a step, each in memory of its own that stays."""

    def __init__(self, workload: Workload, setup: Setup) -> None:
        model, ranks = workload.make(setup.device), setup.mesh.size()
        blocks = [sum(p.numel() for p in block.parameters()) for block in setup.blocks(model)]
        rest = sum(p.numel() for p in model.parameters()) - sum(blocks)
        gathered, reduced = (dtype or torch.float32 for dtype in (setup.policy.param_dtype, setup.policy.reduce_dtype))

        def memory(numel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            shard = torch.zeros(-(-numel // ranks), dtype=dtype, device=setup.device)
            return shard, shard.repeat(ranks)

        def gather(numel: int) -> Callable[..., dist.Work]:
            shard, whole = memory(numel, gathered)
            return partial(all_gather_single, whole, shard)

        def reduce(numel: int) -> Callable[..., dist.Work]:
            return partial(reduce_scatter_single, *memory(numel, reduced))

        gathers = [gather(numel) for numel in (rest, *blocks, *reversed(blocks))]
        self.launches = [*gathers, *(reduce(numel) for numel in (*reversed(blocks), rest))]
        self._group = setup.mesh.get_group()

    def step(self) -> None:
        started: list[dist.Work] = []
        for launch in self.launches:
            started.append(launch(group=self._group, async_op=True))
            if len(started) > 1:
                started.pop(0).wait()
        started.pop().wait()


BOUNDS = {"compute": Compute, "link": Link}
